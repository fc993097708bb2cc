"""Puts a fused op in place of a region's nodes, and keeps the graph in order."""

from __future__ import annotations

import heapq
import operator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import sympy
import torch

from normpass.passes.domain import extent_of, step_of
from normpass.passes.names import telling
from normpass.passes.regions import BACKWARD_TAGS, is_collective
from normpass.passes.sizes import hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Graph, Node

    from normpass.passes.lower import Lowered

prims = torch.ops.prims

# What passes of others read off a node, and torch's own replacements of nodes keep: where it is in
# the user's program, and what stages of the compiler noted.
ORIGIN = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "fwd_nn_module_stack",
    "fwd_source_fn_stack",
    "original_aten",
    "custom",
    "seq_nr",
)
NOTES = ("partitioner_tag", "autograd_backward", "recompute", "ac_graph_id")


class SizeUnknown(Exception):
    """A run-time size that no tensor of the region tells."""

    def __init__(self, size: sympy.Expr) -> None:
        super().__init__(f"the size {size} is neither an input's dimension nor its stride")
        self.size = size


def put(graph: Graph, nodes: Sequence[Node], lowered: Lowered, op: Callable[..., object]) -> Node:
    """Replaces the nodes of a region by one call of `op(inputs, sizes, text)`. Returns that call.

    Whatever is raised, the graph is then as it was before.

    Raises:
        SizeUnknown: for a run-time size that cannot be read anywhere.
    """
    measures = [locate(size, lowered.inputs) for size in lowered.sizes]
    with _undone_on_failure(graph, lowered):
        call = _insert(graph, nodes, lowered, op, measures)
        sort(graph)
    _erase_unused(graph, nodes)
    return call


def _erase_unused(graph: Graph, nodes: Sequence[Node]) -> None:
    """Erases those of these nodes that nobody needs, and what only they needed: a region may have
    found that it does not read all that its nodes did.
    """
    waiting, erased = list(nodes), set()
    while waiting:
        node = waiting.pop()
        unused = node not in erased and not node.users and node.op == "call_function"
        if unused and not node.is_impure():
            waiting += node.all_input_nodes
            erased.add(node)
            graph.erase_node(node)


def _insert(
    graph: Graph,
    nodes: Sequence[Node],
    lowered: Lowered,
    op: Callable[..., object],
    measures: Sequence[Measure],
) -> Node:
    """The call, after the region's last node or before the first collective that waits for it, and
    its results in place of the region's.
    """
    last = nodes[-1]
    waiting = _first_collective_behind(graph, nodes)
    with graph.inserting_before(waiting) if waiting else graph.inserting_after(last):
        call = graph.create_node("call_function", op)
    with graph.inserting_before(call):
        sizes = [_read(graph, measure) for measure in measures]
        pairs = zip(lowered.inputs, lowered.region.inputs, strict=True)
        inputs = [_converted(graph, node, buffer.dtype) for node, buffer in pairs]
    call.args = (inputs, sizes, str(lowered.region))
    call.meta = _provenance(nodes)
    call.meta["val"] = _results(lowered, [measure.size for measure in measures])
    after, items = call, {}
    for k, node in enumerate(lowered.outputs):
        with graph.inserting_after(after):
            item = graph.call_function(operator.getitem, (call, k))
        item.meta = {**node.meta, **_phase(call), "val": call.meta["val"][k]}
        if item.meta["val"] is not node.meta["val"]:
            item.meta.pop("tensor_meta", None)  # it has the strides that no longer are
        node.replace_all_uses_with(item)
        items[node] = after = item
    for node, same in lowered.repeated:
        node.replace_all_uses_with(items[same])
    return call


def _first_collective_behind(graph: Graph, nodes: Sequence[Node]) -> Node | None:
    """The first collective that waits for one of these nodes, if it stands before the last."""
    if not any(map(is_collective, graph.nodes)):
        return None
    node, inside = nodes[0], set(nodes)
    behind = {node}
    while node is not nodes[-1]:
        node = node.next
        if node in inside or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            if is_collective(node):
                return node
    return None


