"""The iteration domain of a set of graph nodes: axes, and which of them every tensor's dimensions
are made of.

Each dimension of each tensor is a product of axes. Ops relate them: a pointwise op says that its
arguments' dimensions are the same, a view regroups the axes, a permute reorders them, a reduction
removes some. Where two spellings of one dimension meet, [C] and [G, D], the axis is split and every
tensor that has it with it. A view that no splitting can express (slices, [6, 4] as [8, 3]) does not
belong to the domain, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from normpass.passes.numbers import express
from normpass.passes.vocabulary import Kind, kind_of, reduced_dims

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from normpass.passes.numbers import Number

Dims = tuple[tuple[int, ...], ...]  # per dimension, the axes that make it, outermost first


class NotExpressible(Exception):
    """A node that the domain cannot hold; the message is the reason."""


@dataclass(frozen=True)
class _Axis:
    """An axis by number. Once it is split or found to be another one, `parts` says what it is."""

    extent: sympy.Expr
    parts: tuple[int, ...] | None = None


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


class Domain:
    """Axes and the dimensions of nodes over them. Grows by `add`, which either succeeds or raises
    and must then be thrown away: `copy` first.
    """

    def __init__(self) -> None:
        self.table: list[_Axis] = []
        self.dims: dict[Node, Dims] = {}
        # What dimensions have become. Shared with copies, and left to them when an axis changes.
        self.resolved: dict[Dims, tuple[int, ...]] = {}

    def copy(self) -> Domain:
        other = Domain()
        other.table, other.dims = list(self.table), dict(self.dims)
        other.resolved = self.resolved
        return other

    # ---- axes

    def new(self, extent: sympy.Expr) -> tuple[int, ...]:
        """A fresh axis, or none for a dimension of size one."""
        if extent == 1:
            return ()
        self.table.append(_Axis(extent))
        return (len(self.table) - 1,)

    def resolve(self, axes: Iterable[int]) -> tuple[int, ...]:
        """The axes that these have become."""
        result: list[int] = []
        for axis in axes:
            entry = self.table[axis]
            if entry.parts is None:
                result.append(axis)
                continue
            final = self.resolve(entry.parts)
            if final != entry.parts:  # the way there is made once
                self.table[axis] = _Axis(entry.extent, final)
            result += final
        return tuple(result)

    def extent(self, axis: int) -> sympy.Expr:
        return self.table[axis].extent

    def axes(self, node: Node) -> tuple[int, ...]:
        """All axes of a node's dimensions, in order."""
        return self.axes_of(self.dims[node])

    def axes_of(self, dims: Dims) -> tuple[int, ...]:
        axes = self.resolved.get(dims)
        if axes is None:
            axes = tuple(axis for dim in dims for axis in self.resolve(dim))
            self.resolved[dims] = axes
        return axes

    def every_axes(self) -> Iterator[tuple[int, ...]]:
        """The axes of each node; of nodes with the same dimensions once."""
        return map(self.axes_of, set(self.dims.values()))

    def become(self, axis: int, parts: tuple[int, ...]) -> None:
        """An axis is made of others from now on."""
        self.table[axis] = _Axis(self.extent(axis), parts)
        self.resolved = {}

    def unify(self, left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
        """Makes two spellings of one dimension the same, splitting axes where needed."""
        result: list[int] = []
        a, b = list(self.resolve(left)), list(self.resolve(right))
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if x == y:
                result.append(x)
                continue
            ex, ey = self.extent(x), self.extent(y)
            if ex != ey:
                if _divides(ey, ex):
                    x, rest = self.split(x, ey)
                    a.insert(0, rest)
                elif _divides(ex, ey):
                    y, rest = self.split(y, ex)
                    b.insert(0, rest)
                else:
                    raise NotExpressible(f"a dimension of {ex} elements meets one of {ey}")
            self.become(y, (x,))
            result.append(x)
            a, b = list(self.resolve(a)), list(self.resolve(b))
        if a or b:
            raise NotExpressible("dimensions of different sizes meet")
        return self.resolve(result)

    def split(self, axis: int, outer: sympy.Expr) -> tuple[int, int]:
        """Splits an axis in two, given the extent of the outer part."""
        inner = sympy.cancel(self.extent(axis) / outer)
        parts = (*self.new(outer), *self.new(inner))
        self.become(axis, parts)
        return parts[0], parts[1]

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
        elif kind is Kind.ITEM:
            source = node.all_input_nodes[0]
            if source not in self.dims:
                raise NotExpressible(f"{source.name}, whose result it is, stands outside")
            dims = self.dims[source]
        else:
            raise NotExpressible(f"{node.target} is neither pointwise, reduction nor view")
        if node in self.dims:
            dims = tuple(self.unify(a, b) for a, b in zip(dims, self.dims[node], strict=True))
        self.dims[node] = dims
        self.check()

    def place(self, node: Node) -> None:
        """Gives a tensor from outside axes of its own, unless it has some."""
        if node not in self.dims and isinstance(node.meta.get("val"), torch.Tensor):
            self.dims[node] = tuple(self.new(extent) for extent in shape_of(node))

    def check(self) -> None:
        """No tensor may run along one axis twice: that would be a diagonal."""
        for axes in self.every_axes():
            if len(set(axes)) != len(axes):
                twice = next(node for node in self.dims if self.axes(node) == axes)
                raise NotExpressible(f"{twice.name} runs along one axis twice")

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
        return self.regroup(self.axes(source), shape_of(node))

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
                if have != missing and not _divides(have, missing):
                    if not _divides(missing, have):
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


def _divides(small: sympy.Expr, large: sympy.Expr) -> bool:
    """Whether one extent is a whole multiple of the other, for every value of their symbols."""
    if small.is_Integer and large.is_Integer:
        return int(small) != 0 and int(large) % int(small) == 0
    quotient = sympy.cancel(large / small)
    return bool(quotient.is_integer) and sympy.denom(quotient) == 1
