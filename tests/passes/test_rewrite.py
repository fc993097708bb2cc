"""What a graph looks like after a region was put in: valid, in order, with its metadata."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from tracing import calls, fuse, trace

from normpass.backend.run.op import region_op
from normpass.passes.pipeline import Fused
from normpass.passes.region import Region
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, GraphModule

aten = torch.ops.aten
X = torch.linspace(-2, 3, 6 * 40, dtype=torch.float64).view(6, 40).sin()


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def norm_between_products(x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x @ x.mT @ x, (40,))
    return (y @ y.mT).sum(), y.exp()


def in_order(graph: Graph) -> bool:
    seen = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return True


def fused_graph(dynamic: bool = False) -> GraphModule:
    graph = trace(norm_between_products, X, dynamic=dynamic)
    assert any(isinstance(decision, Fused) for decision in fuse(graph))
    return graph


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_graph_is_valid_and_in_order(dynamic: bool) -> None:
    graph = fused_graph(dynamic)
    graph.graph.lint()
    assert in_order(graph.graph)
    torch.testing.assert_close(graph(X), norm_between_products(X))


def test_results_keep_their_metadata() -> None:
    before = trace(norm_between_products, X)
    values = {node.name: node.meta["val"] for node in before.graph.nodes if "val" in node.meta}
    (decision,) = fuse(before)
    assert isinstance(decision, Fused)
    (call,) = calls(before, region_op)
    region = parse(decision.text)
    items = [user for user in call.users if user.target is operator.getitem]
    assert len(items) == len(call.meta["val"]) == len(region.outputs)
    for item, value, output in zip(items, call.meta["val"], region.outputs, strict=True):
        assert item.meta["val"] is value
        assert tuple(value.shape) == region.shape(output.buffer, region.extents([]))
        assert value.dtype is output.buffer.dtype
        assert any(value is known for known in values.values())


def test_the_nodes_of_a_region_are_gone() -> None:
    graph = fused_graph()
    left = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert not left & {
        aten.var_mean.correction,
        aten.mean.dim,
        aten.rsqrt.default,
        aten.exp.default,
    }


def test_provenance_is_kept() -> None:
    graph = trace(centred, X)
    last = next(n for n in graph.graph.nodes if n.target == aten.sub.Tensor)
    last.meta["stack_trace"] = 'File "model.py", line 7, in forward'
    last.meta["seq_nr"] = 11
    fuse(graph)
    (call,) = calls(graph, region_op)
    assert call.meta["stack_trace"] == 'File "model.py", line 7, in forward'
    assert call.meta["seq_nr"] == 11


def test_results_that_lie_otherwise_do_not_keep_old_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = trace(centred, X)
    last = next(n for n in graph.graph.nodes if n.target == aten.sub.Tensor)
    assert last.meta["tensor_meta"].stride == (40, 1)
    monkeypatch.setattr(Region, "whole_strides", lambda *_: (1, 6))
    fuse(graph)
    (item,) = (n for n in graph.graph.nodes if n.target is operator.getitem)
    assert item.meta["val"].stride() == (1, 6)
    assert "tensor_meta" not in item.meta


def test_run_time_sizes_are_read_off_tensors() -> None:
    """One kernel for all sizes: the call takes them from the shapes of the tensors it reads."""
    graph = trace(lambda x: centred(x.t()), X, dynamic=True)
    fuse(graph)
    (call,) = calls(graph, region_op)
    sizes = call.args[1]
    assert len(sizes) == len(parse(call.args[2]).runtime_sizes) >= 2
    for shape in ((6, 40), (3, 7), (40, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(graph(x), centred(x.t()))


def test_run_time_strides_are_read_off_tensors() -> None:
    x = torch.randn(6, 2, 40, dtype=torch.float64)
    graph = trace(lambda x: centred(x[:, 0]), x, dynamic=True)
    fuse(graph)
    for shape in ((6, 2, 40), (5, 3, 7)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(graph(x), centred(x[:, 0]))


def test_multiples_of_a_run_time_size() -> None:
    """[s, 4] as [s * 2, 2]: the extent of an axis is a part of an input's dimension."""

    def halves(x: Tensor) -> Tensor:
        return centred(x.view(x.shape[0], 2, 20)).view(x.shape[0] * 2, 20)

    graph = trace(halves, X, dynamic=True)
    fuse(graph)
    for n in (6, 2, 9):
        x = torch.randn(n, 40, dtype=torch.float64)
        torch.testing.assert_close(graph(x), halves(x))


def test_readers_between_the_nodes_of_a_region_move_behind_it() -> None:
    """What reads one result and stands before the region's last node has to follow the call."""

    def interleaved(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = centred(x)
        z = y @ w
        return z, y * 2 + x, (y * y).mean(-1)

    w = torch.randn(40, 3, dtype=torch.float64)
    graph = trace(interleaved, X, w)
    expected = graph(X, w)
    fuse(graph)
    assert in_order(graph.graph)
    torch.testing.assert_close(graph(X, w), expected)


def test_several_regions_in_one_graph() -> None:
    def deep(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.layer_norm(x @ x.mT @ x, (40,)) + x
        return x

    graph = trace(deep, X)
    assert [type(decision) for decision in fuse(graph)] == [Fused] * 3
    assert in_order(graph.graph)
    texts = {call.args[2] for call in calls(graph, region_op)}
    assert len(texts) <= 2, "equal regions have equal texts, so that they share one kernel"
    torch.testing.assert_close(graph(X), deep(X), rtol=1e-6, atol=1e-8)


def test_fusing_twice_changes_nothing() -> None:
    graph = fused_graph()
    before = graph.code
    assert not fuse(graph)
    assert graph.code == before
