"""Teams whose rows lie across memory, in CUDA C++: a team has some columns, from top to bottom.

So batch norm has its channels where they are last. Neighbours in memory are columns, of which each
thread has a few; threads side by side have a line of memory, and others the next rows of it. What
is the same for a column each thread has in registers, for its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import lcm, prod
from typing import TYPE_CHECKING

from normpass.backend.program.team import WARP, Team, groups, refused, shared_bytes, team_of
from normpass.backend.program.team_rows import lanes_of, loads_along, names, not_next_to_each_other
from normpass.backend.program.team_segments import merged
from normpass.backend.program.tree import (
    Accumulate,
    Allocate,
    Blocks,
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
    from normpass.backend.program.tree import Launch, Node, Plan

# Bytes of a row that a team has, at least where there are so many and at most: those that memory
# hands out at a time, and those that a warp reads at a time of a few rows.
LEAST, MOST = 32, 128
# Elements of a thread: a kernel's text goes through them one after another.
MOST_OF_THREAD = 256
# Blocks that have something to do, at least: with fewer, most of a GPU waits.
BUSY = 96


class Down:
    """A launch whose teams go down rows that lie across memory.

    columns: the axis along which neighbours lie. axes: those that rows lie along, of which one
    knows how many there are at most. count: of rows, at most. rows: what is read in vectors of
    columns. lanes: of such a vector. shares: the outer axes of which a team has several elements,
    one after another. stages: so many of them may be on chip at once.
    """

    shares: tuple[str, ...] = ()
    stages: tuple[int, ...] = (1,)

    def __init__(self, plan: Plan, launch: Launch) -> None:
        self.plan, self.launch = plan, replace(launch, body=merged(launch.body))
        self.nodes = [*walk(*self.launch.body)]
        self.columns = plan.axis[plan.vector]
        self.axes = tuple(axis for axis in launch.inner if axis != self.columns)
        if len(self.axes) not in (1, 2) or any(axis.most is None for axis in self.axes):
            raise refused(plan, "rows of which the most is known", f"loops over {names(self.axes)}")
        self.count = prod(axis.hint for axis in self.axes)
        if not self.columns.extent.is_number:
            raise refused(plan, "a known number of columns", f"{self.columns.extent}")
        self.check()
        found = loads_along(self.nodes, plan.vector)
        self.rows = [load for load in found if self.axes[-1].name in load.access.strides]
        self.lanes = lanes_of(plan, self.nodes, self.rows, self.columns)

    def check(self) -> None:
        """Raises UnsupportedPlanError for what cannot be printed."""
        for node in self.nodes:
            if complaint := self.complaint(node):
                raise refused(self.plan, *complaint)

    def complaint(self, node: Node) -> tuple[str, str] | None:
        """What was expected of a node instead of what it is; None if it can be printed."""
        raise NotImplementedError

    def fitting(self, clusters: Clusters) -> Launch:
        """The launch with the team that keeps most of a GPU busy, and reads most of a line.

        Raises:
            UnsupportedPlanError: if there is none that holds its columns.
        """
        sizes = [1 << n for n in range(clusters.blocks.bit_length())]
        widths = [*self.widths()]
        if not widths:
            expected = f"columns in {LEAST} to {MOST} bytes side by side"
            raise refused(self.plan, expected, f"{self.columns.extent} of {self.lanes} together")
        found = [
            launch
            for team in product(widths, sizes, self.stages)
            if (launch := self.of(*team, clusters)) is not None
        ]
        if not found:
            held = f"{self.count} rows"
            raise refused(self.plan, f"columns that {clusters.blocks} blocks hold", held)
        return max(found, key=lambda launch: self.worth(launch, clusters))

    def widths(self) -> Iterator[int]:
        """Threads side by side."""
        raise NotImplementedError

    def tile(self, across: int) -> dict[str, int]:
        """How many elements of outer axes a team has of each."""
        raise NotImplementedError

    def summing(self, team: Team) -> Team:
        """The team with what it adds up at once."""
        return replace(team, together=max(map(len, groups(self.launch.body))))

    def of(self, across: int, blocks: int, stages: int, clusters: Clusters) -> Launch | None:
        """With so many threads side by side and so many blocks; None if they do not hold it, or
        leave most of a GPU idle for long.
        """
        unit = lcm(across, WARP)
        if unit > clusters.threads:
            return None
        width = self.plan.region.compute_dtype.itemsize
        most = max(1, clusters.of_thread // (width * self.lanes))  # rows of a thread
        rows = -(-self.count // blocks)  # of a block
        threads = -(-rows // most) * across
        threads = max(unit, min(clusters.threads // unit * unit, -(-threads // unit) * unit))
        vectors = -(-rows * across // threads)
        held = tuple(load for load in self.rows if set(self.shares).isdisjoint(load.access.strides))
        staged = tuple(load for load in self.rows if load not in held)
        team = Team(threads, width, blocks, self.lanes, vectors, stages, staged, across=across)
        launch = replace(self.launch, team=self.summing(team), held=held)
        size = {axis.name: 1 for axis in launch.outer if axis.name not in self.shares}
        size |= self.tile(across)
        room = clusters.memory // (shared_bytes(launch) + clusters.system)
        programs = max(1, min(room, clusters.warps * WARP // threads))
        size |= {axis.name: axis.hint for axis in launch.inner}
        row, warps = frozenset(axis.name for axis in launch.inner), blocks * threads // WARP
        launch = replace(launch, blocks=Blocks(self.shares, size, row, 1, warps, programs))
        fits = shared_bytes(launch) <= clusters.shared and team.numbers <= MOST_OF_THREAD
        is_long = team.numbers * width > clusters.of_thread
        return launch if fits and not (is_long and self.busy(launch) < BUSY) else None

    def busy(self, launch: Launch) -> int:
        """Blocks that there are."""
        size, blocks = launch.blocks.size, team_of(launch).blocks
        return blocks * prod(-(-axis.hint // size.get(axis.name, 1)) for axis in launch.outer)

    def worth(self, launch: Launch, clusters: Clusters) -> tuple[int, ...]:
        """The larger the better: blocks up to most of a GPU's unless threads have little to do, a
        wide line, threads enough, few blocks of a cluster.
        """
        team = team_of(launch)
        is_enough = team.numbers * team.width <= clusters.of_thread
        busy = BUSY if is_enough else min(self.busy(launch), BUSY)
        return busy, team.across, is_enough, -team.blocks


class Columns(Down):
    """A launch whose tiles are columns: one loop after another down the rows, no sum that leaves
    it. Rows lie along one axis or two; what varies along the outer one alone is read again for each
    of them.
    """

    def check(self) -> None:
        for loop in self.launch.body:
            if isinstance(loop, Loop) and not self.is_nest(loop):
                found = f"one over {loop.axis.name}"
                raise refused(self.plan, f"loops down {names(self.axes)}", found)
        super().check()
        if self.launch.shared:
            found = str(self.launch.shared[0].op)
            raise refused(self.plan, "no sum that leaves a launch", found)

    def is_nest(self, loop: Loop) -> bool:
        """Whether a loop goes down all rows: in the outer of two there is nothing but values."""
        *values, last = loop.body
        if len(self.axes) == 1:
            return loop.axis == self.axes[0]
        return (loop.axis, last.axis if isinstance(last, Loop) else None) == self.axes and all(
            isinstance(node, Load | Compute) for node in values
        )

    def complaint(self, node: Node) -> tuple[str, str] | None:
        axes = {axis.name for axis in self.axes}
        match node:
            case Store(_, access) if self.columns.name not in access.strides:
                return "results of each column", access.buffer.name
            case Store(_, access) if 0 < len(axes & access.strides.keys()) < len(axes):
                return "results of each row", access.buffer.name
            case Load(access) | Store(_, access) if axes & access.strides.keys():
                return not_next_to_each_other(access, self.columns.name)
            case Accumulate(accumulator) if accumulator.axes or set(accumulator.op.axes) != axes:
                return f"sums along {names(self.axes)}", str(accumulator.op)
            case Accumulate(accumulator):
                if self.columns.name not in self.plan.region.varies[accumulator.operand]:
                    return "sums of each column", str(accumulator.op)
            case Keep() | Recall() | Regroup() | Allocate():
                return "no array", type(node).__name__
        return None

    def widths(self) -> Iterator[int]:
        itemsize = min((int(load.access.buffer.dtype.itemsize) for load in self.rows), default=4)
        count = int(self.columns.extent) // self.lanes
        for across in (1, 2, 4, 8, 16, WARP):
            size = across * self.lanes * itemsize
            is_whole = across == count
            if count % across == 0 and (LEAST <= size <= MOST or (is_whole and size <= MOST)):
                yield across

    def tile(self, across: int) -> dict[str, int]:
        return {self.columns.name: across * self.lanes}
