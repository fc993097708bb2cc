"""torchtune: its models, its checkpoints and its way to compile both. Its last release, 0.6.1,
needs torchao 0.13 or older, so that `make companions` has none of it; its loop without it is
test_block_by_block.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from companions.loops import assert_fused, assert_same_training, weights

REASON = "torchtune is not installed, or not with torchao 0.13 or older, or with no torchdata"
training = pytest.importorskip("torchtune.training", reason=REASON, exc_type=ImportError)
models = pytest.importorskip("torchtune.models.llama3_2", reason=REASON, exc_type=ImportError)
modules = pytest.importorskip("torchtune.modules", reason=REASON, exc_type=ImportError)
losses = pytest.importorskip("torchtune.modules.loss", reason=REASON, exc_type=ImportError)

if TYPE_CHECKING:
    from torch import Tensor, nn

# Of torch and of torchtune, none of them about what is tested here.
pytestmark = pytest.mark.filterwarnings("default")

VOCABULARY, LENGTH = 61, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = models.llama3_2(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=16,
        max_seq_len=LENGTH,
        intermediate_dim=32,
    )
    return made.double()


def train(compiled: bool, recomputed: bool) -> dict[str, Tensor]:
    net, loss = model(), losses.CEWithChunkedOutputLoss(num_output_chunks=2)
    net.set_num_output_chunks(2)
    if recomputed:
        blocks = {modules.TransformerSelfAttentionLayer}
        training.set_activation_checkpointing(net, auto_wrap_policy=blocks)
    if compiled:
        training.compile_model(net, verbose=False)
        training.compile_loss(loss, verbose=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        loss(net(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_training(recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses and norms compute in float32 whatever they are given."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "normpass")
    right = train(False, recomputed)
    found = train(True, recomputed)
    assert_same_training(found, right, weights(model()), 1e-6)
    assert_fused()
