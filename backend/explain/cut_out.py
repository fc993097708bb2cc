"""A region's nodes as graphs of their own: what they were before the pass, and the call that stands
for them. Both take the same tensors and return the same, so that they can be compared.

    before the pass     x, w  ->  the nodes           ->  y      `stock`
    after it            x, w  ->  normpass.region     ->  y      `ours`

What is read and what is returned is known by marks, which the pass carries along: a call's results
have the notes of the nodes that they replace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph

from normpass.passes.one_hot import is_iota
from normpass.passes.sizes import hint
from normpass.passes.vocabulary import IDENTITY, Kind, kind_of, without_views

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.fx import Node

    from normpass.passes.pipeline import Fused

MARK = "normpass_explain_name"
NUMBERS = (int, torch.SymInt, torch.SymFloat, torch.SymBool)


class NotCutOut(Exception):
    """Why a region's nodes cannot be taken out of the graph."""


@dataclass(frozen=True)
class CutOut:
    """stock, ours: graphs with the same placeholders, in one order, each with its example value,
    and the same results, in one order. Sizes are those of the example.
    """

    stock: Graph
    ours: Graph


def marked_copy(graph: Graph) -> Graph:
    """A copy of a graph as it is now, whose nodes are marked: so are those it was copied from."""
    for node in graph.nodes:
        node.meta[MARK] = node.name
    copy = Graph()
    copy.graph_copy(graph, {})
    return copy


def unmark(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta.pop(MARK, None)


def cut_out(before: Graph, after: Graph, fused: Fused) -> CutOut:
    """Takes a region out of both.

    before: from `marked_copy`. after: the marked graph, in which the region is a call.

    Raises:
        NotCutOut: with the reason.
    """
    call = next(node for node in after.nodes if node.name == fused.call)
    results = sorted(call.users, key=lambda item: item.args[1])
    names = {node.meta[MARK]: node for node in before.nodes}
    ends = [names[item.meta[MARK]] for item in results if item.meta.get(MARK) in names]
    if len(ends) < len(results) or not ends:
        raise NotCutOut("its results stand for no nodes of the graph before the pass")
    ours = _Cone([call], lambda node: _is_known(node, names))
    if views := _views_of_one(ours.inputs):
        ours = _Cone([call], lambda node: node not in views and _is_known(node, names))
    for node in ours.inside:
        if node is not call and not _may_be_between(node):
            raise NotCutOut(f"it reads {node.name}, which was another before the pass")
    read = {node.meta[MARK] for node in ours.inputs}
    members = set(fused.nodes)
    stock = _Cone(ends, lambda node: node.meta[MARK] in read or not _may_be_inside(node, members))
    read |= {node.meta[MARK] for node in stock.inputs}
    examples = {name: node.meta["val"] for name, node in names.items() if name in read}
    return CutOut(
        _built(before, stock.inside, examples, ends),
        _built(after, {*ours.inside, *results}, examples, results),
    )


def _views_of_one(inputs: Iterable[Node]) -> set[Node]:
    """Those of some tensors that show what another one shows: their numbers are the same."""
    bases: dict[Node, list[Node]] = {}
    for node in inputs:
        bases.setdefault(without_views(node), []).append(node)
    shared = (nodes for nodes in bases.values() if len(nodes) > 1)
    return {node for nodes in shared for node in nodes if without_views(node) is not node}


def _is_known(node: Node, names: Mapping[str, Node]) -> bool:
    """Whether a tensor was there before the pass. Positions, 0 1 2 ..., are computed on both sides:
    random numbers could not stand for them.
    """
    before = names.get(node.meta.get(MARK, ""))
    if before is None or is_iota(node):
        return False
    tensor, other = node.meta.get("val"), before.meta.get("val")
    return getattr(tensor, "shape", None) == getattr(other, "shape", None)


def _may_be_between(node: Node) -> bool:
    """Whether a node may stand between a tensor of the graph and a region that reads it."""
    return kind_of(node) in (Kind.VIEW, Kind.PART) or node.target in IDENTITY or is_iota(node)


def _may_be_inside(node: Node, members: set[str]) -> bool:
    """Whether a node is the region's, or one that it may compute again."""
    return node.name in members or kind_of(node) in (Kind.POINTWISE, Kind.VIEW) or is_iota(node)


class _Cone:
    """All that some nodes are computed from, up to where it stops: what is inside, and the tensors
    that it reads from there.
    """

    def __init__(self, ends: Sequence[Node], stops: Callable[[Node], bool]) -> None:
        self.inside: set[Node] = set()
        self.inputs: dict[Node, None] = {}
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node in self.inside or _is_number(node):
                continue
            if node.op != "call_function" or (stops(node) and node not in ends):
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise NotCutOut(f"it reads {node.name}, which is no tensor")
                self.inputs[node] = None
            else:
                self.inside.add(node)
                waiting += node.all_input_nodes


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), NUMBERS)


def _built(
    graph: Graph, inside: set[Node], examples: dict[str, Any], results: Sequence[Node]
) -> Graph:
    """These nodes as a graph, with numbers in place of sizes."""
    built = Graph()
    env: dict[str, Node] = {}
    for name, example in examples.items():
        # With a tangent it would be taken for a joint graph, of a forward and its backward.
        env[name] = built.placeholder(name.replace("tangents", "gradients"))
        env[name].meta["val"] = example
    made: dict[Node, Node] = {}

    def argument(arg: Node) -> Any:
        if _is_number(arg):
            return hint(arg.meta["val"])
        return made[arg] if arg in made else env[arg.meta[MARK]]

    for node in graph.nodes:
        if node in inside:
            made[node] = built.node_copy(node, argument)
    built.output(tuple(made[node] for node in results))
    return built
