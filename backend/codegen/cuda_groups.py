"""A launch down groups of columns in CUDA C++: a team has some whole groups of every image.

What is the same for a group is a number of each thread, whose columns are all of one group. What is
the same for a column is an array in registers, an element for each of a thread's columns; what is
read of it once for all images stays there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_columns import DownPrinter
from normpass.backend.codegen.cuda_team import UNROLL
from normpass.backend.program.team_groups import ALONG, OF_COLUMNS, OF_GROUPS, group_axis, kind_of
from normpass.backend.program.tree import (
    Begin,
    Finish,
    Keep,
    Load,
    Loop,
    Recall,
    Store,
    definition,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from normpass.backend.program.tree import Accumulator, Launch, Leaf, Node, Plan


class GroupsPrinter(DownPrinter):
    """Prints one launch down groups of columns."""

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan, launch, number)
        group = group_axis(plan, launch)
        assert group is not None
        self.axis, self.group = self.columns, group
        self.is_first = f"row.leads({self.team.group})"
        nodes = [*walk(*launch.body)]
        self.kept_here = {n.value for n in nodes if isinstance(n, Keep) and not n.shared}
        read = {
            definition(node): node
            for node in nodes
            if (isinstance(node, Load) or (isinstance(node, Recall) and node.shared))
            and self.is_of_columns(node)
        }
        shares = set(launch.blocks.shares)
        self.for_each = [n for n in read.values() if not shares.isdisjoint(axes_of(n))]
        self.once = [node for node in read.values() if node not in self.for_each]

    def is_of_columns(self, node: Load | Recall) -> bool:
        """Whether what a node reads is the same for a column."""
        axes = set(axes_of(node))
        return self.columns.name in axes and axes.isdisjoint(axis.name for axis in self.rows)

    # -- before rows

    def adding_up(self) -> int:
        first = super().adding_up()
        if self.team.apart and self.team.group > 1:
            sizes = f"{self.team.group}, {self.team.apart}"
            self.line(f"Beside<scalar, Row, {sizes}> beside(chip + {first});")
        return first + self.team.exchange_of_bands

    def tile_indices(self, tile: str) -> None:
        size, columns = self.launch.blocks.size[self.group.name], self.columns.extent
        others = [axis for axis in self.tiles if axis != self.group]
        count = self.group.extent // size
        first = f"{tile} % {count}" if others else tile
        self.line(
            f"const int64_t {self.index(self.group.name)} = "
            f"{first} * {size} + row.column() / {columns};"
        )
        self.line(f"const int64_t {self.index(self.columns.name)} = row.column() % {columns};")
        self.unravel(others, f"{tile} / {count}")

    def asking(self) -> None:
        super().asking()
        self.read(self.once)

    def read(self, nodes: Iterable[Load | Recall]) -> None:
        """Reads what is the same for a column."""
        for node in nodes:
            match node:
                case Load(access):
                    value, text = access.buffer.name, self.element_at(access)
                    text = self.number_at(value, text)
                case Recall(value, _, _):
                    text = self.as_read(value, f"*({self.kept(value)} + j)")
            self.for_each_column(value, text)
            self.indexed.add(value)

    def as_read(self, value: str, text: str) -> str:
        """A number from an array as what the value is."""
        return f"mask_of({text})" if value in self.truth else text

    def begin_shared(self, accumulator: Accumulator) -> None:
        if self.columns.name in accumulator.axes:
            self.begin_columns(accumulator)
        else:
            super().begin_shared(accumulator)

    # -- rows

    def row_begins(self) -> None:
        self.read(self.for_each)
        for value in sorted(self.kept_here):
            self.line(f"scalar columns_{value}[{self.team.lanes}];")

    def loop(self, loop: Loop, *, is_first: bool, is_last: bool) -> None:
        if loop.axis != self.columns:
            nests = [n for n in self.launch.body if isinstance(n, Loop) and n.axis != self.columns]
            is_first, is_last = loop is nests[0], loop is nests[-1]
            self.phase(self.flattened(loop), is_first=is_first, is_last=is_last)
            return
        self.line(UNROLL)
        with self.block(f"for (int j = 0; j < {self.team.lanes}; ++j)"):
            for node in loop.body:
                self.in_lanes(node)

    def read_aside(self, load: Load) -> set[str]:
        return set() if self.is_of_columns(load) else super().read_aside(load)

    def in_lanes(self, node: Node) -> None:
        rows = {axis.name for axis in self.rows}
        match node:
            case Load() | Recall(_, _, True):
                pass  # before the loop
            case Recall(value, _, _):
                array = f"columns_{value}" if value in self.kept_here else f"acc_{value}"
                self.define(value, self.as_read(value, f"{array}[j]"))
            case Keep(value, _, True):
                self.line(f"if (row.leads()) *({self.kept(value)} + j) = {self.as_number(value)};")
            case Keep(value, _, _):
                self.line(f"columns_{value}[j] = {self.as_number(value)};")
            case Store(output, access) if rows.isdisjoint(access.strides):
                text = f"put({self.element_at(access)}, {self.as_number(output.value)});"
                self.line(f"if (row.leads()) {text}")
            case _:
                super().in_lanes(node)

    def leaf(self, node: Leaf) -> None:
        match node:
            case Begin(accumulator) if accumulator.axes and not accumulator.shared:
                self.begin_columns(accumulator)
            case Finish(accumulator) if accumulator.axes:
                pass  # what is added up is recalled
            case _:
                super().leaf(node)

    # -- sums

    def accumulate(self, accumulator: Accumulator) -> None:
        index = "[j]" if self.columns.name in accumulator.axes else ""
        name, text = f"acc_{accumulator.op.name}{index}", self.as_number(accumulator.operand)
        self.line(f"accumulate<{self.fn(accumulator)}>({name}, {text});")

    def add_up(self, accumulators: list[Accumulator]) -> None:
        (row,) = self.rows
        ways = {OF_GROUPS: f"down.groups<{self.team.group}, ", OF_COLUMNS: "down.all<"}
        if self.team.group > 1:
            ways[ALONG] = "beside.all<"
        for kind, how in ways.items():
            found = (each for each in accumulators if kind_of(each, row, self.columns) == kind)
            self.added_up(how, found)

    def leave(self) -> None:
        if self.copied:
            self.line("device::wait<0>();")
        for each in self.launch.shared:
            self.leave_sum(each)

    def leave_sum(self, accumulator: Accumulator) -> None:
        if self.columns.name not in accumulator.axes:
            super().leave_sum(accumulator)
            return
        self.add_up([accumulator])
        to = f"{self.partial(accumulator)} + {self.index(self.columns.name)} + j"
        with self.block("if (row.leads())"):
            self.of_columns(f"*({to}) = acc_{accumulator.op.name}[j];")


def axes_of(node: Load | Recall) -> Iterable[str]:
    return node.access.strides if isinstance(node, Load) else node.axes
