"""The axes of an iteration domain by number, and what they turn out to be.

An axis that is made of others, one inside of the next, is their product: [C] is [G, D]. One that is
made of others side by side is joined: the 128 numbers of a head whose halves rotary embedding
exchanges are 64 and 64. Tensors along a joined axis are computed piece by piece, and where two
pieces meet in one op they run along the same axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Axes = tuple[int, ...]  # outermost first


class NotExpressible(Exception):
    """A node that the domain cannot hold; the message is the reason."""


@dataclass(frozen=True)
class _Axis:
    """An axis by number. Once it is split or found to be another one, `parts` says what it is.
    pieces: of a joined one, in order.
    """

    extent: sympy.Expr
    parts: Axes | None = None
    pieces: tuple[Axes, ...] = ()


class AxisTable:
    """Axes that are split, cut and found to be the same as others. has_pieces: whether any has."""

    def __init__(self) -> None:
        self.table: list[_Axis] = []
        self.has_pieces = False

    def new(self, extent: sympy.Expr) -> Axes:
        """A fresh axis, or none for a dimension of size one."""
        return () if extent == 1 else (self.added(_Axis(extent)),)

    def added(self, axis: _Axis) -> int:
        self.table.append(axis)
        self.has_pieces = self.has_pieces or bool(axis.pieces)
        return len(self.table) - 1

    def extent(self, axis: int) -> sympy.Expr:
        return self.table[axis].extent

    def extent_of(self, axes: Iterable[int]) -> sympy.Expr:
        return sympy.prod(map(self.extent, axes), sympy.Integer(1))

    def resolve(self, axes: Iterable[int]) -> Axes:
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

    def become(self, axis: int, parts: Axes) -> None:
        """An axis is made of others from now on."""
        self.table[axis] = _Axis(self.extent(axis), parts)

    # ---- products

    def unify(self, left: Sequence[int], right: Sequence[int]) -> Axes:
        """Makes two spellings of one dimension the same, splitting axes where needed.

        Raises:
            NotExpressible: with the reason.
        """
        result: list[int] = []
        a, b = list(self.resolve(left)), list(self.resolve(right))
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if x == y:
                result.append(x)
                continue
            ex, ey = self.extent(x), self.extent(y)
            if ex != ey:
                if divides(ey, ex):
                    x, rest = self.split(x, ey)
                    a.insert(0, rest)
                elif divides(ex, ey):
                    y, rest = self.split(y, ex)
                    b.insert(0, rest)
                else:
                    raise NotExpressible(f"a dimension of {ex} elements meets one of {ey}")
            result.append(self.same(x, y))
            a, b = list(self.resolve(a)), list(self.resolve(b))
        if a or b:
            raise NotExpressible("dimensions of different sizes meet")
        return self.resolve(result)

    def same(self, x: int, y: int) -> int:
        """Makes two axes of as many elements one, and returns it."""
        if self.table[y].pieces:
            if not self.table[x].pieces:
                x, y = y, x
            else:
                self.unify_pieces(x, y)
        self.become(y, (x,))
        return x

    def split(self, axis: int, outer: sympy.Expr) -> tuple[int, int]:
        """Splits an axis in two, one inside of the other, given the extent of the outer part."""
        if self.table[axis].pieces:
            return self.split_joined(axis, outer)
        inner = sympy.cancel(self.extent(axis) / outer)
        parts = (*self.new(outer), *self.new(inner))
        self.become(axis, parts)
        return parts[0], parts[1]

    # ---- pieces

    def pieces(self, axis: int) -> tuple[Axes, ...]:
        """The pieces of a joined axis, of which none is joined; none of any other."""
        found: list[Axes] = []
        for piece in map(self.resolve, self.table[axis].pieces):
            joined = [each for each in piece if self.table[each].pieces]
            if joined and len(piece) > 1:
                raise NotExpressible("a piece is a product of pieces")
            found += self.pieces(*joined) if joined else [piece]
        return tuple(found)

    def split_joined(self, axis: int, outer: sympy.Expr) -> tuple[int, int]:
        """Splits an axis of so many equal pieces: they run along one axis then, inside of another
        of which each is one element.
        """
        pieces = self.pieces(axis)
        first, *others = pieces
        sizes = set(map(self.extent_of, pieces))
        if len(pieces) != outer or len(sizes) > 1 or len(first) != 1:
            raise NotExpressible("an axis of pieces is split")
        for other in others:
            self.unify(first, other)
        inner = self.resolve(first)
        if len(inner) != 1:
            raise NotExpressible("an axis of pieces is split")
        parts = (*self.joined([()] * len(pieces)), *inner)
        self.become(axis, parts)
        return parts[0], parts[1]

    def unify_pieces(self, x: int, y: int) -> None:
        """Makes the pieces of two joined axes the same, cutting each where the other is cut."""
        for one, other in ((x, y), (y, x)):
            place = 0
            for piece in self.pieces(one):
                self.cut_at((other,), place)
                place += self.extent_of(piece)
        for one_piece, other_piece in zip(self.pieces(x), self.pieces(y), strict=True):
            self.unify(one_piece, other_piece)

    def expanded(self, axes: Iterable[int]) -> Iterator[int]:
        """Axes, with those of its pieces in place of a joined one."""
        for axis in axes:
            if self.table[axis].pieces:
                for piece in self.pieces(axis):
                    yield from piece
            else:
                yield axis

    def joined(self, pieces: Sequence[Axes]) -> Axes:
        """The axis of some pieces side by side; that of a single one itself."""
        if len(pieces) == 1:
            return pieces[0]
        extent = sympy.Add(*map(self.extent_of, pieces))
        return (self.added(_Axis(extent, pieces=tuple(pieces))),)

    def side_by_side(self, dim: Axes) -> list[Axes]:
        """The pieces of a dimension; itself, if it has none."""
        dim = self.resolve(dim)
        joined = [axis for axis in dim if self.table[axis].pieces]
        if not joined:
            return [dim]
        if joined != [dim[0]]:
            raise NotExpressible("a dimension has others around its pieces")
        return [(*piece, *dim[1:]) for piece in self.pieces(dim[0])]

    def cut(self, dim: Axes, start: int, stop: int) -> tuple[int, int]:
        """Cuts a dimension where a part of it begins and ends, and everything that has it with it.
        Returns the numbers of the part's first piece and of the first behind it.
        """
        self.cut_at(dim, start)
        self.cut_at(dim, stop)
        ends = [0]
        for piece in self.side_by_side(dim):
            ends.append(ends[-1] + self.extent_of(piece))
        return ends.index(start), ends.index(stop)

    def cut_at(self, dim: Axes, place: int) -> None:
        """Cuts a dimension in front of an element."""
        begin = 0
        for piece in self.side_by_side(dim):
            extent = self.extent_of(piece)
            if not extent.is_Integer:
                raise NotExpressible("a dimension of unknown size is cut")
            if begin < place < begin + extent:
                if len(piece) != 1:
                    raise NotExpressible("a product of axes is cut")
                size = sympy.Integer(place - begin)
                pieces = self.new(size), self.new(extent - size)
                self.become(*piece, self.joined(pieces))
            begin += extent


def divides(small: sympy.Expr, large: sympy.Expr) -> bool:
    """Whether one extent is a whole multiple of the other, for every value of their symbols."""
    if small.is_Integer and large.is_Integer:
        return int(small) != 0 and int(large) % int(small) == 0
    quotient = sympy.cancel(large / small)
    return bool(quotient.is_integer) and sympy.denom(quotient) == 1
