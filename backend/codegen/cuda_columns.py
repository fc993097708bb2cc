"""A launch down columns in CUDA C++: a team has a few columns of all rows.

What is the same for a column is an array in registers, an element for each of a thread's columns.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_rows import RowsPrinter
from normpass.backend.codegen.cuda_team import UNROLL
from normpass.backend.codegen.text import factor, index_expression
from normpass.backend.program.tree import (
    Begin,
    Compute,
    Finish,
    Load,
    Loop,
    Store,
)
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from normpass.backend.program.tree import Access, Accumulator, Launch, Leaf, Plan

# Of rows that lie apart: the addresses of all of a thread's would stay in registers between loops.
A_FEW = "#pragma unroll 4"


class DownPrinter(RowsPrinter):
    """Prints what is the same of launches down rows."""

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan, launch, number)
        self.columns = plan.axis[plan.vector]
        self.rows = [axis for axis in launch.inner if axis != self.columns]

    def row_type(self) -> None:
        team = self.team
        sizes = (team.threads, team.blocks, team.across, team.vectors, team.lanes)
        self.row("Columns", product(axis.extent for axis in self.rows), *sizes)

    def adding_up(self) -> int:
        if self.team.together:
            self.line(f"Down<scalar, Row, {self.team.together}> down(chip);")
        return self.team.exchange

    def unroll(self, loop: Loop) -> str:
        return A_FEW if any(isinstance(node, Store) for node in loop.body) else UNROLL

    @contextmanager
    def vectors(self, unroll: str = UNROLL) -> Iterator[None]:
        with super().vectors(unroll):
            self.index_inside()
            yield

    def index_inside(self) -> None:
        self.unravel(self.rows, "row.at(k)")

    def vector_at(self, access: Access) -> str:
        return self.address(access)

    def flattened(self, loop: Loop) -> Loop:
        """A nest's inner loop, with the values of the outer one."""
        *values, inner = loop.body
        return replace(inner, body=(*values, *inner.body)) if isinstance(inner, Loop) else loop

    # -- columns

    def of_columns(self, text: str) -> None:
        """What is done for each of a thread's columns."""
        self.line(UNROLL)
        self.line(f"for (int j = 0; j < {self.team.lanes}; ++j) {text}")

    def for_each_column(self, value: str, expression: str) -> None:
        """A value for each of a thread's columns."""
        name = self.free.value[value]
        self.line(f"{self.type_of(value)} {name}[{self.team.lanes}];")
        self.of_columns(f"{name}[j] = {expression};")

    def element_at(self, access: Access) -> str:
        """The address of an element for one of a thread's columns."""
        step = access.strides.get(self.columns.name)
        if step is None:
            return self.address(access)
        text = index_expression(step)
        return f"{self.address(access)} + {'j' if text == '1' else f'j * {factor(text)}'}"

    def begin_columns(self, accumulator: Accumulator) -> None:
        """A sum for each of a thread's columns."""
        name = f"acc_{accumulator.op.name}"
        self.line(f"scalar {name}[{self.team.lanes}];")
        self.of_columns(f"{name}[j] = {self.fn(accumulator)}::neutral<scalar>();")

    def added_up(self, how: str, accumulators: Iterable[Accumulator]) -> None:
        """Sums of one kind over all of a team."""
        if accumulators := [*accumulators]:
            names = ", ".join(f"acc_{each.op.name}" for each in accumulators)
            self.line(f"{how}{', '.join(map(self.fn, accumulators))}>({names});")


class ColumnsPrinter(DownPrinter):
    """Prints one launch down columns."""

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan, launch, number)
        self.tiles = [*launch.outer]

    def source(self) -> list[str]:
        self.indent = 1
        self.places()
        self.share()
        self.asking()
        self.body()
        return [*self.head(), *self.lines, "}"]

    def share(self) -> None:
        """Which columns a team has."""
        blocks = f" / {self.team.blocks}" if self.team.blocks > 1 else ""
        self.line(f"const int64_t program = blockIdx.x{blocks};")
        size = self.launch.blocks.size[self.columns.name]
        tiles = int(self.columns.extent) // size
        others = [axis for axis in self.tiles if axis != self.columns]
        text = f"program % {tiles}" if others else "program"
        self.line(
            f"const int64_t {self.index(self.columns.name)} = {text} * {size} + row.column();"
        )
        self.unravel(others, f"program / {tiles}")
        self.scalars()

    def asking(self) -> None:
        """All that is read of the columns is asked for at once."""
        with self.vectors(A_FEW):
            for load in self.on_chip:
                self.ask(load.access, "0")
            self.line("device::group();")

    # -- columns

    def body(self) -> None:
        rows, column = {axis.name for axis in self.rows}, self.columns.name
        of_columns = {v for v, axes in self.varies.items() if column in axes and not axes & rows}
        self.indexed |= of_columns
        super().body()

    def loop(self, loop: Loop, *, is_first: bool, is_last: bool) -> None:
        super().loop(self.flattened(loop), is_first=is_first, is_last=is_last)

    def read_aside(self, load: Load) -> set[str]:
        name, access = load.access.buffer.name, load.access
        if self.columns.name not in access.strides:
            return super().read_aside(load)
        self.for_each_column(name, self.number_at(name, self.element_at(access)))
        return {name}

    def indices(self) -> None:
        """There is nothing but columns."""

    def define(self, value: str, expression: str) -> None:
        if value not in self.indexed:
            super().define(value, expression)
            return
        self.for_each_column(value, expression)

    def leaf(self, node: Leaf) -> None:
        match node:
            case Load(access):
                name = access.buffer.name
                self.define(name, self.number_at(name, self.element_at(access)))
            case Compute(op):
                self.compute(op)
            case Begin(accumulator):
                self.begin_columns(accumulator)
            case Finish(accumulator):
                self.define(accumulator.op.name, f"acc_{accumulator.op.name}[j]")
            case Store(output, access):
                with self.block("if (row.leads())"):
                    value = self.as_number(output.value)
                    self.of_columns(f"put({self.element_at(access)}, {value});")
            case _:
                raise AssertionError(f"expected what is the same for a column, found {node}")

    def accumulate(self, accumulator: Accumulator) -> None:
        name, text = f"acc_{accumulator.op.name}[j]", self.as_number(accumulator.operand)
        self.line(f"accumulate<{self.fn(accumulator)}>({name}, {text});")

    def add_up(self, accumulators: list[Accumulator]) -> None:
        self.added_up("down.all<", accumulators)