def _provenance(nodes: Sequence[Node]) -> dict[str, Any]:
    """Of each kind what the last node says that says any; where it comes from the norm's own nodes
    say best, and all are its sources.
    """
    found = {}
    for kinds, asked in ((ORIGIN + NOTES, nodes), (ORIGIN, telling(nodes))):
        for node in asked:
            found.update({kind: node.meta[kind] for kind in kinds if kind in node.meta})
    if sources := {id(s): s for node in nodes for s in node.meta.get("from_node", ())}:
        found["from_node"] = [*sources.values()]
    if tags := BACKWARD_TAGS.intersection(node.meta.get("partitioner_tag") for node in nodes):
        found["partitioner_tag"] = min(tags)  # in a joint graph all of it waits for a tangent
    return found


def _phase(call: Node) -> dict[str, str]:
    """What a region of the backward makes of its results, also of those of the forward."""
    tag = call.meta.get("partitioner_tag")
    return {"partitioner_tag": tag} if tag in BACKWARD_TAGS else {}


def _converted(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    value = node.meta["val"]
    if value.dtype is dtype:
        return node
    converted = graph.call_function(prims.convert_element_type.default, (node, dtype))
    converted.meta["val"] = value.to(dtype)
    return converted


def _results(lowered: Lowered, sizes: Sequence[Any]) -> list[torch.Tensor]:
    """Examples of the results, with the strides that the region gives them."""
    region = lowered.region
    extents = region.extents(sizes)
    results = []
    for node, result in zip(lowered.outputs, region.results, strict=True):
        value, strides = node.meta["val"], region.whole_strides(result, extents)
        steps = zip(value.shape, value.stride(), strides, strict=True)
        if any(extent_of(n) != 1 and step_of(old) != step_of(new) for n, old, new in steps):
            value = value.new_empty_strided(value.shape, strides)
        results.append(value)
    return results


@contextmanager
def _undone_on_failure(graph: Graph, lowered: Lowered) -> Iterator[None]:
    """Takes back what was inserted if the block raises: nodes, uses, order."""
    order = list(graph.nodes)
    replaced = (*lowered.outputs, *(node for node, _ in lowered.repeated))
    uses = [(user, user.args, user.kwargs) for node in replaced for user in node.users]
    try:
        yield
    except BaseException:
        for user, args, kwargs in uses:
            user.args, user.kwargs = args, kwargs
        new = set(graph.nodes) - set(order)
        while unused := [node for node in new if not node.users]:
            for node in unused:
                graph.erase_node(node)
            new -= set(unused)
        for before, node in pairwise(order):
            before.append(node)
        raise


@dataclass(frozen=True)
class Measure:
    """Where a run-time size can be read: a number of the graph (no `op`), or a tensor's dimension
    or stride divided by a number.
    """

    node: Node
    value: int | torch.SymInt
    op: Callable[..., int] | None = None
    dim: int = 0
    divisor: int = 1

    @property
    def size(self) -> int | torch.SymInt:
        return self.value if self.divisor == 1 else self.value // self.divisor


def locate(size: sympy.Expr, inputs: Sequence[Node]) -> Measure:
    """Where a size can be read, given a region's inputs.

    Raises:
        SizeUnknown: if nowhere.
    """
    for node in inputs[0].graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size:
            return Measure(node, value)
    for node in inputs:
        for op, values, expression in (
            (torch.ops.aten.sym_size.int, node.meta["val"].shape, extent_of),
            (torch.ops.aten.sym_stride.int, node.meta["val"].stride(), step_of),
        ):
            for dim, value in enumerate(values):
                quotient = sympy.cancel(expression(value) / size)
                if quotient.is_Integer and quotient > 0:
                    return Measure(node, value, op, dim, int(quotient))
    raise SizeUnknown(size)


def examples(sizes: Sequence[sympy.Expr], inputs: Sequence[Node]) -> tuple[int, ...]:
    """A region's run-time sizes in the example that the graph was traced with.

    Raises:
        SizeUnknown: if one of them can be read nowhere.
    """
    measures = [locate(size, inputs) for size in sizes]
    return tuple(hint(measure.value) // measure.divisor for measure in measures)


def _read(graph: Graph, measure: Measure) -> Node:
    """The node that has a size."""
    if measure.op is None:
        return measure.node
    size = graph.call_function(measure.op, (measure.node, measure.dim))
    size.meta["val"] = measure.value
    if measure.divisor == 1:
        return size
    quotient = graph.call_function(operator.floordiv, (size, measure.divisor))
    quotient.meta["val"] = measure.size
    return quotient


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
