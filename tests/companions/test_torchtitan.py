"""torchtitan: its Llama 3, compiled by its own `apply_compile`. It brings wandb, tensorboard and
pyarrow, so that `make companions` does not install it; its loop without it is
test_block_by_block.py's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from companions.loops import assert_fused, assert_same_training, weights
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import normpass

_INIT, REASON = (
    FakeTensorMode.__init__,
    "torchtitan, or something that it imports, is not installed",
)
config = pytest.importorskip("torchtitan.config", reason=REASON, exc_type=ImportError)
llama3 = pytest.importorskip("torchtitan.models.llama3", reason=REASON, exc_type=ImportError)
attention = pytest.importorskip("torchtitan.models.common.attention", reason=REASON)
distributed = pytest.importorskip("torchtitan.distributed.compile", reason=REASON)
_THEIRS, FakeTensorMode.__init__ = FakeTensorMode.__init__, _INIT  # type: ignore[method-assign]

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

# Of torch and of torchtitan, none of them about what is tested here.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_trace() -> Iterator[None]:
    """torchtitan replaces a method of torch's when it is imported, and sets options of Dynamo's."""
    config = torch._dynamo.config
    names = ("capture_scalar_outputs", "skip_fwd_side_effects_in_bwd_under_checkpoint")
    FakeTensorMode.__init__ = _THEIRS  # type: ignore[method-assign]
    with config.patch({name: getattr(config, name) for name in names}):
        yield
    FakeTensorMode.__init__ = _INIT  # type: ignore[method-assign]


def model(flex: bool = False) -> Any:
    """Two blocks of its model for debugging, in float64. Its masks are FlexAttention's, which has
    no backward on CPUs.
    """
    torch.manual_seed(0)
    settings = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    settings.layers = settings.layers[:2]
    for layer in settings.layers if not flex else ():
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    made: nn.Module = settings.build()
    made.init_states()  # type: ignore[operator]
    return made.double()


def compile_blocks(net: nn.Module, backend: str) -> None:
    distributed.apply_compile(
        net,
        compile_config=config.CompileConfig(enable=True, backend=backend),
        parallel_dims=SimpleNamespace(tp_enabled=False),
    )


def train(backend: str | None, batch: int = 2) -> dict[str, Tensor]:
    net = model()
    if backend:
        compile_blocks(net, backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tokens = torch.arange(2048).repeat(2)[: 128 * batch].view(batch, 128)
    for step in range(2):
        logits = net((tokens + step) % 2048)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def test_training() -> None:
    right, found = train(None), train("normpass")
    assert_same_training(found, right, weights(model()))
    assert_fused()
    assert not counters["graph_break"]


def test_training_with_the_rules_registered() -> None:
    """Norms that are large enough to be fused without being told to."""
    right = train(None, 16)
    with normpass.registered():
        found = train("inductor", 16)
    assert_same_training(found, right, weights(model()))
    assert_fused()


def test_its_flex_attention_is_for_inductor_alone() -> None:
    """Once it takes other backends, docs/companions.md has a shorter line to show."""
    with pytest.raises(ValueError, match="FlexAttention but compile backend 'normpass'"):
        compile_blocks(model(flex=True), "normpass")
    compile_blocks(model(flex=True), "inductor")
