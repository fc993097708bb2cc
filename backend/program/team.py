"""How threads of a GPU share out a launch's rows, in CUDA C++.

A team works on a row together: the threads of one block, or of several on neighbouring
multiprocessors, which see each other's memory (a cluster). Each thread has the same elements of
every row. So what it reads of a row is on chip in places of its own, no other thread waits for it,
and the sums of a gradient of the weight stay in its registers while its team goes through rows.
While one row is computed the next one is on its way.

A row that one block cannot hold in this way is held by two blocks, four or eight.

Rows along two axes are segments, of which each band of a block's threads takes one at a time: the
channels of a group, or the images of a batch where a channel is a row. Where rows would lie across
memory a team has several of them side by side, as columns, each on its own or in groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from normpass.backend.program.counts import divide_up, larger, smaller
from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.tree import Finish, Loop
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.program.counts import Count
    from normpass.backend.program.tree import Launch, Load, Node, Plan

WARP = 32
# Bytes that a thread reads at a time, and the fewest that go on chip without its waiting for them.
WIDEST, NARROWEST = 16, 4
# Bytes of a barrier that counts what has come.
BARRIER = 8


@dataclass(frozen=True)
class Team:
    """What works on a row, and what it has of it. Its launch tells which rows it shares with others
    (`Blocks.shares`), what it reads once for all of them (`held`), and how many blocks run on a
    multiprocessor at once (`Blocks.programs`).

    threads: of a block. width: bytes of a number that is computed with. blocks: of a team. lanes:
    neighbours in memory that a thread reads at a time. vectors: so many times of each row. stages:
    rows that are on chip, or on their way, at once. staged: what is read of every row. together:
    the most sums along a row that are added up over a team at once. beside: bytes of shared memory
    for other things. bands: of a block. turns: segments of a row that a band has; of each of them a
    thread has so many vectors. apart: the most sums along a segment that are added up over a band
    at once, or along a group's columns over its threads. across: threads side by side, where a team
    has columns. group: those of them that have a group's; 0 where each column is on its own. bulk:
    of what is staged, that of which one copy brings all that a block has of a row. aside: what is
    the same for all rows, and is read from memory for each of them where there is no room for it on
    chip.
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
    bands: int = 1
    turns: int = 1
    apart: int = 0
    across: int = 0
    group: int = 0
    bulk: tuple[Load, ...] = ()
    aside: tuple[Load, ...] = ()

    @property
    def asked(self) -> tuple[Load, ...]:
        """Of what is staged, that of which each thread copies its own."""
        return tuple(load for load in self.staged if load not in self.bulk)

    @property
    def in_vectors(self) -> tuple[Load, ...]:
        """What is read of rows, and not held."""
        return (*self.staged, *self.aside)

    @property
    def arrivals(self) -> int:
        """Bytes of the barriers that tell when bulk copies have come, one of each row on chip."""
        return _whole(BARRIER * self.stages) if self.bulk else 0

    @property
    def numbers(self) -> int:
        """Elements of a row that one thread has."""
        return self.turns * self.vectors * self.lanes

    @property
    def elements(self) -> int:
        """Of a row, that one block has; those beyond its end with them."""
        return self.threads * self.numbers

    @property
    def exchange(self) -> int:
        """Bytes of shared memory in which a team adds up: twice, so that nobody waits for others to
        have read before the next sum. Where it has columns: for each of them a number of each part
        of a block, and twice one of each block.
        """
        if self.across:
            of_column = self.together * (self.parts + 2 * self.blocks)
            return _whole(of_column * self.across * self.lanes * self.width)
        return self.room(self.together * self.blocks)

    @property
    def parts(self) -> int:
        """What leaves sums of columns to its block: warps, or rows that warps do not divide."""
        return self.threads // (self.across if WARP % self.across else WARP)

    @property
    def exchange_of_bands(self) -> int:
        """The same for bands of several warps, and for threads side by side that have a group: as
        many as have one column each, so that there is room for more threads (`roomier`).
        """
        if self.group:
            return _whole(2 * self.apart * self.across * self.lanes * self.width)
        return self.room(self.apart) if self.threads > self.bands * WARP else 0

    def room(self, sums: int) -> int:
        """Bytes for a number of each warp for so many sums, twice."""
        return _whole(2 * sums * (self.threads // WARP) * self.width)

    def on_chip(self, load: Load) -> int:
        """Bytes of shared memory that a block has for a tensor."""
        stages = self.stages if load in self.staged else 1
        return stages * self.elements * int(load.access.buffer.dtype.itemsize)


def _whole(size: int) -> int:
    """So many bytes, up to where a vector can begin."""
    return -(-size // WIDEST) * WIDEST


def team_of(launch: Launch) -> Team:
    """The team of a launch that has one."""
    if launch.team is None:
        raise AssertionError(f"expected a launch with a team, found {launch}")
    return launch.team


def shared_bytes(launch: Launch) -> int:
    """Shared memory of a block of a launch's team."""
    team = team_of(launch)
    exchange = team.exchange + team.exchange_of_bands
    on_chip = sum(map(team.on_chip, (*team.staged, *launch.held)))
    return team.beside + exchange + on_chip + team.arrivals


def refused(plan: Plan, expected: str, found: str) -> UnsupportedPlanError:
    return UnsupportedPlanError(
        f"region {plan.region.name} in CUDA C++: expected {expected}, found {found}"
    )


def roomier(launch: Launch) -> Launch | None:
    """The launch with the next team to try where a thread's registers do not suffice; None if there
    is none. Half a vector's numbers take half as many registers, and a multiprocessor's are shared
    by fewer threads if fewer blocks run at once.
    """
    team, blocks = team_of(launch), launch.blocks
    sizes = [int(load.access.buffer.dtype.itemsize) for load in (*team.staged, *launch.held)]
    bytes = team.lanes * min(sizes, default=NARROWEST) // 2  # of the narrowest, if it is halved
    narrower = replace(
        team,
        lanes=team.lanes // 2,
        vectors=team.vectors * 2,
        across=team.across * 2,
        group=team.group * 2,
    )
    is_one = team.lanes > 1 and (not team.across or team.threads % narrower.across == 0)
    if is_one and bytes >= WIDEST // 2:
        return replace(launch, team=narrower)
    if blocks.programs > 1:
        return replace(launch, blocks=replace(blocks, programs=blocks.programs - 1))
    return replace(launch, team=narrower) if is_one and bytes >= NARROWEST else None


def groups(body: Sequence[Node]) -> list[list[Finish]]:
    """The sums along a row that are complete after each of its loops."""
    found: list[list[Finish]] = [[]]
    for node in body:
        if isinstance(node, Loop):
            found.append([])
        elif isinstance(node, Finish) and not node.accumulator.shared:
            found[-1].append(node)
    return found


def share_count(launch: Launch, lengths: Mapping[str, Count], teams: int) -> Count:
    """How many teams share the rows of a launch, of so many that run at once. lengths: of its outer
    axes.
    """
    shares = launch.blocks.shares
    if not shares:
        return 1
    tiles = product(n for axis, n in lengths.items() if axis not in shares)
    rows = product(lengths[axis] for axis in shares)
    return larger(1, smaller(divide_up(teams, larger(tiles, 1)), rows))
