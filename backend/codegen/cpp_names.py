"""How generated C++ spells what a plan speaks of: lines, values and their types, pointwise
operations, offsets, arrays of workers.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import sympy
import torch

from normpass.backend.codegen.text import extent_name, factor, index_expression
from normpass.backend.program.pointwise import POINTWISE, truth_values
from normpass.backend.program.tree import Abreast, Jam
from normpass.passes.region import EXPAND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.backend.program.tree import Accumulator, LoopAxis, Plan
    from normpass.passes.region import Arg, Op


class Names:
    """Names and lines of one kernel."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.region = plan.region
        self.varies = self.region.varies
        self.truth = truth_values(self.region)
        self.double = self.region.compute_dtype is torch.float64
        self.jam = plan.together.axis if plan.together else None
        self.abreast = plan.together is not None and isinstance(plan.together.kind, Abreast)
        self.buffers = [*self.region.inputs, *(o.buffer for o in self.region.outputs)]
        self.lines: list[str] = []
        self.indent = 0
        self.along, self.lanes = plan.vector, "lanes"  # the axis of lanes, and how many there are
        self.first: str | None = None  # an axis of which the first of several rows is meant
        self.together_now = False  # whether leaves stand in loops over rows that go together
        self.each: set[str] = set()  # values computed in lanes along rows, to be read one by one
        self.indexed: set[str] = set()  # values and accumulators of which every jammed row has one
        self.held: set[str] = set()  # array accumulators held in a register for the rows of a jam

    # -- text

    def line(self, text: str = "") -> None:
        self.lines.append(f"{'  ' * self.indent}{text}" if text else "")

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Iterator[None]:
        self.line(f"{head} {{".lstrip())
        self.indent += 1
        yield
        self.indent -= 1
        self.line(tail)

    # -- names and types

    def is_vector(self, value: str) -> bool:
        return self.along in self.varies[value]

    def type_of(self, value: str) -> str:
        if self.is_vector(value):
            return "Vec"
        return "bool" if value in self.truth else "scalar"

    def name(self, value: str) -> str:
        if value in self.each and self.along == self.plan.vector:
            return f"each_{value}[j]"
        return f"{value}[j]" if value in self.indexed else value

    def define(self, value: str, expression: str) -> None:
        """One value: an element of a declared array of rows, or a constant of its own."""
        if value in self.indexed:
            self.line(f"{value}[j] = {expression};")
        else:
            self.line(f"const {self.type_of(value)} {value} = {expression};")

    def extent(self, axis: LoopAxis) -> str:
        return extent_name(axis, self.region)

    def offset(self, strides: Mapping[str, sympy.Expr]) -> str:
        terms = []
        for axis in self.plan.axes:
            if axis.name in strides:
                stride = index_expression(strides[axis.name])
                name = f"{axis.name}0" if axis.name == self.first else axis.name
                terms.append(name if stride == "1" else f"{name} * {factor(stride)}")
        return " + ".join(terms) or "0"

    def argument(self, arg: Arg, *, vector: bool, truth: bool) -> str:
        """An argument as its operation takes it: one or lanes, number or truth value."""
        if not isinstance(arg, str):
            text = ("true" if arg else "false") if truth else number(float(arg))
            is_vector = False
        else:
            text, is_vector = self.name(arg), self.is_vector(arg)
            if truth and arg not in self.truth:
                text = f"mask({text})" if is_vector else f"mask_of({text})"
            elif not truth and arg in self.truth:
                text = self.as_number(arg)
        if vector and not is_vector:
            text = f"mask<scalar>({text})" if truth else f"Vec({text})"
        return text

    def as_number(self, value: str) -> str:
        """A value as a number: a truth value is one or zero."""
        name = self.name(value)
        if value not in self.truth:
            return name
        if self.is_vector(value):
            return f"where_({name}, Vec(scalar(1)), Vec(scalar(0)))"
        return f"where_({name}, scalar(1), scalar(0))"

    def compute(self, op: Op) -> None:
        if op.fn == "numel":
            size = index_expression(self.plan.numel[op.name])
            self.define(op.name, f"static_cast<scalar>({size})")
            return
        if op.fn == EXPAND:
            self.define(op.name, self.name(str(op.args[0])))
            return
        row = POINTWISE[op.fn]
        vector = any(isinstance(arg, str) and self.is_vector(arg) for arg in op.args)
        args = [
            self.argument(arg, vector=vector, truth=str(k) in row.truth)
            for k, arg in enumerate(op.args)
        ]
        self.define(op.name, row.cpp.format(*args))

    # -- arrays

    def array(self, value: str, axes: Sequence[str]) -> str:
        return f"{value}_by_{'_'.join(axes)}" if axes else f"{value}_total"

    def array_size(self, value: str, axes: Sequence[str]) -> str:
        size = index_expression(sympy.prod([self.plan.axis[axis].extent for axis in axes]))
        return f"{factor(size)} * Vec::size()" if self.is_wide(value, axes) else size

    def is_wide(self, value: str, axes: Sequence[str]) -> bool:
        """Whether an array has all lanes at each of its elements: the loop over lanes is outside of
        those over its axes.
        """
        return self.is_vector(value) and self.plan.vector not in axes

    def rows_together(self) -> str:
        """How many rows go together."""
        kind = self.plan.together.kind if self.plan.together else None
        return str(kind.rows) if isinstance(kind, Jam) else "Vec::size()"

    def size_of(self, accumulator: Accumulator) -> str:
        return self.array_size(accumulator.op.name, accumulator.axes)

    def element(self, value: str, axes: Sequence[str]) -> str:
        """The address of a value's element in its array."""
        offset = self.offset(self.plan.array_strides(axes))
        if self.is_wide(value, axes):
            offset = f"{factor(offset)} * Vec::size()"
        address = f"{self.array(value, axes)} + {offset}"
        if self.jam in self.varies[value] and self.jam not in axes:
            address += f" + j * {self.array_size(value, axes)}"
        return address


def number(value: float) -> str:
    """A literal of the compute type."""
    if math.isnan(value):
        return "std::numeric_limits<scalar>::quiet_NaN()"
    if math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"{sign}std::numeric_limits<scalar>::infinity()"
    return f"scalar({value!r})"
