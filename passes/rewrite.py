"""Puts a fused op in place of a region's nodes, and keeps the graph in order."""

from __future__ import annotations

import heapq
import operator
from typing import TYPE_CHECKING

import sympy
import torch

from normpass.passes.domain import extent_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, Node

    from normpass.passes.lower import Lowered

KEPT_META = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "partitioner_tag")


class SizeUnknown(Exception):
    """A run-time size that no tensor of the region tells; the message is the reason."""


def put(graph: Graph, nodes: Sequence[Node], lowered: Lowered, op: Callable[..., object]) -> Node:
    """Replaces the nodes of a region by one call of `op(inputs, sizes, text)`. Returns that call.

    Raises:
        SizeUnknown: before anything was changed.
    """
    plans = [_find_size(size, graph, lowered.inputs) for size in lowered.sizes]
    with graph.inserting_after(nodes[-1]):
        call = graph.create_node("call_function", op)
    with graph.inserting_before(call):
        sizes = [plan() for plan in plans]
    call.args = (list(lowered.inputs), sizes, str(lowered.region))
    call.meta = {key: nodes[-1].meta[key] for key in KEPT_META if key in nodes[-1].meta}
    call.meta["val"] = [node.meta["val"] for node in lowered.outputs]
    after = call
    for k, node in enumerate(lowered.outputs):
        with graph.inserting_after(after):
            item = graph.call_function(operator.getitem, (call, k))
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item)
        after = item
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
    sort(graph)
    return call


def _find_size(size: sympy.Expr, graph: Graph, inputs: Sequence[Node]) -> Callable[[], Node | int]:
    """How to compute a run-time size in the graph: a node that has it, or a tensor's dimension or
    stride.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.SymInt) and value.node.expr == size:
            return lambda node=node: node  # type: ignore[misc]
    for tensor in inputs:
        for op, values in (
            (torch.ops.aten.sym_size.int, tensor.meta["val"].shape),
            (torch.ops.aten.sym_stride.int, tensor.meta["val"].stride()),
        ):
            for dim, value in enumerate(values):
                quotient = sympy.cancel(extent_of(value) / size)
                if quotient.is_Integer and quotient > 0:
                    return _measure(graph, op, tensor, dim, int(quotient), value)
    raise SizeUnknown(f"the size {size} is neither an input's dimension nor its stride")


def _measure(
    graph: Graph,
    op: Callable[..., int],
    tensor: Node,
    dim: int,
    divisor: int,
    value: int | torch.SymInt,
) -> Callable[[], Node | int]:
    def build() -> Node:
        size = graph.call_function(op, (tensor, dim))
        size.meta["val"] = value
        if divisor == 1:
            return size
        quotient = graph.call_function(operator.floordiv, (size, divisor))
        quotient.meta["val"] = value // divisor
        return quotient

    return build


def sort(graph: Graph) -> None:
    """Puts nodes after what they read, changing their order as little as possible. Writes in place
    keep their rank: they stand after everything that stood before them.
    """
    position = {node: k for k, node in enumerate(graph.nodes)}
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [position[node] for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    by_position = list(graph.nodes)
    last: Node | None = None
    while ready:
        node = by_position[heapq.heappop(ready)]
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, position[user])
