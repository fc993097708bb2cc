"""What leaves a region: results that somebody outside needs and the region has to write, and those
that are better computed again where they are needed.

A fused op writes its results to memory, where Inductor computes a pointwise value wherever it is
used. So a value is not written for a reader that takes few of its elements (the gather of a cross
entropy) or that could read what it is computed from at less cost (a cast, a normalized activation
whose reader is pointwise): its nodes stay in the graph, over what the region reads and the
statistics that it writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.passes.sizes import hint, nbytes
from normpass.passes.vocabulary import CHEAP, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from collections.abc import Set as AbstractSet

    from torch.fx import Node

aten = torch.ops.aten

GATHERS = (aten.gather.default, aten.index.Tensor, aten._unsafe_index.Tensor)
# Of a value that is gathered from: at most so large a part of it is read.
FEW = 1 / 8
# A value that is computed again costs at most so many operations an element.
MOST_OPERATIONS = 4
# What is smaller costs nothing to write.
SMALL = 1 / 4


def outputs_of(nodes: Sequence[Node]) -> list[Node]:
    """The nodes of a region whose results it writes; a view's result is its source's, looked at
    outside.
    """
    again = recomputed(nodes)
    inside = set(nodes) - again
    return [
        node for node in nodes if node not in again and _is_value(node) and readers(node, inside)
    ]


def recomputed(nodes: Sequence[Node]) -> set[Node]:
    """The nodes that stay in the graph, and what they are computed from up to the region's inputs
    and reductions.
    """
    inside: set[Node] = set(nodes)
    again: set[Node] = set()
    free = inside - {node for node in nodes if _must_be_written(readers(node, inside))}
    for node in nodes:
        outside = readers(node, inside)
        if outside and node in free and kind_of(node) is Kind.POINTWISE and _is_value(node):
            below = _computed_again(node, nodes, free)
            if _is_better_recomputed(node, outside, below):
                again |= below
            else:
                free.remove(node)  # what it feeds outside reads it
    return again


def _computed_again(value: Node, nodes: Sequence[Node], free: AbstractSet[Node]) -> set[Node]:
    """What would be computed again for a value: up to the statistics where these serve something
    else that is written, of its size. If they do not, the value is what the norm is there for.
    """
    whole = cone(value, free)
    short = cone(value, free, written=SMALL * nbytes(value))
    written = filter(_is_value, set(nodes) - free)
    as_large = {node for node in written if nbytes(node) >= nbytes(value)}
    return short if _feeds(whole - short, as_large, nodes) else whole


def readers(node: Node, inside: Container[Node]) -> list[Node]:
    """Who reads a node outside, directly or through a view (views are free to repeat outside)."""
    found = []
    for user in node.users:
        if user not in inside:
            found.append(user)
        elif kind_of(user) is Kind.VIEW:
            found += readers(user, inside)
    return found


def cone(value: Node, inside: Container[Node], written: float = 0) -> set[Node]:
    """A node and the pointwise nodes and views among these that it is computed from, up to what is
    dear and takes at most so many bytes to write: rsqrt(var + eps).
    """
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node in found or node not in inside or not _is_loop(node):
            continue
        if _is_cheap(node) or nbytes(node) > written:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_loop(node: Node) -> bool:
    return kind_of(node) in (Kind.POINTWISE, Kind.VIEW)


def _is_cheap(node: Node) -> bool:
    return node.target in CHEAP or kind_of(node) is Kind.VIEW


def _feeds(starts: Container[Node], ends: Container[Node], nodes: Sequence[Node]) -> bool:
    """Whether one of the ends is computed from a start, among these nodes in the graph's order."""
    found: set[Node] = set()
    for node in nodes:
        if node in starts or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
            if node in ends:
                return True
    return False


def _is_value(node: Node) -> bool:
    return (
        kind_of(node) is not Kind.VIEW
        and isinstance(node.meta["val"], torch.Tensor)
        and any(
            isinstance(arg.meta.get("val"), torch.Tensor | tuple | list)  # a split has a list
            for arg in node.all_input_nodes
        )
    )


def _must_be_written(outside: Sequence[Node]) -> bool:
    """Whether one of the readers is no loop of Inductor's: a matrix product, or the caller."""
    return any(
        kind_of(user) not in (Kind.POINTWISE, Kind.REDUCTION) and user.target not in GATHERS
        for user in outside
    )


def _is_better_recomputed(node: Node, outside: Sequence[Node], again: set[Node]) -> bool:
    """again: the nodes that would be."""
    if all(map(_reads_little, outside)):
        return True
    operations = [each for each in again if kind_of(each) is Kind.POINTWISE]
    if len(operations) > MOST_OPERATIONS or not all(map(_is_cheap, operations)):
        return False
    sources = {arg for each in again for arg in each.all_input_nodes} - again
    read = sum(nbytes(arg) for arg in sources if isinstance(arg.meta.get("val"), torch.Tensor))
    return len(outside) * read < (1 + len(outside)) * nbytes(node)


def _reads_little(user: Node) -> bool:
    if user.target not in GATHERS:
        return False
    size, source = user.meta["val"].numel(), user.all_input_nodes[0].meta["val"].numel()
    return hint(size) <= FEW * hint(source)
