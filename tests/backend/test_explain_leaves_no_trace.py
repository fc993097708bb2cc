"""`normpass.explain` leaves tensors, generators, graphs and compiled functions alone."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normpass
from normpass.decomps import torch_versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Dynamo looks at the gradients of what a graph break or a closure hands it, leaf or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# What is refused as too small compiles no kernel.
LOOK: dict[str, Any] = {"inner": "eager"}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scaled_by_chance(x: Tensor) -> Tensor:
    return x * random.random()


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.linear(x)))
        torch._dynamo.graph_break()
        return scaled_by_chance(x) + 1


def test_the_users_tensors_and_generators_stay_as_they_are() -> None:
    net, x = Stateful(), torch.randn(4, 8, requires_grad=True)
    net.linear.weight.grad = torch.ones(8, 8)
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers()), "x": x}
    values = {name: (t.detach().clone(), t._version) for name, t in tensors.items()}
    states = torch.get_rng_state(), random.getstate()
    normpass.explain(net, x, options=LOOK)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for name, now in {**dict(net.named_parameters()), **dict(net.named_buffers()), "x": x}.items():
        assert now is tensors[name]
        assert torch.equal(now, values[name][0])
        assert now._version == values[name][1]
    assert x.grad is None
    assert net.linear.bias.grad is None
    assert torch.equal(net.linear.weight.grad, torch.ones(8, 8))


def test_the_first_look_draws_no_random_numbers() -> None:
    """In a process of its own: what is imported there for the first time must not either."""
    program = (
        "import random, torch, normpass\n"
        "from torch.nn import functional as F\n"
        "state = random.getstate()\n"
        "norm = lambda x: F.layer_norm(x, (4,))\n"
        f"report = normpass.explain(norm, torch.ones(2, 4), options={LOOK})\n"
        "assert 'too small' in str(report)\n"
        "assert random.getstate() == state\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_arguments_written_in_place_are_copies() -> None:
    def f(x: Tensor) -> Tensor:
        return F.layer_norm(x.add_(1), (8,))

    x = torch.zeros(4, 8)
    normpass.explain(f, x, options=LOOK)
    assert torch.equal(x, torch.zeros(4, 8))


@pytest.mark.parametrize("closed_over", [False, True])
def test_graphs_of_the_caller_can_still_run_backward(closed_over: bool) -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    hidden = leaf.exp()
    if closed_over:
        report = normpass.explain(
            lambda x: F.layer_norm(x * hidden, (8,)), torch.randn(4, 8), options=LOOK
        )
    else:
        report = normpass.explain(lambda x: F.layer_norm(x, (8,)), hidden, options=LOOK)
    assert {refused.phase for refused in report.refused} == {"forward", "backward"}
    assert leaf.grad is None
    hidden.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, leaf.exp())


def test_compiled_functions_of_the_caller_stay_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    net, x = Stateful(), torch.randn(4, 8)
    fast = torch.compile(net, backend=counting)
    fast(x)
    before = compiled
    with caplog.at_level(logging.WARNING):
        reports = [normpass.explain(net, x, options=LOOK) for _ in range(10)]
    fast(x)
    assert compiled == before > 0
    assert "recompile_limit" not in caplog.text
    assert {str(report) for report in reports} == {str(reports[0])}


@pytest.mark.parametrize("explanations", [0, 3])
def test_recompilations_of_the_caller_stay_his(explanations: int) -> None:
    """torch 2.11 counts an explanation of a function with graph breaks among them."""
    compiled = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    for _ in range(explanations):
        normpass.explain(broken, torch.ones(4, 8), options=LOOK)
    fast = torch.compile(broken, backend=counting, dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    for size in range(limit + 2):
        fast(torch.ones(4, 9 + size))
    counted = explanations if torch_versions.RELEASE <= (2, 11) else 0
    assert compiled == 2 * (limit - counted)


def test_caches_do_not_hide_the_passes(fresh_cache: Path) -> None:
    """What was compiled before, with Inductor's and AOTAutograd's caches filled, is seen again."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    torch.compile(net, backend="normpass")(x).sum().backward()
    torch._dynamo.reset()
    settings = torch._functorch.config.enable_autograd_cache
    report = normpass.explain(net, x)
    assert [(r.module, r.phase) for r in report.refused] == [("1", "forward"), ("1", "backward")]
    assert [graph.phase for graph in report.graphs] == ["forward", "backward"]
    assert torch._functorch.config.enable_autograd_cache == settings
