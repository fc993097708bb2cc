"""The iteration domain of a set of graph nodes: axes, and which of them every tensor's dimensions
are made of.

Each dimension of each tensor is a product of axes. Ops relate them: a pointwise op says that its
arguments' dimensions are the same, a view regroups the axes, a permute reorders them, a reduction
removes some. Where two spellings of one dimension meet, [C] and [G, D], the axis is split and every
tensor that has it with it. A part of a tensor cuts an axis into pieces side by side, and tensors
that are put side by side join axes (axis_table.py). A view that nothing of this can express ([6, 4]
as [8, 3]) does not belong to the domain, and says so.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch.fx import Node

from normpass.passes.axis_table import AxisTable, NotExpressible, divides
from normpass.passes.numbers import express
from normpass.passes.parts import Part, part_of
from normpass.passes.vocabulary import SCATTERS, Kind, argument, kind_of, reduced_dims

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from normpass.passes.axis_table import Axes
    from normpass.passes.numbers import Number

Dims = tuple[tuple[int, ...], ...]  # per dimension, the axes that make it, outermost first


def extent_of(size: int | torch.SymInt) -> sympy.Expr:
    """A dimension's size as an expression."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def step_of(stride: int | torch.SymInt) -> sympy.Expr:
    """A stride as an expression, for tensors that have elements: torch counts an axis without any
    as one, Max(1, size), which says nothing where sizes are positive.
    """
    expr = extent_of(stride)
    return expr.replace(
        lambda part: type(part).__name__ == "Max" and part.args[0] == 1 and len(part.args) == 2,
        lambda part: part.args[1],
    )


def shape_of(node: Node) -> list[sympy.Expr]:
    return [extent_of(size) for size in node.meta["val"].shape]


class Taken(NamedTuple):
    """What a node takes of a tensor or puts into it: of the pieces inside of the `outer` axes of a
    dimension those from one to before another.
    """

    part: Part
    outer: Axes
    pieces: list[Axes]
    first: int
    last: int


class Side(NamedTuple):
    """One of the tensors that are put together, its dimensions, its pieces, and which of them."""

    node: Node
    dims: Dims
    pieces: list[Axes]
    some: slice


