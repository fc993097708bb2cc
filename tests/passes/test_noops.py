"""x / 1 and x * 1: taken out where nobody can tell, kept where somebody could."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from tracing import calls, fused, trace

from normpass.passes.noops import SCALED, remove_noops

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
X = torch.linspace(-2, 3, 6 * 40, dtype=torch.float64).view(6, 40).sin()


def left(function: Callable[..., Any], *inputs: Tensor) -> int:
    """How many scalings a graph has afterwards; it computes what it did."""
    graph = trace(function, *inputs)
    expected = graph(*inputs)
    remove_noops(graph.graph)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*inputs), expected, rtol=0, atol=0)
    return sum(len(calls(graph, target)) for target in SCALED)


@pytest.mark.parametrize("factor", [1, 1.0, True])
def test_it_is_taken_out(factor: float) -> None:
    assert left(lambda x: (x * factor).exp(), X) == 0
    assert left(lambda x: (x / factor).exp(), X) == 0
    assert left(lambda x: (x.exp() / factor * factor).view(-1).sum(), X) == 0
    assert left(lambda x: (x / factor).split(3)[1].exp(), X) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / 2,
        lambda x: (x * 1.0000001).exp(),
        lambda x: (1 / x).exp() * 2,
    ],
)
def test_what_changes_something_stays(function: Callable[..., Any]) -> None:
    assert left(function, X) > 0


def test_another_dtype_stays() -> None:
    assert left(lambda x: (x * 1.0).exp(), torch.arange(5)) == 1
    assert left(lambda x: (x / 1).exp(), torch.arange(5)) == 1
    assert left(lambda x: (x * 1).exp(), X > 0) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 1,
        lambda x: (x * 1).view(40, 6),
        lambda x: (x * 1)[2:4],
        lambda x: (x * 1).split(3)[1].mT,
    ],
)
def test_the_callers_copy_is_a_copy(function: Callable[..., Any]) -> None:
    """He may write to it, or to x."""
    assert left(function, X) == 1


def test_a_copy_from_before_x_was_written_to_stays() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    copy = graph.call_function(aten.mul.Tensor, (x, 1))
    written = graph.call_function(aten.copy_.default, (x, graph.call_function(aten.exp, (x,))))
    for node in (x, copy, written):
        node.meta["val"] = X
    graph.output(graph.call_function(aten.add.Tensor, (copy, written)))
    remove_noops(graph)
    assert copy in graph.nodes


def test_a_region_reads_x_alone() -> None:
    """A residual block that divides by its scale of 1."""

    def block(x: Tensor, y: Tensor) -> Tensor:
        z = (x + y) / 1.0
        return F.layer_norm(z, (40,)) + z

    (region,) = fused(block, X, X.cos())
    assert all(op.fn != "div" or 1.0 not in op.args for op in region.ops)


# ---- as_strided


@pytest.mark.parametrize(
    ("function", "reshaped"),
    [
        (lambda x: x.exp().as_strided((40, 6), (6, 1)).sin(), True),
        (lambda x: x.exp().as_strided((2, 3, 40), (120, 40, 1)), True),
        (lambda x: x.as_strided((240,), (1,)).sin(), True),
        (lambda x: x.exp().as_strided((6, 40), (40, 1), 0).sin(), True),
        (lambda x: aten.as_strided(x.exp(), (8, 30), (30, 1), storage_offset=0).sin(), True),
        (lambda x: x.exp().as_strided((5, 40), (40, 1), 0).sin(), False),
        (lambda x: x.exp().as_strided((5, 40), (40, 1), 40).sin(), False),
        (lambda x: x.exp().as_strided((40, 6), (1, 40)).sin(), False),
        (lambda x: x.exp().as_strided((6, 40), (0, 1)).sin(), False),
        (lambda x: x.mT.exp().as_strided((6, 40), (40, 1)).sin(), False),
        (lambda x: x[2:].as_strided((4, 40), (40, 1), 80).sin(), False),
    ],
)
def test_as_strided_that_is_a_reshape(function: Callable[..., Any], reshaped: bool) -> None:
    graph = trace(function, X)
    expected = graph(X)
    remove_noops(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(X), expected, rtol=0, atol=0)
    assert len(calls(graph, aten.as_strided.default)) == (not reshaped)
