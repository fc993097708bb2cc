"""Regions that hold parts of tensors and what is put together of such, piece by piece.

Rotary embedding exchanges the halves of what a norm returns:

    y     = norm(x)
    first = y[..., :64]
    last  = y[..., 64:]
    out   = y * cos + cat(-last, first) * sin

A part cuts the axis (axis_table.py), and with it all tensors that run along it: each is computed as
two, of 64 numbers each, which meet each other in the sum. The region reads its inputs in parts,
which are views, and writes its results in parts of one tensor (`joined` in region.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx.node import map_arg

from normpass.passes.axis_names import locally_reduced
from normpass.passes.axis_table import NotExpressible
from normpass.passes.escapes import outputs_of
from normpass.passes.region import Arg
from normpass.passes.vocabulary import SPLITS, Kind, kind_of, without_views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

    from normpass.passes.axis_table import Axes
    from normpass.passes.domain import Dims, Domain
    from normpass.passes.regions import Grown

aten = torch.ops.aten

# A piece of fewer neighbours would leave lanes over, and more pieces registers.
LEAST_PIECE = 16
MOST_PIECES = 4


@dataclass(frozen=True)
class Pieces:
    """What a node is: a value for each of its pieces."""

    values: tuple[Arg, ...]


Value = Arg | Pieces


@dataclass(frozen=True)
class Cut:
    """A part of what a region reads: a node of the graph, and its dimensions in the domain."""

    node: Node
    dims: Dims


def fits(grown: Grown) -> bool:
    """Whether a region has parts that meet, and is better computed in a few equal pieces: what they
    are cut of are rows, so that no loop is doubled; none leaves it, which would be a view outside;
    and nothing is longer than a row, which would only be copied there.
    """
    nodes, domain = grown.nodes, grown.domain
    splits = [node for node in nodes if node.target in SPLITS]
    parts = [node for node in nodes if kind_of(node) is Kind.PART and node not in splits]
    leaving = {user for split in splits for user in split.users}.difference(nodes)
    if len(parts) < 2 or leaving or not set(parts).isdisjoint(outputs_of(nodes)):
        return False
    try:
        most = domain.in_equal_pieces(MOST_PIECES)
    except NotExpressible:
        return False
    reduced = [node.all_input_nodes[0] for node in nodes if kind_of(node) is Kind.REDUCTION]
    pieces = {axis for x in domain.dims for piece in domain.pieces_of(x) for axis in piece}
    joined = {axis for x in reduced for axis in domain.whole_axes(x) if domain.is_joined(axis)}
    return (
        most > 1
        and most == max(len(domain.pieces_of(node)) for node in reduced)
        and pieces | joined <= locally_reduced(nodes, domain)
        and (most == 2 or not any(takes_turns(x, domain) for x in domain.dims))
        and all(
            domain.extent_of(lanes) >= LEAST_PIECE for x in reduced for lanes in lanes_of(x, domain)
        )
        and all(domain.extent_of(joined_axes(x, domain)).is_Integer for x in domain.dims)
    )


def parts_of_what_is_read(grown: Grown) -> set[Node]:
    """The nodes of a region that take parts of tensors from outside, such as one norm's input of
    what several are made of.
    """
    parts = [node for node in grown.nodes if kind_of(node) is Kind.PART]
    read: set[Node] = set()
    for node in parts:  # a split before its results
        source = without_views(node.all_input_nodes[0])
        if source not in grown.nodes or source in read:
            read.add(node)
    return read


def lanes_of(x: Node, domain: Domain) -> tuple[Axes, ...]:
    """For each piece of a node the axes along which its elements follow one the other: the piece's,
    or where it has one element the innermost beside it.
    """
    beside = tuple(axis for axis in domain.whole_axes(x) if not domain.is_joined(axis))
    return tuple(piece or beside[-1:] for piece in domain.pieces_of(x))


def takes_turns(x: Node, domain: Domain) -> bool:
    """Whether a node's pieces have one element, and follow each other in memory."""
    axes = domain.whole_axes(x)
    return bool(axes) and domain.is_joined(axes[-1]) and () in domain.pieces(axes[-1])


