"""Teams whose rows lie along two axes, in CUDA C++: a row is several segments.

What is the same for a whole segment (a weight of group norm, the sums of a channel) a band of
threads has in registers, an element for each of its turns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.team import NARROWEST, WARP, groups, refused
from normpass.backend.program.team_rows import Rows, keeps, names
from normpass.backend.program.tree import (
    Accumulate,
    Accumulator,
    Begin,
    Finish,
    Keep,
    Load,
    Loop,
    Recall,
    definition,
    rewritten,
    uses,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.backend.program.machine import Clusters
    from normpass.backend.program.team import Team
    from normpass.backend.program.tree import Launch, LoopAxis, Node, Plan

# Elements of a thread: a kernel's text goes through them one after another.
MOST = 256
# So many times the places on chip that a row has elements, at most.
WASTE = 2


class Segments(Rows):
    """A launch over rows along two axes: loops along the outer one, and in them along the inner
    one, on which neighbours in memory lie. The length of that is known, and how many of them there
    are at most.
    """

    def __init__(self, plan: Plan, launch: Launch) -> None:
        self.segments = launch.inner[0]
        super().__init__(plan, replace(launch, body=merged(launch.body)))

    def checked(self) -> LoopAxis:
        axes = self.launch.inner
        if (
            len(axes) != 2
            or axes[1].name != self.plan.vector
            or axes[0].most is None
            or not axes[1].extent.is_number
        ):
            raise refused(self.plan, "segments of a known length", f"loops over {names(axes)}")
        for node in self.launch.body:
            if not isinstance(node, Loop):
                continue
            inside = (n.axis for n in node.body if isinstance(n, Loop))
            if node.axis != axes[0] or any(axis != axes[1] for axis in inside):
                expected = f"loops over {axes[1].name} in others"
                raise refused(self.plan, expected, f"one over {node.axis.name}")
        for node in self.nodes:
            if complaint := self.complaint(node, axes[1].name):
                raise refused(self.plan, *complaint)
        return axes[1]

    def complaint(self, node: Node, axis: str) -> tuple[str, str] | None:
        segments = self.segments.name
        match node:
            case Accumulate(accumulator) if not accumulator.shared:
                along = set(accumulator.op.axes) <= {axis, segments}
                if accumulator.axes or not along:
                    return f"sums along {segments} and {axis}", str(accumulator.op)
                return None
            case Accumulate(accumulator) if segments in accumulator.axes:
                if axis in accumulator.op.axes:
                    return "sums of whole segments", str(accumulator.op)
                node = Accumulate(_without(accumulator, segments))
            case Accumulate(accumulator) if (
                axis in accumulator.axes and segments in accumulator.op.axes
            ):
                # Each band has parts of its own of them, which nothing adds up.
                return "sums along all of a row", str(accumulator.op)
            case Keep(value, axes, shared) | Recall(value, axes, shared) if (
                segments in axes and axis not in axes
            ):
                is_kept_here = shared and isinstance(node, Recall) and keeps(self.nodes, value)
                return ("no array for all", value) if is_kept_here else None
        return super().complaint(node, axis)

    def is_in_order(self, load: Load) -> bool:
        return False  # each band has segments of its own

    def shared_out(self, team: Team, clusters: Clusters) -> Team:
        """A row among bands, so that each thread has few enough elements, and no more places for
        them than there are elements, and then among no more threads than it takes.
        """
        inside = (node.body for node in self.launch.body if isinstance(node, Loop))
        apart = max((len(group) for body in inside for group in groups(body)), default=0)
        team = replace(team, apart=apart)
        for lanes in self.narrower():
            team = self.best(replace(team, lanes=lanes), clusters)
            if not self.wastes(team):
                break
        return team

    def best(self, team: Team, clusters: Clusters) -> Team:
        """With the bands of a team's blocks."""
        segments = -(-self.segments.hint // team.blocks)
        most = max(WARP, clusters.threads)

        def of(bands: int, warps: int) -> Team:
            vectors = -(-int(self.axis.extent) // (team.lanes * warps * WARP))
            turns, threads = -(-segments // bands), bands * warps * WARP
            return replace(team, threads=threads, vectors=vectors, bands=bands, turns=turns)

        def price(team: Team) -> tuple[int, int, int, int]:
            return (
                max(team.numbers, self.most(team, clusters)),
                team.elements,
                team.threads,
                -team.bands,
            )

        found = (
            of(bands, warps)
            for bands in range(1, min(segments, most // WARP) + 1)
            for warps in range(1, most // (WARP * bands) + 1)
        )
        return min(found, key=price)

    def wastes(self, team: Team) -> bool:
        """Whether too many places on chip are for no element."""
        row = self.segments.hint * int(self.axis.extent)
        return team.elements * team.blocks > WASTE * row

    def narrower(self) -> Iterator[int]:
        """Neighbours that a thread may read at a time: of short segments fewer than it could, so
        that more threads have something of them.
        """
        least = min((int(load.access.buffer.dtype.itemsize) for load in self.rows), default=1)
        lanes = self.lanes
        while lanes == self.lanes or (lanes and lanes * least >= NARROWEST):
            yield lanes
            lanes //= 2

    def suits(self, team: Team) -> bool:
        return team.numbers <= MOST and not self.wastes(team)

    def registers(self, team: Team) -> int:
        """Those of a row's segments with them."""
        kept: set[str | None] = {
            n.value for n in self.nodes if isinstance(n, Keep) and not n.shared
        }
        kept |= {definition(node) for node in of_segments(self.launch)}
        of_turn = sum(self.segments.name in each.axes for each in self.launch.shared)
        of_turn += len(kept)
        return super().registers(team) + of_turn * team.turns * team.width // 4


def of_segments(launch: Launch) -> list[Load | Recall]:
    """What is read of each segment once, of tensors and of what earlier launches have kept."""
    found = {
        definition(node): node
        for loop in launch.body
        if isinstance(loop, Loop)
        for node in loop.body
        if isinstance(node, Load) or (isinstance(node, Recall) and node.shared)
    }
    return [*found.values()]


def _without(accumulator: Accumulator, axis: str) -> Accumulator:
    axes = tuple(each for each in accumulator.axes if each != axis)
    return replace(accumulator, axes=axes)


def merged(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """A launch's body, in which sums of segments that are added up along a row and needed for
    nothing else are one sum along both axes: threads add to it what they have of all segments.
    """
    for loop in body:
        if isinstance(loop, Loop):
            for node in loop.body:
                if isinstance(node, Finish) and (above := _only_use(node, loop, body)):
                    return merged(_joined(body, node.accumulator, above))
    return body


def _only_use(node: Finish, loop: Loop, body: tuple[Node, ...]) -> Accumulator | None:
    """The sum along rows that a segment's is added to, where that is all that needs it."""
    name = node.accumulator.op.name
    users = [each for each in walk(*body) if name in uses(each)]
    match users:
        case [Accumulate(above) as user] if not above.shared and user in loop.body:
            return above if above.op.fn == node.accumulator.op.fn else None
    return None


def _joined(body: tuple[Node, ...], inner: Accumulator, outer: Accumulator) -> tuple[Node, ...]:
    """With one sum instead of two."""
    axes = (*outer.op.axes, *inner.op.axes)
    both = replace(outer, op=replace(outer.op, args=inner.op.args, axes=axes))

    def kept(node: Node) -> bool:
        match node:
            case Begin(each) | Finish(each):
                return each != inner
            case Accumulate(each):
                return each != outer
        return True

    def changed(node: Node) -> Node:
        match node:
            case Accumulate(each) if each == inner:
                return Accumulate(both)
            case Begin(each) | Finish(each) if each == outer:
                return replace(node, accumulator=both)
            case Loop():
                return replace(node, body=tuple(filter(kept, node.body)))
        return node

    return rewritten(tuple(filter(kept, body)), changed)
