"""What the launches of a GPU do, read off their blocks.

A program reads a block of a tensor once where it holds what it has read, and in every phase where
it streams. What was read before in a launch is found in the last-level cache if all that the
programs that run at once read fits there, and what an earlier launch read if all that launches have
touched since does. What many programs read of a tensor comes from memory once as long as the tensor
fits. Partial results are written by every program and read by the launch that combines them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from normpass.backend.program.tree import SHARED, Compute, Load, Loop, Store, definition
from normpass.passes.cost import PRICED, Work
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from normpass.backend.program.tree import Access, Launch, Leaf, Node, Plan, Workspace
    from normpass.passes.cost import Conditions


def work_of_launches(plan: Plan, lengths: Mapping[str, int], conditions: Conditions) -> Work:
    """What a plan's launches do. lengths: of its axes. conditions: those of the GPU, whose workers
    are multiprocessors.
    """
    done = _Done(conditions.caches.shared)
    for launch in plan.launches:
        done.add(_Programs(launch, lengths, conditions.threads))
    largest = max((done.whole[name] for name in done.swept), default=0)
    return Work(
        sum(done.whole[name] * sweeps for name, sweeps in done.swept.items()),
        sum(done.written.values()),
        max((n for name, n in done.swept.items() if done.whole[name] == largest), default=1),
        again=done.again + done.spaces * plan.region.compute_dtype.itemsize,
        functions=tuple(sorted(done.functions.items())),
        launches=len(plan.launches),
        workers=done.workers,
    )


class _Programs:
    """The programs of one launch, and what each of them does.

    rows: blocks of the axes that are shared out. shares: among how many programs they are. pieces:
    how often all of the launch's body is gone through. programs: how many there are. at_once: those
    that run at once. aside: tensors that every loop reads again.
    """

    def __init__(self, launch: Launch, lengths: Mapping[str, int], processors: int) -> None:
        self.launch, self.lengths = launch, lengths
        blocks = launch.blocks
        apart = launch.team.blocks if launch.team else 1  # multiprocessors of a program
        aside = launch.team.aside if launch.team else ()
        self.aside = {load.access.buffer.name for load in aside}
        at_once = max(1, processors // apart) * blocks.programs
        self.tiles = {
            axis.name: -(-lengths[axis.name] // blocks.size[axis.name])
            for axis in launch.outer
            if axis.name not in blocks.shares
        }
        tiles = product(self.tiles.values())
        self.rows = self.shares = 1
        if blocks.shares:
            self.rows = -(-self.elements(blocks.shares) // blocks.size[SHARED])
            room = -(-at_once // max(1, tiles))
            self.shares = max(1, min(room, self.rows))
        self.pieces = tiles * self.rows
        self.programs = tiles * self.shares
        self.busy = min(processors, tiles * self.shares * apart)
        self.at_once = min(at_once, tiles * self.shares)

    def elements(self, axes: Iterable[str]) -> int:
        return product(self.lengths[axis] for axis in axes)

    def in_a_piece(self, access: Access) -> int:
        """Bytes of a tensor that are read when the body is gone through once."""
        blocks, lengths, axes = self.launch.blocks, self.lengths, set(access.strides)
        shared = axes & set(blocks.shares)
        elements = min(blocks.size[SHARED], self.elements(shared)) if shared else 1
        for axis in axes - shared:
            held = axis in self.tiles
            elements *= min(blocks.size[axis], lengths[axis]) if held else lengths[axis]
        return elements * access.buffer.dtype.itemsize

    def copies(self, space: Workspace) -> int:
        """How many of an array there are."""
        if not space.each:
            return 1
        return self.shares * product(n for axis, n in self.tiles.items() if axis not in space.axes)

    def leaves(self) -> Iterator[tuple[Leaf, int]]:
        """What a program does, with how often all of them do it: what it holds it neither reads nor
        computes again.
        """
        outer = self.elements(axis.name for axis in self.launch.outer)
        held = {load.access.buffer.name for load in self.launch.held}
        yield from ((load, self.elements(load.access.strides)) for load in self.launch.held)
        yield from self._leaves((*self.launch.scalars, *self.launch.body), outer, held)

    def _leaves(
        self, nodes: Sequence[Node], times: int, held: set[str]
    ) -> Iterator[tuple[Leaf, int]]:
        for node in nodes:
            if isinstance(node, Loop):
                axis, blocks = node.axis.name, self.launch.blocks
                holds = axis in blocks.resident and not (blocks.again and axis in blocks.pieces)
                inside = held if holds else set(held)
                yield from self._leaves(node.body, times * self.lengths[axis], inside)
                continue
            value = definition(node)
            if value is None:
                yield node, times
            elif value not in held:
                if value not in self.aside:
                    held.add(value)
                yield node, times


class _Done:
    """What launches have done so far.

    cache: bytes of the last level. whole: bytes of each tensor. swept: how often it has come from
    memory. written: bytes of outputs. again: bytes that came from the cache. spaces: elements of
    arrays that were written and read. functions: how often each was computed. workers: the most
    multiprocessors that had something to do. since: bytes that were touched since a tensor was
    read.
    """

    def __init__(self, cache: int) -> None:
        self.cache = cache
        self.whole: dict[str, int] = {}
        self.swept: Counter[str] = Counter()
        self.written: dict[str, int] = {}
        self.again = self.spaces = 0
        self.functions: Counter[str] = Counter()
        self.workers = 1
        self.since: dict[str, int] = {}

    def add(self, programs: _Programs) -> None:
        phases: Counter[str] = Counter()
        read: dict[str, Access] = {}
        for leaf, times in programs.leaves():
            match leaf:
                case Load(access):
                    phases[access.buffer.name] += 1
                    read[access.buffer.name] = access
                case Compute(op) if op.fn in PRICED:
                    self.functions[op.fn] += times
                case Store(_, access):
                    self.written[access.buffer.name] = _bytes(programs, access)
        nearby = programs.at_once * sum(map(programs.in_a_piece, read.values())) <= self.cache
        for name, access in read.items():
            self.read(name, programs, access, phases[name], nearby=nearby)
        self.workers = max(self.workers, programs.busy)
        for space in programs.launch.workspaces:
            self.spaces += 2 * programs.elements(space.axes) * programs.copies(space)
        touched = sum(self.whole[name] for name in read) + sum(self.written.values())
        self.since = {name: before + touched for name, before in self.since.items()}
        self.since |= dict.fromkeys(read, touched)

    def read(
        self, name: str, programs: _Programs, access: Access, phases: int, *, nearby: bool
    ) -> None:
        """Counts one tensor's bytes from memory and from the cache."""
        whole = self.whole[name] = _bytes(programs, access)
        held = any(access is load.access for load in programs.launch.held)
        asked = programs.in_a_piece(access) * (programs.programs if held else programs.pieces)
        sweeps = 1 if nearby else phases
        if whole > self.cache:
            sweeps *= max(1, asked // whole)
        elif name in self.since and self.since[name] <= self.cache:
            sweeps -= 1
        self.swept[name] += sweeps
        self.again += max(0, phases * asked - sweeps * whole)


def _bytes(programs: _Programs, access: Access) -> int:
    """All of a tensor's."""
    return programs.elements(access.strides) * int(access.buffer.dtype.itemsize)
