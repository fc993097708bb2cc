"""Second derivatives of compiled code under DistributedDataParallel, whose hooks reduce gradients
as they are accumulated.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from higher_order_cases import IGNORED, compiled, numbers
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
    *IGNORED,
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()),
        reason="torch was built without gloo",
    ),
]
# With static_graph=True DDP itself does not reduce the first step's gradients, in eager mode too.
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "around the compiled module": lambda net: DistributedDataParallel(compiled(net)),
    "inside of it": DistributedDataParallel,
}


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def step(net: nn.Module, score: Any, x: Tensor) -> list[Tensor]:
    """The parameters' gradients of a penalty on the input's gradient."""
    net.zero_grad()
    x = x.detach().requires_grad_()
    y = score(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    ((slope.norm(dim=1) - 1).square().mean() + y.square().mean()).backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("way", WAYS)
def test_each_gradient_is_reduced_once(way: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()
    wrapped = deepcopy(net)
    parallel = WAYS[way](wrapped)
    reduced: list[int] = []

    def doubled(_: Any, bucket: Any) -> Any:
        reduced.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    # DDP reads them, and not as text.
    doubled.__annotations__ = {"bucket": distributed.GradBucket}
    parallel.register_comm_hook(None, doubled)
    score = compiled(parallel) if way == "inside of it" else parallel
    for _ in range(2):
        x = numbers(5, 6)
        right, found = step(net, net, x), step(wrapped, score, x)
        assert len(found) == len(right) == 6
        for ours, eager in zip(found, right, strict=True):
            torch.testing.assert_close(ours, 2 * eager, rtol=1e-9, atol=1e-12)
    count = sum(parameter.numel() for parameter in net.parameters())
    assert sum(reduced) == 2 * count
