"""What a forward saves for its backward, chosen on the graph of both before it is split.

The gradient of a weight takes the input of its matrix product: a normalized tensor, an activation.
The gradient of the norm or the activation takes what that was computed from. Stock torch saves
both, because what a matrix product reads has to be written again. But that costs one write of
the tensor, beside a product of many operations for each of its elements, where the gradient's own
kernel has the numbers at hand. So such a tensor is marked to be computed again, unless the graph
is marked already (activation checkpointing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from normpass.passes.sizes import hint, nbytes
from normpass.passes.vocabulary import PIECEWISE, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from torch.fx import Graph, Node

aten = torch.ops.aten
# Their first two matrices.
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
# A product has so many multiplications for each element that is written again.
LEAST_WORK = 128
# What is smaller costs nothing to keep: statistics of rows, weights.
SMALL = 1 / 4
LEAST_BYTES = 64 * 1024
# It takes at most so many operations.
MOST_NODES = 16


def mark(graph: Graph, constant: Container[Node]) -> list[Node]:
    """Marks what is to be computed again in a joint graph; returns the tensors not to be saved.

    constant: inputs that are in the backward what they were in the forward, because nothing writes
    to them.
    """
    if any("recompute" in node.meta for node in graph.nodes):
        return []
    inputs = graph.find_nodes(op="placeholder")
    tangents = [node for node in inputs if "tangents" in node.name]
    backward = _reached(tangents, lambda node: node.users)
    (output,) = graph.find_nodes(op="output")
    results = [node for node in output.all_input_nodes if node not in backward]
    forward = _reached(results, lambda node: node.all_input_nodes)
    varying = _reached((x for x in inputs if x not in constant), lambda node: node.users)
    dropped: list[Node] = []
    for node in graph.nodes:
        if node in forward and not _is_seen(node) and _pays(node, forward):
            cone = _cone(node, forward, varying, dropped)
            if cone:
                dropped.append(node)
                for each in cone:
                    each.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return dropped


def _reached(start: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += neighbours(node)
    return found


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """Who reads a tensor, and what of it: itself, or a view."""
    for user in node.users:
        if kind_of(user) is Kind.VIEW:
            yield from _readers(user)
        else:
            yield user, node


def _is_seen(node: Node) -> bool:
    """Whether the caller gets a tensor, who has to keep it then."""
    return any(reader.op == "output" for reader, _ in _readers(node))


def _pays(node: Node, forward: Container[Node]) -> bool:
    """Whether a tensor is saved for matrix products alone, and these are work enough."""
    if kind_of(node) is not Kind.POINTWISE or nbytes(node) < LEAST_BYTES:
        return False
    readers = [(reader, what) for reader, what in _readers(node) if reader not in forward]
    products = [(reader, what) for reader, what in readers if reader.target in PRODUCTS]
    others = (reader for reader, _ in readers if reader.target not in PRODUCTS)
    return (
        bool(products)
        and all(kind_of(reader) not in PIECEWISE | {Kind.OTHER} for reader in others)
        and all(_work(reader, what) >= LEAST_WORK for reader, what in products)
    )


def _work(product: Node, what: Node) -> int:
    """Multiplications of a matrix product for each element of one of its matrices."""
    target: Any = product.target
    first = PRODUCTS[target]
    arguments: Any = product.args[first : first + 2]
    a, b = (arg.meta["val"].shape for arg in arguments)
    return hint(b[-1]) if what is arguments[0] else hint(a[-2])


def _cone(
    node: Node, forward: Container[Node], varying: Container[Node], dropped: Container[Node]
) -> set[Node]:
    """What is computed again for a tensor: it, and all up to what the backward has anyway; empty
    if it would need more than that, or another input than there will be.
    """
    small = SMALL * nbytes(node)

    def is_at_hand(arg: Node) -> bool:
        if not isinstance(arg.meta.get("val"), torch.Tensor):
            return True
        if arg.op == "placeholder" or nbytes(arg) <= small:
            return arg not in varying
        return arg not in dropped and any(
            reader not in forward and reader.op != "output" for reader, _ in _readers(arg)
        )

    cone: set[Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each not in cone:
            is_cheap = kind_of(each) in (Kind.POINTWISE, Kind.VIEW)
            if each in dropped or not is_cheap or len(cone) == MOST_NODES:
                return set()
            cone.add(each)
            waiting += [arg for arg in each.all_input_nodes if not is_at_hand(arg)]
    return cone
