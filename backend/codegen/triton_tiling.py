"""How many elements along each axis a Triton program works on at a time, and with how many warps.

All choices of this dialect that are about speed and not about meaning stand here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normpass.backend.codegen.triton_stages import Stage, walk
from normpass.backend.program.tree import Load, Plan
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from normpass.backend.program.tree import LoopAxis


@dataclass(frozen=True)
class Tiling:
    """The numbers behind the choices. A multiprocessor has 64 Ki registers of 32 bits and holds 64
    warps.

    resident: registers that a program may spend on what it holds of its row; beyond it streams.
    tile: elements that a program of short rows works on at a time.
    chunk: elements that a program of long rows works on at a time.
    lanes: elements along the vector axis where that is divided among programs.
    narrow: the same where the program also owns a local axis; 32 floats are a cache line.
    kept: an axis of at most so many elements is held rather than streamed, if an array runs along
    it. per_thread: elements of a block for each thread. most_warps: of one program. warps: for
    each multiprocessor, where rows are shared out among as many programs as run at once."""

    resident: int = 48 * 1024
    tile: int = 2048
    chunk: int = 4096
    lanes: int = 128
    narrow: int = 32
    kept: int = 64
    per_thread: int = 16
    most_warps: int = 32
    warps: int = 16


@dataclass(frozen=True)
class Blocks:
    """The choices for one launch.

    shares: the outer axes, as one, of which every program takes a contiguous share; the others are
    divided into tiles. size: the block along each axis; that of the shared axes goes by the name
    "". resident: inner axes that one block covers. parts: partial results that are combined at a
    time. warps: of a program."""

    shares: tuple[str, ...]
    size: Mapping[str, int]
    resident: frozenset[str]
    parts: int
    warps: int
    programs: int = field(default=1)


SHARED = ""


def choose_blocks(plan: Plan, stage: Stage, tiling: Tiling) -> Blocks:
    """The choices for a launch, from the plan alone: the same in every process."""
    shares = _shared_axes(plan, stage)
    tiles = [axis for axis in stage.outer if axis.name not in shares]
    size = {axis.name: 1 for axis in tiles}
    if shares:
        size[SHARED] = 1
    lanes = _lane_axis(plan, stage, tiles)
    if lanes:
        narrow = stage.inner or stage.combined
        size[lanes.name] = min(padded(lanes), tiling.narrow if narrow else tiling.lanes)
    resident = _fits(stage, product(size.values()), tiling)
    if resident:
        size |= {axis.name: padded(axis) for axis in stage.inner}
    else:
        size |= _streamed(stage, tiling, product(size.values()))
    room = max(1, tiling.tile // product(size.values()))
    parts = room if stage.combined else 1
    if not stage.combined:
        _widen(plan, stage, shares, lanes, size, room)
    elements = product(size.values()) * parts
    warps = power_of_two(max(1, elements // (32 * tiling.per_thread)), down=True)
    warps = min(warps, tiling.most_warps)
    held = frozenset(axis.name for axis in stage.inner if resident or _covers(axis, size))
    return Blocks(shares, size, held, parts, warps, max(1, tiling.warps // warps))


def power_of_two(n: int, *, down: bool = False) -> int:
    """The next power of two from n, or the last one before it."""
    return 1 << (n.bit_length() - 1 if down else max(n - 1, 0).bit_length())


def padded(axis: LoopAxis) -> int:
    """A block that covers the axis, as far as its extent is known."""
    return power_of_two(max(axis.hint, 1))


def _covers(axis: LoopAxis, size: Mapping[str, int]) -> bool:
    return bool(axis.extent.is_number) and size[axis.name] >= axis.extent


def _shared_axes(plan: Plan, stage: Stage) -> tuple[str, ...]:
    """The outer axes that every accumulator reduces; lanes among them only if alone."""
    if not stage.shared:
        return ()
    reduced = [set(accumulator.op.axes) for accumulator in stage.shared]
    axes = [a.name for a in stage.outer if all(a.name in group for group in reduced)]
    return tuple(a for a in axes if a != plan.vector or len(axes) == 1)


def _lane_axis(plan: Plan, stage: Stage, tiles: list[LoopAxis]) -> LoopAxis | None:
    """The outer axis along which neighbours in memory lie, if that is an outer one."""
    for axis in tiles:
        if axis.name == plan.vector:
            return axis
    return tiles[-1] if stage.combined and tiles else None


def _fits(stage: Stage, beside: int, tiling: Tiling) -> bool:
    """Whether what a program must hold of its row fits in registers: inputs that several phases
    read, and the accumulators along the row."""
    inner = {axis.name: axis for axis in stage.inner}
    if not all(axis.extent.is_number for axis in inner.values()):
        return False

    def elements(axes: Iterable[str]) -> int:
        return product(padded(inner[axis]) for axis in axes if axis in inner) * beside

    whole = elements(inner)
    loads = Counter(n.access.buffer.name for n in walk(stage.body) if isinstance(n, Load))
    accesses = {
        n.access.buffer.name: n.access.strides for n in walk(stage.body) if isinstance(n, Load)
    }
    held = sum(elements(accesses[name]) for name, times in loads.items() if times > 1)
    held += sum(elements(accumulator.axes) for accumulator in stage.shared)
    return max(held, whole) <= tiling.resident


def _streamed(stage: Stage, tiling: Tiling, beside: int) -> dict[str, int]:
    """Blocks of a long row: short axes with arrays along them first, then from the inside."""
    arrays = {axis for accumulator in stage.shared for axis in accumulator.axes}
    inward = list(reversed(stage.inner))
    order = sorted(
        inward,
        key=lambda a: not (a.name in arrays and a.extent.is_number and padded(a) <= tiling.kept),
    )
    room, size = max(1, tiling.chunk // beside), {}
    for axis in order:
        size[axis.name] = min(padded(axis), room)
        room //= size[axis.name]
    return size


def _widen(
    plan: Plan,
    stage: Stage,
    shares: tuple[str, ...],
    lanes: LoopAxis | None,
    size: dict[str, int],
    room: int,
) -> None:
    """Spends what room a tile has left on more rows, or on more lanes where there are no rows."""
    if shares:
        extent = product(plan.axis[name].hint for name in shares)
        size[SHARED] = min(room, power_of_two(extent))
        return
    rows = [axis for axis in stage.outer if axis is not lanes]
    for axis in (*reversed(rows[-1:]), *([lanes] if lanes and not stage.inner else [])):
        widened = min(size[axis.name] * room, padded(axis))
        room //= max(1, widened // size[axis.name])
        size[axis.name] = max(widened, size[axis.name])