class Domain(AxisTable):
    """Axes and the dimensions of nodes over them. Grows by `add`, which either succeeds or raises
    and must then be thrown away: `copy` first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dims: dict[Node, Dims] = {}
        # What dimensions have become. Shared with copies, and left to them when an axis changes.
        self.resolved: dict[Dims, Axes] = {}
        # Dimensions that `check` has not seen since one of their axes changed, and how many axes
        # there were when it looked last: what it has seen has no later ones.
        self.unchecked: set[Dims] = set()
        self.axes_then = 0

    def copy(self) -> Domain:
        other = Domain()
        other.table, other.dims = list(self.table), dict(self.dims)
        other.has_pieces, other.resolved = self.has_pieces, self.resolved
        other.unchecked, other.axes_then = set(self.unchecked), self.axes_then
        return other

    def axes(self, node: Node) -> Axes:
        """All axes of a node's dimensions, in order, those of pieces for joined ones."""
        return self.axes_of(self.dims[node])

    def axes_of(self, dims: Dims) -> Axes:
        axes = self.whole_axes_of(dims)
        return tuple(dict.fromkeys(self.expanded(axes))) if self.has_pieces else axes

    def whole_axes(self, node: Node) -> Axes:
        """All axes of a node's dimensions, in order."""
        return self.whole_axes_of(self.dims[node])

    def whole_axes_of(self, dims: Dims) -> Axes:
        axes = self.resolved.get(dims)
        if axes is None:
            axes = tuple(axis for dim in dims for axis in self.resolve(dim))
            self.resolved[dims] = axes
        return axes

    def every_axes(self) -> Iterator[Axes]:
        """The axes of each node; of nodes with the same dimensions once."""
        return map(self.axes_of, set(self.dims.values()))

    def become(self, axis: int, parts: Axes) -> None:
        super().become(axis, parts)
        self.resolved = {}
        if axis < self.axes_then:
            self.unchecked = set(self.dims.values())

    def joined_dim(self, node: Node) -> int | None:
        """The dimension of a node that has pieces, if one has."""
        for k, dim in enumerate(self.dims[node]):
            if any(self.table[axis].pieces for axis in self.resolve(dim)):
                return k
        return None

    def is_joined(self, axis: int) -> bool:
        return bool(self.table[axis].pieces)

    def pieces_of(self, node: Node) -> tuple[Axes, ...]:
        """The pieces that a node is made of side by side; none of most."""
        joined = [axis for axis in self.whole_axes(node) if self.table[axis].pieces]
        return self.pieces(*joined) if joined else ()

    def in_equal_pieces(self, most: int) -> int:
        """Cuts joined axes so that all pieces are as long, and makes these one axis: lanes run
        along all of them. Returns the most pieces of a tensor, 0 where nothing is cut: a split may
        have one part.

        Raises:
            NotExpressible: if the size of one is unknown, a tensor would have more pieces than
                that, or several dimensions of pieces.
        """
        every = dict.fromkeys(self.pieces_of(node) for node in self.dims)
        sizes = {piece: self.extent_of(piece) for pieces in every for piece in pieces}
        if not all(size.is_Integer for size in sizes.values()):
            raise NotExpressible("a piece of unknown size")
        least = math.gcd(*map(int, sizes.values()))
        count = max(sum(sizes[piece] for piece in pieces) // max(least, 1) for pieces in every)
        if count > most:
            raise NotExpressible(f"{count} equal pieces")
        for piece, size in sizes.items():
            for place in range(least, size, least):
                self.cut_at(piece, place)
        self.check()
        equal = dict.fromkeys(piece for node in self.dims for piece in self.pieces_of(node))
        for one, other in pairwise(equal):
            self.unify(one, other)
        self.check()
        return int(count)

    # ---- nodes

    def add(self, node: Node) -> None:
        """Takes a node in.

        Raises:
            NotExpressible: with the reason.
        """
        for arg in node.all_input_nodes:
            self.place(arg)
        kind = kind_of(node)
        if kind is Kind.POINTWISE:
            self.check_numbers(node)
            dims = self.pointwise(node)
        elif kind is Kind.REDUCTION:
            dims = self.reduction(node)
        elif kind is Kind.VIEW:
            dims = self.view(node)
        elif kind is Kind.PART:
            dims = self.part(node)
        elif kind is Kind.JOIN:
            dims = self.join(node)
        elif kind is Kind.ITEM:
            dims = self.dims[self.source(node)]
        else:
            raise NotExpressible(f"{node.target} is neither pointwise, reduction nor view")
        if node in self.dims:
            dims = tuple(self.unify(a, b) for a, b in zip(dims, self.dims[node], strict=True))
        self.put(node, dims)
        self.check()

    def put(self, node: Node, dims: Dims) -> None:
        self.dims[node] = dims
        self.unchecked.add(dims)

    def source(self, node: Node) -> Node:
        """What a node is one result or a part of."""
        source = node.all_input_nodes[0]
        if source not in self.dims:
            raise NotExpressible(f"{source.name}, whose result it is, stands outside")
        return source

    def place(self, node: Node) -> None:
        """Gives a tensor from outside axes of its own, unless it has some."""
        if node not in self.dims and isinstance(node.meta.get("val"), torch.Tensor):
            self.put(node, tuple(self.new(extent) for extent in shape_of(node)))

    def check(self) -> None:
        """No tensor may run along one axis twice: that would be a diagonal. Nor may two of its
        dimensions have pieces.
        """
        for axes in map(self.whole_axes_of, self.unchecked):
            joined = [axis for axis in axes if self.is_joined(axis)] if self.has_pieces else []
            every = [*set(self.expanded(joined)), *(axis for axis in axes if axis not in joined)]
            if len(set(every)) < len(every):
                raise NotExpressible(f"{self.one_along(axes)} runs along one axis twice")
            if len(joined) > 1:
                raise NotExpressible(f"{self.one_along(axes)} has pieces in two dimensions")
        self.unchecked, self.axes_then = set(), len(self.table)

    def one_along(self, axes: Axes) -> str:
        """The name of a node with these axes."""
        return next(node.name for node in self.dims if self.whole_axes(node) == axes)

    def check_numbers(self, node: Node) -> None:
        """Numbers of the graph may be arguments where the domain's extents tell them."""
        for arg in node.args:
            if isinstance(arg, Node) and not isinstance(arg.meta.get("val"), torch.Tensor):
                self.express(arg)

    def express(self, number: Node) -> Number:
        """A number known only at run time, in terms of how many elements axes span."""
        value = number.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            axes = {axis for node in self.dims for axis in self.axes(node)}
            extents = {axis: self.extent(axis) for axis in axes}
            expressed = express(value.node.expr, extents)
            if expressed is not None:
                return expressed
        raise NotExpressible(f"{number.name} is a number known only at run time")

    def pointwise(self, node: Node) -> Dims:
        """Dimensions of broadcast arguments, aligned at the last one."""
        rank = len(node.meta["val"].shape)
        dims: list[tuple[int, ...]] = [()] * rank
        for arg in node.all_input_nodes:
            if arg not in self.dims:
                continue
            for k, axes in enumerate(reversed(self.dims[arg]), 1):
                if self.resolve(axes):
                    dims[-k] = self.unify(dims[-k], axes) if dims[-k] else axes
        for k, extent in enumerate(shape_of(node)):
            if not dims[k]:
                dims[k] = self.new(extent)
        return tuple(dims)

    def reduction(self, node: Node) -> Dims:
        source = self.dims[node.all_input_nodes[0]]
        reduced, keepdim = reduced_dims(node)
        kept = [() if k in reduced else dim for k, dim in enumerate(source)]
        return tuple(dim for k, dim in enumerate(kept) if keepdim or k not in reduced)

    def part(self, node: Node) -> Dims:
        """Dimensions of a part of a tensor, which cuts that."""
        source = self.source(node)
        cut = self.cut_out(source, node)
        dims = list(self.dims[source])
        dims[cut.part.dim] = (*cut.outer, *self.joined(cut.pieces[cut.first : cut.last]))
        if cut.part.is_one:
            del dims[cut.part.dim]
        return tuple(dims)

    def cut_out(self, source: Node, node: Node) -> Taken:
        """What a node takes of another, or puts into it, which cuts that."""
        part = part_of(node)
        if part is None:
            raise NotExpressible(f"{node.name} is no part of known size")
        dim: Axes = self.dims[source][part.dim]
        outer: Axes = ()
        if part.step > 1:
            step = sympy.Integer(part.step)
            outer = self.new(self.extent_of(dim) / step)
            inner = self.new(step)
            self.unify(dim, (*outer, *inner))
            dim = inner
        first, last = self.cut(dim, part.start, part.stop)
        return Taken(part, self.resolve(outer), self.side_by_side(dim), first, last)

    def join(self, node: Node) -> Dims:
        """Dimensions of tensors side by side, or of one a part of which is another."""
        dim, outer, sides = self.sides(node)
        dims, *others = [list(side.dims) for side in sides]
        for other in others:
            for k, axes in enumerate(other):
                if k != dim:
                    dims[k] = self.unify(dims[k], axes)
        pieces = [piece for side in sides for piece in side.pieces[side.some]]
        dims[dim] = (*outer, *self.joined(pieces))
        if node.target in SCATTERS:  # of the shape of what it puts a part into
            dims[dim] = self.unify(self.dims[sides[0].node][dim], dims[dim])
        return tuple(dims)

    def sides(self, node: Node) -> tuple[int, Axes, list[Side]]:
        """The dimension along which a node has others side by side, what is around their pieces in
        that dimension, and they in order.
        """
        arguments: Any = node.args
        if node.target in SCATTERS:
            base, source = arguments[:2]
            cut, dims = self.cut_out(base, node), self.dims[source]
            if cut.part.is_one:
                dims = (*dims[: cut.part.dim], (), *dims[cut.part.dim :])
            if cut.outer:
                self.unify(cut.outer, dims[cut.part.dim])
            taken: list[Axes] = [()] if cut.outer else self.side_by_side(dims[cut.part.dim])
            around = self.dims[base], cut.pieces
            sides = [
                Side(base, *around, slice(cut.first)),
                Side(source, dims, taken, slice(None)),
                Side(base, *around, slice(cut.last, None)),
            ]
            return cut.part.dim, cut.outer, sides
        tensors = arguments[0]
        dim = argument(node, "dim", 0) % len(self.dims[tensors[0]])
        every = [(each, self.dims[each]) for each in tensors]
        return dim, (), [Side(x, d, self.side_by_side(d[dim]), slice(None)) for x, d in every]

    def view(self, node: Node) -> Dims:
        source = node.all_input_nodes[0]
        arguments: Any = node.args[1:]
        match getattr(node.target, "overloadpacket", None):
            case torch.ops.aten.permute:
                return tuple(self.dims[source][k] for k in arguments[0])
            case torch.ops.aten.transpose:
                dims = list(self.dims[source])
                a, b = arguments
                dims[a], dims[b] = dims[b], dims[a]
                return tuple(dims)
            case torch.ops.aten.t:
                return tuple(reversed(self.dims[source]))
            case torch.ops.aten.expand:
                return self.expand(source, node)
        return self.regroup(self.whole_axes(source), shape_of(node))

    def expand(self, source: Node, node: Node) -> Dims:
        """An expanded dimension gets an axis along which the tensor does not change."""
        shape = shape_of(node)
        have = [()] * (len(shape) - len(self.dims[source])) + [
            self.resolve(dim) for dim in self.dims[source]
        ]
        return tuple(dim or self.new(extent) for dim, extent in zip(have, shape, strict=True))

    def regroup(self, axes: Sequence[int], shape: Sequence[sympy.Expr]) -> Dims:
        """Distributes axes over the dimensions of a new shape, in order."""
        rest = list(axes)
        dims: list[tuple[int, ...]] = []
        for extent in shape:
            dim: list[int] = []
            missing = extent
            while missing != 1:
                if not rest:
                    raise NotExpressible("a view has more elements than its source")
                axis = rest.pop(0)
                have = self.extent(axis)
                if have != missing and not divides(have, missing):
                    if not divides(missing, have):
                        raise NotExpressible(f"a view puts {have} elements where {missing} fit")
                    axis, inner = self.split(axis, missing)
                    rest.insert(0, inner)
                    have = missing
                dim.append(axis)
                missing = sympy.cancel(missing / have)
            dims.append(tuple(dim))
        if rest:
            raise NotExpressible("a view has fewer elements than its source")
        return tuple(dims)
