"""How threads of a GPU share out a launch's rows, in CUDA C++.

A team works on a row together: the threads of one block, or of several on neighbouring
multiprocessors, which see each other's memory (a cluster). Each thread has the same elements of
every row. So what it reads of a row is on chip in places of its own, no other thread waits for it,
and the sums of a gradient of the weight stay in its registers while its team goes through rows.
While one row is computed the next one is on its way.

A row that one block cannot hold in this way is held by two blocks, four or eight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import sympy
import torch

from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.tree import (
    SHARED,
    Accumulate,
    Allocate,
    Blocks,
    Compute,
    Finish,
    Keep,
    Load,
    Loop,
    Recall,
    Regroup,
    Store,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.backend.program.machine import Clusters
    from normpass.backend.program.tree import Launch, LoopAxis, Node, Plan

WARP = 32
# Bytes that a thread reads at a time, and the fewest that go on chip without its waiting for them.
WIDEST, NARROWEST = 16, 4
STAGES = 2
# Threads of a block that combines parts, and of one whose threads have an element each.
COMBINING, ALONE = 256, 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool)
UNSUPPORTED = frozenset({"to_int8", "to_uint8", "to_float8_e4m3fn", "to_float8_e5m2"})


@dataclass(frozen=True)
class Team:
    """What works on a row, and what it has of it. Its launch tells which rows it shares with others
    (`Blocks.shares`), what it reads once for all of them (`held`), and how many blocks run on a
    multiprocessor at once (`Blocks.programs`).

    threads: of a block. width: bytes of a number that is computed with. blocks: of a team. lanes:
    neighbours in memory that a thread reads at a time. vectors: so many times of each row. stages:
    rows that are on chip, or on their way, at once. staged: what is read of every row. together:
    the most sums along a row that are added up over a team at once. beside: bytes of shared memory
    for other things.
    """

    threads: int
    width: int
    blocks: int = 1
    lanes: int = 1
    vectors: int = 1
    stages: int = 1
    staged: tuple[Load, ...] = ()
    together: int = 0
    beside: int = 0

    @property
    def elements(self) -> int:
        """Of a row, that one block has; those beyond its end with them."""
        return self.threads * self.vectors * self.lanes

    @property
    def exchange(self) -> int:
        """Bytes of shared memory in which a team adds up: twice, so that nobody waits for others to
        have read before the next sum.
        """
        size = 2 * self.together * self.blocks * (self.threads // WARP) * self.width
        return -(-size // WIDEST) * WIDEST

    def on_chip(self, load: Load) -> int:
        """Bytes of shared memory that a block has for a tensor."""
        stages = self.stages if load in self.staged else 1
        return stages * self.elements * int(load.access.buffer.dtype.itemsize)


def team_of(launch: Launch) -> Team:
    """The team of a launch that has one."""
    if launch.team is None:
        raise AssertionError(f"expected a launch with a team, found {launch}")
    return launch.team


def shared_bytes(launch: Launch) -> int:
    """Shared memory of a block of a launch's team."""
    team = team_of(launch)
    return team.beside + team.exchange + sum(map(team.on_chip, (*team.staged, *launch.held)))


def with_teams(plan: Plan, clusters: Clusters) -> Plan:
    """The plan with the teams of its launches.

    Raises:
        UnsupportedPlanError: if a launch is neither one over rows nor one that combines their sums.
    """
    if plan.region.joins:  # which may begin where no vector can be written
        raise _refused(plan, "results of their own", "some that are parts of one tensor")
    launches = []
    for launch in plan.launches:
        for node in (*launch.scalars, *walk(*launch.body)):
            if complaint := _of_any_node(node):
                raise _refused(plan, *complaint)
        launches.append(
            _Rows(plan, launch).fitting(clusters) if launch.inner else _of_elements(plan, launch)
        )
    return replace(plan, launches=tuple(launches))


def _refused(plan: Plan, expected: str, found: str) -> UnsupportedPlanError:
    return UnsupportedPlanError(
        f"region {plan.region.name} in CUDA C++: expected {expected}, found {found}"
    )


