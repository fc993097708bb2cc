"""What becomes a region, and what looks like one and must not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from tracing import calls, functions, fuse, fused, trace

from normpass.backend.run.op import region_op
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

X = torch.linspace(-2, 3, 6 * 40, dtype=torch.float64).view(6, 40).sin()
Y = torch.linspace(-1, 2, 6 * 40, dtype=torch.float64).view(6, 40).cos()


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


# ---- near misses: nothing here may be fused

MISSES: dict[str, Callable[[Tensor], object]] = {
    "a sum that nobody reads back": lambda x: x.sum(-1),
    "a sum that is broadcast over other axes": lambda x: x.sum(-1, keepdim=True) + x[:1, :1],
    "a running sum": lambda x: x - x.cumsum(-1),
    "a sort": lambda x: x - x.sort(-1).values,
    "integers": lambda x: (x * 8).long() - (x * 8).long().sum(-1, keepdim=True),
    "complex numbers": lambda x: torch.complex(x, x) - torch.complex(x, x).sum(-1, keepdim=True),
    "a matrix product between": lambda x: (
        x - (x.sum(-1, keepdim=True).T @ x).sum() * x.new_ones(())
    ),
    "an index of the largest": lambda x: x - x.argmax(-1, keepdim=True).double(),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_stay_as_they_are(name: str) -> None:
    graph = trace(MISSES[name], X)
    expected = graph(X)
    fused_regions = [d for d in fuse(graph) if isinstance(d, Fused)]
    if name == "a matrix product between":
        # Each side may be a region of its own; none may reach across the product.
        assert all("mm" not in node for d in fused_regions for node in d.nodes)
    else:
        assert not fused_regions
        assert not calls(graph, region_op)
    torch.testing.assert_close(graph(X), expected)


def test_randomness_stays_outside() -> None:
    graph = trace(lambda x: centred(x) * (torch.rand_like(x) > 0.5), X)
    (decision,) = fuse(graph)
    assert isinstance(decision, Fused)
    assert not any("rand" in node for node in decision.nodes)


def test_a_write_in_place_is_not_crossed() -> None:
    """x is read before and after it is overwritten: one region over both would read it too late."""
    graph = trace(lambda x, y: (centred(x), centred(y)), X, Y).graph
    nodes = list(graph.nodes)
    x, y = nodes[:2]
    first = next(n for n in nodes if n.op == "call_function" and x in n.all_input_nodes)
    last = next(n for n in reversed(nodes) if n.op == "call_function" and x in n.all_input_nodes)
    assert first is not last
    with graph.inserting_before(last):
        write = graph.call_function(torch.ops.aten.copy_.default, (x, y))
    write.meta["val"] = x.meta["val"]
    module = torch.fx.GraphModule({}, graph)
    a, b = X.clone(), Y.clone()
    expected = module(a.clone(), b.clone())
    for decision in fuse(module):
        assert not {first.name, last.name} <= set(getattr(decision, "nodes", ()))
    torch.testing.assert_close(module(a, b), expected)


def test_a_path_that_leaves_and_comes_back_is_not_fused_across() -> None:
    """The matrix product reads what the region writes and feeds it again: two regions, no cycle."""

    def diamond(x: Tensor) -> Tensor:
        y = rms(x)
        return rms(y + y @ y.mT @ y)

    graph = trace(diamond, X)
    expected = graph(X)
    decisions = [d for d in fuse(graph) if isinstance(d, Fused)]
    assert len(decisions) == 2
    torch.testing.assert_close(graph(X), expected)


# ---- what comes along


def test_neighbours_are_taken_in() -> None:
    """Residual adds, casts and activations beside the norm read and write nothing of their own."""

    def block(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(rms((x + y).float())).sigmoid().double()

    (region,) = fused(block, X, Y)
    assert {"add", "rsqrt", "maximum", "sigmoid"} <= functions(region)
    assert len(region.inputs) == 2
    assert [o.buffer.dtype for o in region.outputs] == [torch.float64]


def test_sums_over_rows_join_the_norm_they_share_tensors_with() -> None:
    def backward(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return g - x * (g * x).mean(-1, keepdim=True), (g * x).sum(0), g.sum(0)

    (region,) = fused(backward, X, Y)
    assert sorted(op.axes for op in region.ops if op.is_reduction) == [("c",), ("r",), ("r",)]
    assert len(region.outputs) == 3


def test_two_norms_in_a_row_are_one_region() -> None:
    (region,) = fused(lambda x: rms(centred(x)), X)
    assert sum(op.is_reduction for op in region.ops) == 2


def test_double_backward_is_one_region() -> None:
    def double(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            grad = torch.func.grad(lambda x: (F.layer_norm(x, (40,), weight) * y).sum())(x)
            return (grad * y.sin()).sum()

        return torch.func.grad(inner)(x)

    functional = torch.func.functionalize(double)
    regions = fused(functional, X, Y, torch.ones(40, dtype=torch.float64))
    assert len(regions) == 1, "\n\n".join(map(str, regions))
    (region,) = regions
    assert sum(op.is_reduction for op in region.ops) >= 6


def test_what_the_graph_returns_twice_is_written_twice() -> None:
    """Callers may write into each result, so equal results stay apart."""
    graph = trace(lambda x: (centred(x) * 1.0, centred(x)), X)
    fuse(graph)
    a, b = graph(X)
    assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_split_axes(dynamic: bool) -> None:
    """Groups of channels: [n, c] is read as [n, g, d] without a copy."""

    def grouped(x: Tensor) -> Tensor:
        return centred(x.view(x.shape[0], 5, 8)).view(x.shape[0], 40)

    (region,) = fused(grouped, X, dynamic=dynamic)
    assert [len(dim) for dim in region.inputs[0].dims] == [1, 1, 1] or [
        len(dim) for dim in region.inputs[0].dims
    ] == [1, 2]
