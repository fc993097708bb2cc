"""Writes the ops of a region: values get names, equal ones are written once, and what does not
change along an axis is not added up along it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normpass.passes.numbers import Call, Count
from normpass.passes.pieces import Pieces, Value, values_of
from normpass.passes.region import Arg, Op, format_arg

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from normpass.passes.axis_table import Axes
    from normpass.passes.domain import Domain
    from normpass.passes.numbers import Number
    from normpass.passes.region import Output


# How the results of a reduction over parts come together.
OF_TWO = {"sum": "add", "amax": "maximum", "amin": "minimum", "prod": "mul"}


class OpWriter:
    """The ops of one region, in the order in which they are written.

    axis_names: of the domain's axes. varies: the axes that each value varies over. positions: the
    values that are the numbers of positions along an axis. has_one_hot_sum: whether something was
    added up that is zero but at one of them, and so without a sum.
    """

    def __init__(self, domain: Domain, axis_names: Mapping[int, str]) -> None:
        self.domain = domain
        self.axis_names = axis_names
        self.ops: dict[tuple[Any, ...], Op] = {}
        self.varies: dict[str, frozenset[int]] = {}
        self.used: dict[str, int] = {}
        self.positions: set[str] = set()
        self.has_one_hot_sum = False

    def fresh(self, stem: str) -> str:
        """A name that no value has yet."""
        count = self.used.get(stem, 0)
        self.used[stem] = count + 1
        return f"{stem}_{count}" if count else stem

    def input(self, stem: str, varies: Iterable[int]) -> str:
        """The name of a value that comes from outside."""
        name = self.fresh(stem)
        self.varies[name] = frozenset(varies)
        return name

    def emit(self, fn: str, *args: Arg, axes: tuple[int, ...] = ()) -> Arg:
        """A value; the one there is, where it was written before."""
        if fn == "mul" and 1.0 in args:
            return next((arg for arg in args if arg != 1.0), 1.0)
        args = tuple(a if isinstance(a, str | bool) else float(a) for a in args)
        key = (fn, *map(format_arg, args), axes)  # as text, where -0.0 is not 0.0
        if key not in self.ops:
            name = self.fresh(fn)
            self.ops[key] = Op(name, fn, args, tuple(self.axis_names[axis] for axis in axes))
            varies = frozenset().union(*(self.varies[a] for a in args if isinstance(a, str)))
            self.varies[name] = varies - set(axes)
        return self.ops[key].name

    def live(self, outputs: Sequence[Output]) -> tuple[Op, ...]:
        """The ops that outputs need (a variance nobody asks for is not computed)."""
        wanted = {output.value for output in outputs}
        live: list[Op] = []
        for op in reversed(list(self.ops.values())):
            if op.name in wanted:
                wanted.update(arg for arg in op.args if isinstance(arg, str))
                live.append(op)
        return tuple(reversed(live))

    # ---- reductions

    def reduce(self, fn: str, value: Value, axes: Axes) -> Arg:
        """A reduction, piece by piece along a joined axis: first over those that run along the same
        axes. Where a value does not change along an axis, what that comes to.
        """
        along: dict[Axes, Arg] = {}
        for each, over in self.spread(value, axes):
            along[over] = self.emit(OF_TWO[fn], along[over], each) if over in along else each
        first, *others = [self.reduce_piece(fn, each, over) for over, each in along.items()]
        for other in others:
            first = self.emit(OF_TWO[fn], first, other)
        return first

    def spread(self, value: Value, axes: Axes) -> list[tuple[Arg, Axes]]:
        """The pieces of a value and the axes of each."""
        joined = next(filter(self.domain.is_joined, axes), None)
        if joined is None:
            assert not isinstance(value, Pieces)
            return [(value, axes)]
        pieces = self.domain.pieces(joined)
        place = axes.index(joined)
        return [
            (each, (*axes[:place], *piece, *axes[place + 1 :]))
            for each, piece in zip(values_of(value, len(pieces)), pieces, strict=True)
        ]

    def is_constant(self, value: Value, axes: Axes) -> bool:
        """Whether some piece of a value does not change along an axis."""
        return any(self.constant(each, over) for each, over in self.spread(value, axes))

    def constant(self, value: Arg, axes: Sequence[int]) -> tuple[int, ...]:
        """The axes along which a value does not change."""
        varies = self.varies[value] if isinstance(value, str) else frozenset()
        return tuple(axis for axis in axes if axis not in varies)

    def reduce_piece(self, fn: str, value: Arg, axes: Axes) -> Arg:
        constant = self.constant(value, axes)
        assert not (constant and fn == "prod"), "a product of equal factors is not written"
        changing = tuple(axis for axis in axes if axis not in constant)
        one_hot = self.one_hot_sum(value, *changing) if fn == "sum" and len(changing) == 1 else None
        if one_hot is not None:
            value, self.has_one_hot_sum = one_hot, True
        elif changing:
            value = self.emit(fn, value, axes=changing)
        if constant and fn == "sum":
            value = self.emit("mul", value, self.count(constant))
        return value

    def one_hot_sum(self, value: Arg, axis: int) -> Arg | None:
        """What a value adds up to that is zero but at one position along an axis; None if it is not
        written so.
        """
        op = self.written(value)
        if op is None:
            return None
        if op.fn == "mul":
            for one, other in (op.args, reversed(op.args)):
                if self.constant(one, [axis]) and (sum_ := self.one_hot_sum(other, axis)):
                    product = self.emit("mul", sum_, one)
                    if isinstance(one, float) and math.isfinite(one):
                        return product
                    # At every other position: NaN, where it is not finite.
                    return self.emit("add", product, self.emit("mul", one, 0.0))
        if op.fn == "where":
            where, there, elsewhere = op.args
            position = self.compared(where, axis)
            if position is not None and elsewhere == 0.0 and self.constant(there, [axis]):
                first, last = self.emit("ge", position, 0.0), self.count((axis,))
                inside = self.emit("logical_and", first, self.emit("lt", position, last))
                return self.emit("where", inside, there, 0.0)
        return None

    def compared(self, value: Arg, axis: int) -> Arg | None:
        """What is compared with the positions along an axis; None if nothing is."""
        op = self.written(value)
        if op is None or op.fn != "eq":
            return None
        for one, other in (op.args, reversed(op.args)):
            if one in self.positions and self.varies[str(one)] == {axis}:
                return other if self.constant(other, [axis]) else None
        return None

    def written(self, value: Arg) -> Op | None:
        """How a value was written; None for a number, and for what comes from outside."""
        return next((op for op in self.ops.values() if op.name == value), None)

    def mean(self, value: Value, axes: Axes) -> Arg:
        return self.emit("div", self.reduce("sum", value, axes), self.count(axes))

    def variance(self, value: Value, axes: Axes, correction: float | None) -> tuple[Arg, Arg]:
        """A variance about the mean, and the mean."""
        mean = self.mean(value, axes)
        squares = [self.square(each, mean) for each, _ in self.spread(value, axes)]
        total = self.reduce("sum", Pieces(tuple(squares)) if squares[1:] else squares[0], axes)
        return self.emit("div", total, self.degrees(axes, correction)), mean

    def square(self, value: Arg, mean: Arg) -> Arg:
        centred = self.emit("sub", value, mean)
        return self.emit("mul", centred, centred)

    def count(self, axes: Axes) -> Arg:
        """The number of elements that axes span: a number, or a value where it is known only at run
        time.
        """
        total = self.domain.extent_of(axes)
        if total.is_Integer:
            return float(total)
        joined = tuple(filter(self.domain.is_joined, axes))
        count = self.emit("numel", axes=tuple(axis for axis in axes if axis not in joined))
        return self.emit("mul", count, self.count(joined)) if joined else count

    def number(self, number: Number) -> Arg:
        """A number that is known at run time, as a value."""
        if isinstance(number, Count):
            return self.count(number.axes)
        if isinstance(number, Call):
            return self.emit(number.fn, *map(self.number, number.args))
        return number

    def degrees(self, axes: Axes, correction: float | None) -> Arg:
        """Degrees of freedom of a variance; never negative."""
        count = self.count(axes)
        correction = 1 if correction is None else correction
        if correction == 0:
            return count
        if isinstance(count, float):
            return max(count - correction, 0.0)
        return self.emit("maximum", self.emit("sub", count, float(correction)), 0.0)