class Cuts:
    """The parts of what a region reads, as nodes of its graph.

    of: the parts of each that is cut. added: all nodes that were put into the graph for them.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of: dict[Node, tuple[Cut, ...]] = {}
        self.added: list[Node] = []

    def make(self, grown: Grown) -> None:
        """Cuts what a region reads, in front of its last node."""
        nodes, domain = grown.nodes, grown.domain
        inside = set(nodes)
        reads = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes)
        with self.graph.inserting_before(nodes[-1]):
            for x in reads:
                if x not in inside and x in domain.dims and domain.joined_dim(x) is not None:
                    self.of[x] = tuple(self.cuts(x, domain))

    def take_out(self) -> None:
        """Takes parts out of the graph that no region reads."""
        for node in reversed(self.added):
            if not node.users:
                self.graph.erase_node(node)

    def cuts(self, x: Node, domain: Domain) -> list[Cut]:
        dim = domain.joined_dim(x)
        assert dim is not None
        dims = [domain.resolve(each) for each in domain.dims[x]]
        parts = parts_of(dims[dim], domain)
        if parts is None:  # [heads 128] -> [heads, 128]
            axes = dims[dim]
            dims[dim : dim + 1] = [(axis,) for axis in axes]
            x = self.unflattened(x, dim, [int(domain.extent(axis)) for axis in axes])
            dim += next(k for k, axis in enumerate(axes) if domain.is_joined(axis))
            parts = parts_of(dims[dim], domain)
        assert parts is not None
        whole = x.meta["val"].shape[dim]
        count = len(parts.axes)
        lengths = [int(domain.extent_of(axes)) for axes in parts.axes]
        ends = pairwise(accumulate(lengths, initial=0))
        taken = [(k, whole, count) for k in range(count)] if parts.in_turn else list(ends)
        return [
            Cut(self.add(aten.slice.Tensor, x, dim, *which), pieces_in(dims, dim, axes))
            for axes, which in zip(parts.axes, taken, strict=True)
        ]

    def unflattened(self, x: Node, dim: int, sizes: Sequence[int]) -> Node:
        """A view that has several dimensions in place of one."""
        value = x.meta["val"]
        shape = [
            size if isinstance(size, int) else self.add(aten.sym_size.int, x, k)
            for k, size in enumerate(value.shape)
        ]
        return self.add(aten.view.default, x, [*shape[:dim], *sizes, *shape[dim + 1 :]])

    def add(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*map_arg(args, lambda arg: arg.meta["val"]))
        self.added.append(node)
        return node


class Parts(NamedTuple):
    """What a dimension falls into: the axes of each part. in_turn: whether an element of each
    follows one of the other; else they lie side by side.
    """

    axes: tuple[Axes, ...]
    in_turn: bool


def parts_of(dim: Axes, domain: Domain) -> Parts | None:
    """What a dimension of pieces falls into; None where that is not one of the two."""
    k = next(k for k, axis in enumerate(dim) if domain.is_joined(axis))
    outer, inner, pieces = dim[:k], dim[k + 1 :], domain.pieces(dim[k])
    if not outer:
        return Parts(tuple((*piece, *inner) for piece in pieces), in_turn=False)
    if not inner and not any(pieces):
        return Parts((outer,) * len(pieces), in_turn=True)
    return None


def joined_axes(node: Node, domain: Domain) -> Axes:
    """The axes in the dimension of a node that has pieces; none of most."""
    dim = domain.joined_dim(node)
    return () if dim is None else domain.resolve(domain.dims[node][dim])


def pieces_in(dims: Sequence[Axes], dim: int, piece: Axes) -> Dims:
    """Dimensions with a piece in place of what it is of."""
    return (*dims[:dim], piece, *dims[dim + 1 :])


def values_of(value: Value, count: int) -> tuple[Arg, ...]:
    """The values of so many pieces; the same for all where it has none."""
    return value.values if isinstance(value, Pieces) else (value,) * count
