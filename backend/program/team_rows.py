"""Teams whose rows lie along one axis, in CUDA C++."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import sympy
import torch

from normpass.backend.program.team import (
    NARROWEST,
    WARP,
    WIDEST,
    Team,
    groups,
    refused,
    shared_bytes,
    team_of,
)
from normpass.backend.program.tree import (
    SHARED,
    Accumulate,
    Allocate,
    Blocks,
    Keep,
    Load,
    Recall,
    Regroup,
    Store,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from normpass.backend.program.machine import Clusters
    from normpass.backend.program.tree import Access, Launch, LoopAxis, Node, Plan

STAGES = 2


class Rows:
    """A launch over rows: one loop after another along one axis, on which neighbours in memory
    lie, and of which the length is known.
    """

    def __init__(self, plan: Plan, launch: Launch) -> None:
        self.plan, self.launch = plan, launch
        self.nodes = [*walk(*launch.body)]
        self.axis = self.checked()
        reduced = [set(each.op.axes) for each in launch.shared]
        self.shares = tuple(
            a.name for a in launch.outer if all(a.name in group for group in reduced)
        )
        if not self.shares:
            raise refused(plan, "sums over rows", "none that all rows are added to")
        self.rows = loads_along(self.nodes, self.axis.name)
        self.lanes = lanes_of(plan, self.nodes, self.rows, self.axis)

    def checked(self) -> LoopAxis:
        """The axis of the rows.

        Raises:
            UnsupportedPlanError: if there is something else in the launch.
        """
        axes = self.launch.inner
        if len(axes) != 1 or axes[0].name != self.plan.vector or not axes[0].extent.is_number:
            raise refused(self.plan, "rows of a known length", f"loops over {names(axes)}")
        for node in self.nodes:
            if complaint := self.complaint(node, axes[0].name):
                raise refused(self.plan, *complaint)
        return axes[0]

    def complaint(self, node: Node, axis: str) -> tuple[str, str] | None:
        """What was expected of a node instead of what it is; None if it can be printed."""
        match node:
            case Load(access) | Store(_, access):
                return not_next_to_each_other(access, axis)
            case Accumulate(accumulator) if not accumulator.shared:
                if accumulator.axes or set(accumulator.op.axes) != {axis}:
                    return f"sums along {axis}", str(accumulator.op)
            case Accumulate(accumulator) if set(accumulator.axes) - {axis} - self.tiles():
                return "sums of whole rows", str(accumulator.op)
            case Keep(value, _, shared) | Recall(value, _, shared):
                if not shared or axis in self.plan.region.varies[value]:
                    return "no array along rows", value
            case Regroup() | Allocate():
                return "rows", type(node).__name__
        return None

    def tiles(self) -> set[str]:
        """The outer axes that not all sums run over."""
        reduced = [set(each.op.axes) for each in self.launch.shared]
        return {a.name for a in self.launch.outer if not all(a.name in r for r in reduced)}

    def fitting(self, clusters: Clusters) -> Launch:
        """The launch with the smallest team that has room for rows ahead, or for one row, with
        threads enough if there are so many.

        Raises:
            UnsupportedPlanError: if there is none.
        """
        sizes = [1 << n for n in range(clusters.blocks.bit_length())]
        # What is the same for all rows is read again only where a cluster has no room for it, and
        # threads have few elements of a row.
        kinds = [(True, False), (False, False), *[(True, True)] * (clusters.blocks > 1)]
        for (is_enough, is_aside), stages, blocks in product(kinds, (STAGES, 1), sizes):
            launch = self.of(blocks, stages, clusters, is_aside=is_aside)
            team, shared = team_of(launch), shared_bytes(launch)
            if is_enough and team.numbers * team.width > clusters.of_thread:
                continue
            fits = self.registers(team) <= clusters.registers and shared <= clusters.shared
            if fits and self.suits(team):
                return launch
        held = f"{self.registers(team)} registers for sums and {shared} bytes"
        expected = f"rows that {clusters.blocks} blocks hold"
        raise refused(self.plan, expected, f"{held} of a block at least")

    def is_in_order(self, load: Load) -> bool:
        """Whether what a block has of a row lies on chip as in memory."""
        return self.lanes * int(load.access.buffer.dtype.itemsize) == WIDEST

    def suits(self, team: Team) -> bool:
        """Whether a team is worth its threads."""
        return True

    def of(self, blocks: int, stages: int, clusters: Clusters, *, is_aside: bool) -> Launch:
        """With a team of so many blocks. is_aside: whether what is the same for all rows stays in
        memory.
        """
        width = self.plan.region.compute_dtype.itemsize
        same = [load for load in self.rows if set(self.shares).isdisjoint(load.access.strides)]
        staged = tuple(load for load in self.rows if load not in same)
        held, aside = ((), tuple(same)) if is_aside else (tuple(same), ())
        together = max(int(any(self.over_rows())), *map(len, groups(self.launch.body)))
        bulk = tuple(load for load in staged if clusters.bulk and self.is_in_order(load))
        team = Team(0, width, blocks, self.lanes, 1, stages, staged, together, bulk=bulk)
        team = self.shared_out(replace(team, aside=aside), clusters)
        launch = replace(self.launch, team=team, held=held)
        room = clusters.memory // (shared_bytes(launch) + clusters.system)
        programs = max(1, min(room, clusters.warps * WARP // team.threads))
        size = {axis.name: 1 for axis in launch.outer if axis.name not in self.shares}
        size |= {SHARED: 1} | {axis.name: axis.hint for axis in launch.inner}
        row, warps = frozenset(axis.name for axis in launch.inner), blocks * team.threads // WARP
        return replace(launch, blocks=Blocks(self.shares, size, row, 1, warps, programs))

    def shared_out(self, team: Team, clusters: Clusters) -> Team:
        """A row among no more threads than it takes: the fewer they are, the less they wait for
        each other, and the more rows are computed at once.
        """
        vectors = -(-int(self.axis.extent) // (self.lanes * team.blocks))
        threads = -(-vectors * self.lanes // self.most(team, clusters))
        threads = min(clusters.threads, -(-threads // WARP) * WARP)
        return replace(team, threads=threads, vectors=-(-vectors // threads))

    def most(self, team: Team, clusters: Clusters) -> int:
        """Elements of a thread, if there are threads enough."""
        return clusters.of_thread // team.width

    def over_rows(self) -> Iterator[bool]:
        """Of each sum over rows, whether it is one along them too."""
        inner = {axis.name for axis in self.launch.inner}
        for each in self.launch.shared:
            yield not inner.isdisjoint(each.op.axes)

    def registers(self, team: Team) -> int:
        """Of a thread, for what it keeps from row to row."""
        count = sum(self.axis.name in each.axes for each in self.launch.shared)
        return count * team.numbers * team.width // 4


def loads_along(nodes: Iterable[Node], axis: str) -> list[Load]:
    """What is read along an axis, once each."""
    found = {
        node.access.buffer.name: node
        for node in nodes
        if isinstance(node, Load) and axis in node.access.strides
    }
    return [*found.values()]


def keeps(nodes: Iterable[Node], value: str) -> bool:
    """Whether a value is written to memory that later launches read."""
    return any(isinstance(n, Keep) and n.shared and n.value == value for n in nodes)


def not_next_to_each_other(access: Access, axis: str) -> tuple[str, str] | None:
    """The complaint about elements that lie apart; None if they do not, or do not vary."""
    step = access.strides.get(axis, 1)
    found = f"{access.buffer.name} {step} apart"
    return None if step == 1 else (f"{axis} next to each other", found)


def lanes_of(plan: Plan, nodes: Iterable[Node], rows: Sequence[Load], axis: LoopAxis) -> int:
    """As many as the narrowest type has in what is read at a time, if all rows begin where a vector
    does.

    rows: what is read in vectors along the axis.

    Raises:
        UnsupportedPlanError: if they begin where nothing can be copied from.
    """
    stores = [node.access for node in nodes if isinstance(node, Store)]
    accesses = [*(load.access for load in rows), *(a for a in stores if axis.name in a.strides)]
    floats = [a.buffer.dtype.itemsize for a in accesses if a.buffer.dtype is not torch.bool]
    lanes = WIDEST // int(min(floats, default=WIDEST))
    steps = [a.strides[s] for a in accesses for s in a.strides if s != axis.name]
    while lanes > 1 and not all(_divides(lanes, n) for n in (axis.extent, *steps)):
        lanes //= 2
    least = min((load.access.buffer.dtype.itemsize for load in rows), default=NARROWEST)
    if lanes * least < NARROWEST:
        raise refused(plan, f"rows that begin at multiples of {NARROWEST} bytes", f"{least}")
    return lanes


def _divides(lanes: int, step: sympy.Expr) -> bool:
    """Whether a number of elements is a multiple of so many, whatever the sizes are."""
    terms = sympy.expand(step).as_coefficients_dict().values()
    return all(term.is_Integer and term % lanes == 0 for term in terms)


def names(axes: Sequence[LoopAxis]) -> str:
    """The axes and their lengths, in words."""
    return ", ".join(f"{axis.name} of {axis.extent}" for axis in axes) or "nothing"