def _of_elements(plan: Plan, launch: Launch) -> Launch:
    """A launch without loops: a thread for each element, or a warp for neighbours and as many more
    as share out the parts of their sums.
    """
    for node in launch.body:
        if not isinstance(node, Load | Store | Compute | Keep | Recall):
            raise _refused(plan, "sums along rows", f"{type(node).__name__} of each element")
    width = plan.region.compute_dtype.itemsize
    team, parts = Team(ALONE, width), 1
    if launch.combined:
        team, parts = Team(COMBINING, width, beside=COMBINING * width), COMBINING // WARP
    size = {axis.name: 1 for axis in launch.outer}
    if launch.outer:
        size[launch.outer[-1].name] = team.threads // parts
    blocks = Blocks((), size, frozenset(), parts, team.threads // WARP)
    return replace(launch, team=team, blocks=blocks)


def _of_any_node(node: Node) -> tuple[str, str] | None:
    """What was expected of a node instead of what it is, wherever it stands."""
    match node:
        case Load(access) | Store(_, access) if access.buffer.dtype not in DTYPES:
            found = f"{access.buffer.name} of {access.buffer.dtype}"
            return f"one of {', '.join(map(str, DTYPES))}", found
        case Compute(op) if op.fn in UNSUPPORTED:
            return "a function that there is", op.fn
    return None


class _Rows:
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
            raise _refused(plan, "sums over rows", "none that all rows are added to")
        found = {
            node.access.buffer.name: node
            for node in self.nodes
            if isinstance(node, Load) and self.axis.name in node.access.strides
        }
        self.rows = [*found.values()]  # what is read along rows, once each
        self.lanes = self.lanes_of(self.rows)

    def checked(self) -> LoopAxis:
        """The axis of the rows.

        Raises:
            UnsupportedPlanError: if there is something else in the launch.
        """
        axes = self.launch.inner
        if len(axes) != 1 or axes[0].name != self.plan.vector or not axes[0].extent.is_number:
            raise _refused(self.plan, "rows of a known length", f"loops over {_names(axes)}")
        for node in self.nodes:
            if complaint := self.complaint(node, axes[0].name):
                raise _refused(self.plan, *complaint)
        return axes[0]

    def complaint(self, node: Node, axis: str) -> tuple[str, str] | None:
        """What was expected of a node instead of what it is; None if it can be printed."""
        match node:
            case Load(access) | Store(_, access):
                step = access.strides.get(axis, 1)
                found = f"{access.buffer.name} {step} apart"
                return None if step == 1 else (f"{axis} next to each other", found)
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

    def lanes_of(self, rows: Sequence[Load]) -> int:
        """As many as the narrowest type has in what is read at a time, if all rows begin where a
        vector does.
        """
        stores = [n.access for n in self.nodes if isinstance(n, Store)]
        along = [a for a in stores if self.axis.name in a.strides]
        accesses = [*(load.access for load in rows), *along]
        floats = [a.buffer.dtype.itemsize for a in accesses if a.buffer.dtype is not torch.bool]
        self.narrowest = int(min(floats, default=WIDEST))
        lanes = WIDEST // self.narrowest
        steps = [a.strides[s] for a in accesses for s in a.strides if s != self.axis.name]
        while lanes > 1 and not all(_divides(lanes, n) for n in (self.axis.extent, *steps)):
            lanes //= 2
        least = min((load.access.buffer.dtype.itemsize for load in rows), default=NARROWEST)
        if lanes * least < NARROWEST:
            raise _refused(
                self.plan, f"rows that begin at multiples of {NARROWEST} bytes", f"{least}"
            )
        return lanes

    def fitting(self, clusters: Clusters) -> Launch:
        """The launch with the smallest team that has room for rows ahead, or for one row, with
        threads enough if there are so many.

        Raises:
            UnsupportedPlanError: if there is none.
        """
        sizes = [1 << n for n in range(clusters.blocks.bit_length())]
        for is_enough, stages, blocks in product((True, False), (STAGES, 1), sizes):
            launch = self.of(blocks, stages, clusters)
            team, shared = team_of(launch), shared_bytes(launch)
            of_thread = team.vectors * team.lanes * team.width
            if is_enough and of_thread > clusters.of_thread:
                continue
            if self.sums(team) <= clusters.registers and shared <= clusters.shared:
                return launch
        held = f"{self.sums(team)} registers for sums and {shared} bytes"
        expected = f"rows that {clusters.blocks} blocks hold"
        raise _refused(self.plan, expected, f"{held} of a block at least")

    def of(self, blocks: int, stages: int, clusters: Clusters) -> Launch:
        """With a team of so many blocks, of no more threads than it takes: the fewer they are, the
        less they wait for each other, and the more rows are computed at once.
        """
        width = self.plan.region.compute_dtype.itemsize
        most = clusters.of_thread // width  # elements of a thread
        vectors = -(-int(self.axis.extent) // (self.lanes * blocks))
        threads = -(-vectors * self.lanes // most)
        threads = min(clusters.threads, -(-threads // WARP) * WARP)
        held = [load for load in self.rows if set(self.shares).isdisjoint(load.access.strides)]
        staged = tuple(load for load in self.rows if load not in held)
        together = max(int(any(self.over_rows())), *map(len, groups(self.launch.body)))
        vectors = -(-vectors // threads)
        team = Team(threads, width, blocks, self.lanes, vectors, stages, staged, together)
        launch = replace(self.launch, team=team, held=tuple(held))
        room = clusters.memory // (shared_bytes(launch) + clusters.system)
        programs = max(1, min(room, clusters.warps * WARP // threads))
        size = {axis.name: 1 for axis in launch.outer if axis.name not in self.shares}
        size |= {SHARED: 1, self.axis.name: int(self.axis.extent)}
        row, warps = frozenset({self.axis.name}), blocks * threads // WARP
        return replace(launch, blocks=Blocks(self.shares, size, row, 1, warps, programs))

    def over_rows(self) -> Iterator[bool]:
        """Of each sum over rows, whether it is one along them too."""
        for each in self.launch.shared:
            yield self.axis.name in each.op.axes

    def sums(self, team: Team) -> int:
        """Registers of a thread for the sums that rows are added to."""
        count = sum(self.axis.name in each.axes for each in self.launch.shared)
        return count * team.vectors * team.lanes * team.width // 4


def roomier(launch: Launch) -> Launch | None:
    """The launch with the next team to try where a thread's registers do not suffice; None if there
    is none. Half a vector's numbers take half as many registers, and a multiprocessor's are shared
    by fewer threads if fewer blocks run at once.
    """
    team, blocks = team_of(launch), launch.blocks
    sizes = [int(load.access.buffer.dtype.itemsize) for load in (*team.staged, *launch.held)]
    bytes = team.lanes * min(sizes, default=NARROWEST) // 2  # of the narrowest, if it is halved
    narrower = replace(team, lanes=team.lanes // 2, vectors=team.vectors * 2)
    if team.lanes > 1 and bytes >= WIDEST // 2:
        return replace(launch, team=narrower)
    if blocks.programs > 1:
        return replace(launch, blocks=replace(blocks, programs=blocks.programs - 1))
    return replace(launch, team=narrower) if team.lanes > 1 and bytes >= NARROWEST else None


def groups(body: Sequence[Node]) -> list[list[Finish]]:
    """The sums along a row that are complete after each of its loops."""
    found: list[list[Finish]] = [[]]
    for node in body:
        if isinstance(node, Loop):
            found.append([])
        elif isinstance(node, Finish) and not node.accumulator.shared:
            found[-1].append(node)
    return found


def _divides(lanes: int, step: sympy.Expr) -> bool:
    """Whether a number of elements is a multiple of so many, whatever the sizes are."""
    terms = sympy.expand(step).as_coefficients_dict().values()
    return all(term.is_Integer and term % lanes == 0 for term in terms)


def _names(axes: Sequence[LoopAxis]) -> str:
    return ", ".join(f"{axis.name} of {axis.extent}" for axis in axes) or "nothing"


def share_count(launch: Launch, lengths: Mapping[str, int], teams: int) -> int:
    """How many teams share the rows of a launch, of so many that run at once. lengths: of its outer
    axes.
    """
    shares = launch.blocks.shares
    if not shares:
        return 1
    tiles = prod(n for axis, n in lengths.items() if axis not in shares)
    rows = prod(lengths[axis] for axis in shares)
    return max(1, min(-(-teams // max(tiles, 1)), rows))
