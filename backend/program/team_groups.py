"""Teams whose columns go in groups, in CUDA C++: some whole groups from top to bottom.

So group norm has its channels where they are last: those of a group lie beside each other, and the
next group's beside them. A thread's columns are all of one group, so that what is the same for a
group is a number of each thread; what is the same for a column is an array in registers, as in
team_columns.py. A team goes through images one after another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.team import groups, refused, team_of
from normpass.backend.program.team_columns import LEAST, Down
from normpass.backend.program.team_rows import STAGES, keeps, names, not_next_to_each_other
from normpass.backend.program.tree import (
    SHARED,
    Accumulate,
    Allocate,
    Compute,
    Keep,
    Load,
    Loop,
    Recall,
    Regroup,
    Store,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.backend.program.machine import Clusters
    from normpass.backend.program.team import Team
    from normpass.backend.program.tree import Accumulator, Launch, LoopAxis, Node, Plan

# Bytes side by side, at most: a row of a team of eight groups of ten channels, or of one of more.
MOST = 256
# What a sum goes along: all of a group, rows alone, or columns alone.
OF_GROUPS, OF_COLUMNS, ALONG = "groups", "columns", "along"


def kind_of(accumulator: Accumulator, row: LoopAxis, columns: LoopAxis) -> str:
    """What a sum goes along of a group; nothing if that is the images alone."""
    axes = accumulator.op.axes
    if row.name in axes:
        return OF_GROUPS if columns.name in axes else OF_COLUMNS
    return ALONG if columns.name in axes else ""


class Groups(Down):
    """A launch whose tiles are groups of columns: nests of one loop down the rows and one along a
    group's columns, and loops along these alone. group: the axis of the groups (`group_axis`).
    """

    stages = (STAGES, 1)

    def __init__(self, plan: Plan, launch: Launch, group: LoopAxis) -> None:
        self.group = group
        reduced = [set(each.op.axes) for each in launch.shared]
        self.shares = tuple(
            axis.name
            for axis in launch.outer
            if axis != group and all(axis.name in one for one in reduced)
        )
        super().__init__(plan, launch)

    def check(self) -> None:
        if len(self.axes) != 1:
            raise refused(self.plan, "rows along one axis", names(self.axes))
        for loop in self.launch.body:
            if isinstance(loop, Loop) and not (self.is_nest(loop) or self.is_along(loop)):
                expected = f"loops down {self.axes[0].name} or along {self.columns.name}"
                raise refused(self.plan, expected, f"one over {loop.axis.name}")
        super().check()
        for loop in self.launch.body:
            inside = walk(loop) if isinstance(loop, Loop) else iter((loop,))
            for node in inside:
                if isinstance(node, Accumulate) and not self.adds(node.accumulator, loop):
                    found = str(node.accumulator.op)
                    raise refused(self.plan, "sums of groups and columns", found)

    def is_nest(self, loop: Loop) -> bool:
        """Whether a loop goes down all rows, and in each along the columns, after its values."""
        *values, last = loop.body
        return (
            loop.axis == self.axes[0]
            and isinstance(last, Loop)
            and self.is_along(last)
            and all(isinstance(node, Load | Compute) for node in values)
        )

    def is_along(self, loop: Loop) -> bool:
        """Whether a loop goes along the columns, and there is none in it."""
        return loop.axis == self.columns and not any(isinstance(n, Loop) for n in loop.body)

    def complaint(self, node: Node) -> tuple[str, str] | None:
        row, column = self.axes[0].name, self.columns.name
        match node:
            case Load(access) | Store(_, access) if {row, column} <= access.strides.keys():
                return not_next_to_each_other(access, column)
            case Store(_, access) if row in access.strides:
                return "results of each column", access.buffer.name
            case Keep(value, axes, shared) | Recall(value, axes, shared):
                is_kept_here = shared and isinstance(node, Recall) and keeps(self.nodes, value)
                if row in axes or is_kept_here:
                    return "no array", value
            case Regroup() | Allocate():
                return "no array", type(node).__name__
        return None

    def adds(self, accumulator: Accumulator, where: Node) -> bool:
        """Whether what is added up in a part of the body is of one of the kinds there are: a sum
        over all of a group (down its columns, or along them of what their rows have been added up
        to), or one down each column; the same with what is left of all of a team's rows.
        """
        kind, of_columns = self.kind(accumulator), self.columns.name in accumulator.axes
        if self.group.name in accumulator.op.axes or self.axes[0].name in accumulator.axes:
            return False
        if not isinstance(where, Loop):
            return accumulator.shared and not kind and not of_columns
        if self.is_along(where):
            return kind == ("" if of_columns and accumulator.shared else ALONG)
        return kind == (OF_COLUMNS if of_columns else OF_GROUPS)

    def widths(self) -> Iterator[int]:
        itemsize = min((int(load.access.buffer.dtype.itemsize) for load in self.rows), default=4)
        size, count = int(self.columns.extent) * itemsize, int(self.group.extent)
        for together in range(1, count + 1):
            is_wide = together == count or together * size >= LEAST
            if count % together == 0 and is_wide and (together == 1 or together * size <= MOST):
                yield together * self.of_group

    @property
    def of_group(self) -> int:
        """Threads side by side that have a group."""
        return int(self.columns.extent) // self.lanes

    def tile(self, across: int) -> dict[str, int]:
        return {self.group.name: across // self.of_group, SHARED: 1}

    def summing(self, team: Team) -> Team:
        shared = [[each] for each in self.launch.shared]  # each is complete on its own
        phases = [[each.accumulator for each in done] for done in groups(self.launch.body)]
        kinds = [[self.kind(each) for each in done] for done in (*phases, *shared)]
        together = max(max(done.count(OF_GROUPS), done.count(OF_COLUMNS)) for done in kinds)
        along = max(done.count(ALONG) for done in kinds)
        return replace(team, together=together, apart=along, group=self.of_group)

    def kind(self, accumulator: Accumulator) -> str:
        return kind_of(accumulator, self.axes[0], self.columns)

    def worth(self, launch: Launch, clusters: Clusters) -> tuple[int, ...]:
        """The same with the next image on its way before a wide line."""
        busy, *others = super().worth(launch, clusters)
        return busy, team_of(launch).stages, *others


def group_axis(plan: Plan, launch: Launch) -> LoopAxis | None:
    """The axis of groups whose columns lie beside each other; None if there is none."""
    columns, inner = plan.axis[plan.vector], {axis.name for axis in launch.inner}
    if len(inner) < 2 or columns.name not in inner:
        return None
    accesses = [
        node.access
        for node in walk(*launch.body)
        if isinstance(node, Load | Store) and inner <= node.access.strides.keys()
    ]
    for axis in launch.outer:
        is_beside = all(a.strides.get(axis.name) == columns.extent for a in accesses)
        if accesses and axis.extent.is_number and is_beside:
            return axis
    return None
