"""How many elements along each axis a GPU's program works on at a time, and with how many warps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.tree import (
    SHARED,
    Accumulate,
    Blocks,
    Keep,
    Launch,
    Load,
    Loop,
    Plan,
    walk,
)
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from normpass.backend.program.machine import Tiling
    from normpass.backend.program.tree import LoopAxis, Node


# Of a block that covers an axis so much is to be filled.
LEAST_FILLED = 0.85


def with_blocks(plan: Plan, tiling: Tiling) -> Plan:
    """The plan with the blocks of its launches."""
    return replace(
        plan,
        launches=tuple(
            replace(launch, blocks=choose_blocks(plan, launch, tiling)) for launch in plan.launches
        ),
    )


def choose_blocks(plan: Plan, launch: Launch, tiling: Tiling) -> Blocks:
    """The choices for a launch, from the plan alone: the same in every process."""
    shares = _shared_axes(plan, launch)
    tiles = [axis for axis in launch.outer if axis.name not in shares]
    size = {axis.name: 1 for axis in tiles}
    if shares:
        size[SHARED] = 1
    lanes = _lane_axis(plan, launch, tiles)
    if lanes:
        narrow = launch.inner or launch.combined
        size[lanes.name] = min(padded(lanes), tiling.narrow if narrow else tiling.lanes)
        if launch.combined:
            size[lanes.name] = _combined_lanes(lanes, product(a.hint for a in tiles), tiling)
    rows = _of_rows(launch)
    registers = plan.region.compute_dtype.itemsize // 4  # of an element
    beside = product(size.values()) * registers
    covers = {axis.name: _cover(axis, launch, tiling) for axis in rows}
    resident = _fits(plan, launch, covers, beside, tiling)
    again = not resident and _holds_sums(launch, rows, shares, beside, tiling)
    if again:
        covers = {axis.name: _in_pieces(axis, tiling.long_piece, tiling.pieces) for axis in rows}
    if held := resident or again:
        size |= {axis: block for axis, (block, _) in covers.items()}
    pieces = {axis: count for axis, (_, count) in covers.items() if held and count > 1}
    size |= _streamed(launch, size, tiling)
    room = power_of_two(max(1, tiling.tile // _whole(size, pieces)), down=True)
    parts = room if launch.combined else 1
    if not launch.combined:
        _widen(plan, launch, shares, lanes, size, room)
    elements = _whole(size, pieces) * parts
    warps = _nearest_power(max(1, elements * registers // (32 * tiling.per_thread)))
    warps = min(warps, tiling.warps)
    covered = frozenset(
        axis.name for axis in launch.inner if (held and axis in rows) or _covers(axis, size)
    )
    programs = max(1, tiling.warps // warps)
    return Blocks(shares, size, covered, parts, warps, programs, pieces, again)


def _whole(size: Mapping[str, int], pieces: Mapping[str, int]) -> int:
    """Elements of all pieces of a block."""
    return product(size.values()) * product(pieces.values())


def _cover(axis: LoopAxis, launch: Launch, tiling: Tiling) -> tuple[int, int]:
    """Blocks that cover an axis, and how many: one, unless much of it would lie beyond the end of
    a row that is known. What is so long that little else is held beside it has one.
    """
    whole = padded(axis)
    if len(launch.inner) > 1 or not axis.extent.is_number or whole > tiling.resident // 2:
        return whole, 1
    if axis.hint > LEAST_FILLED * whole:
        return whole, 1
    block = whole // 2
    while block >= tiling.piece:
        count = -(-axis.hint // block)
        if count > tiling.pieces:
            break
        if axis.hint > LEAST_FILLED * count * block:
            return block, count
        block //= 2
    return whole, 1


def _in_pieces(axis: LoopAxis, least: int, most: int) -> tuple[int, int]:
    """Blocks of an axis, at most so many, each of so many elements at least."""
    block = max(least, power_of_two(-(-axis.hint // most)))
    return block, -(-axis.hint // block)


def _holds_sums(
    launch: Launch,
    rows: Sequence[LoopAxis],
    shares: tuple[str, ...],
    registers: int,
    tiling: Tiling,
) -> bool:
    """Whether a program that reads its row again in each phase can hold the sums along it, which
    would be added up in memory otherwise. registers: of an element.
    """
    if len(launch.inner) != 1 or len(rows) != 1 or not rows[0].extent.is_number:
        return False
    (axis,) = rows
    nodes = [*walk(*launch.body)]
    sums = [each for each in launch.shared if axis.name in each.axes]
    keeps = any(isinstance(n, Keep) and axis.name in _array_axes(n) for n in nodes)
    if not sums or keeps or any(set(each.axes) != {axis.name} for each in sums):
        return False
    loads = [n.access for n in nodes if isinstance(n, Load) and axis.name in n.access.strides]
    once = {each.buffer.name for each in loads if set(shares).isdisjoint(each.strides)}
    again = [each for each in loads if each.buffer.name not in once]
    staged = sum(axis.hint * int(each.buffer.dtype.itemsize) for each in again)
    covered = product(_in_pieces(axis, tiling.long_piece, tiling.pieces)) * registers
    return covered * (len(sums) + len(once)) <= tiling.sums and staged <= tiling.staged


def power_of_two(n: int, *, down: bool = False) -> int:
    """The next power of two from n, or the last one before it."""
    return 1 << (n.bit_length() - 1 if down else max(n - 1, 0).bit_length())


def _nearest_power(n: int) -> int:
    """The power of two from which n is the least factor away."""
    below = power_of_two(n, down=True)
    return below if 2 * n < 3 * below else 2 * below


def padded(axis: LoopAxis) -> int:
    """A block that covers the axis, as far as its extent is known."""
    return power_of_two(max(axis.hint, 1))


def _combined_lanes(lanes: LoopAxis, elements: int, tiling: Tiling) -> int:
    """Elements whose partial results a program combines: few enough for many programs, and enough
    for what is read of each part to be what memory hands out at a time.
    """
    wanted = power_of_two(max(1, elements // tiling.combining), down=True)
    return min(padded(lanes), max(tiling.sector, min(wanted, tiling.narrow)))


def _covers(axis: LoopAxis, size: Mapping[str, int]) -> bool:
    return axis.most is not None and size[axis.name] >= axis.most


def _shared_axes(plan: Plan, launch: Launch) -> tuple[str, ...]:
    """The outer axes that every accumulator reduces; lanes among them only if alone."""
    if not launch.shared:
        return ()
    reduced = [set(accumulator.op.axes) for accumulator in launch.shared]
    axes = [a.name for a in launch.outer if all(a.name in group for group in reduced)]
    return tuple(a for a in axes if a != plan.vector or len(axes) == 1)


def _lane_axis(plan: Plan, launch: Launch, tiles: list[LoopAxis]) -> LoopAxis | None:
    """The outer axis along which neighbours in memory lie, if that is an outer one."""
    for axis in tiles:
        if axis.name == plan.vector:
            return axis
    return tiles[-1] if launch.combined and tiles else None


def _of_rows(launch: Launch) -> tuple[LoopAxis, ...]:
    """The inner axes along which a program comes to the same elements again: there are several
    loops over them, or arrays along them. Of the others it needs no more than a block at a time.
    """
    nodes = [*walk(*launch.body)]
    times = Counter(node.axis.name for node in nodes if isinstance(node, Loop))
    arrays = {axis for node in nodes for axis in _array_axes(node)}
    return tuple(axis for axis in launch.inner if times[axis.name] > 1 or axis.name in arrays)


def _array_axes(node: Node) -> tuple[str, ...]:
    """The axes of the array that a leaf writes to, if each program has one."""
    match node:
        case Accumulate(accumulator):
            return accumulator.axes
        case Keep(_, axes, shared):
            return () if shared else axes
        case _:
            return ()


def _fits(
    plan: Plan,
    launch: Launch,
    covers: Mapping[str, tuple[int, int]],
    beside: int,
    tiling: Tiling,
) -> bool:
    """Whether what a program must hold of its row fits in registers: inputs that several phases
    read, and the accumulators along the row. One whose neighbours lie along another axis than lanes
    is there twice for a while, as it was read and as it is computed with. covers: the blocks of
    each of the row's axes. beside: registers for each element of a row.
    """
    if any(axis.most is None for axis in launch.inner if axis.name in covers):
        return False

    def elements(axes: Iterable[str]) -> int:
        return product(product(covers[axis]) for axis in axes if axis in covers) * beside

    whole = elements(covers)
    loads = Counter(n.access.buffer.name for n in walk(*launch.body) if isinstance(n, Load))
    accesses = {n.access.buffer.name: n.access for n in walk(*launch.body) if isinstance(n, Load)}
    again = [accesses[name] for name, times in loads.items() if times > 1]
    held = sum(elements(access.strides) for access in again)
    held += sum(elements(accumulator.axes) for accumulator in launch.shared)
    turned = (each for each in again if each.strides.get(plan.vector, 1) != 1)
    twice = (elements(each.strides) * each.buffer.dtype.itemsize // 4 for each in turned)
    return max(held + max(twice, default=0), whole) <= tiling.resident


def _streamed(launch: Launch, size: Mapping[str, int], tiling: Tiling) -> dict[str, int]:
    """Blocks of what has no size yet, as a long row: short axes with arrays along them first, then
    from the inside.
    """
    arrays = {axis for accumulator in launch.shared for axis in accumulator.axes}
    inward = [axis for axis in reversed(launch.inner) if axis.name not in size]
    order = sorted(
        inward,
        key=lambda a: not (a.name in arrays and a.most is not None and padded(a) <= tiling.kept),
    )
    room, sizes = max(1, tiling.chunk // product(size.values())), {}
    for axis in order:
        sizes[axis.name] = min(padded(axis), room)
        room //= sizes[axis.name]
    return sizes


def _widen(
    plan: Plan,
    launch: Launch,
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
    rows = [axis for axis in launch.outer if axis is not lanes]
    for axis in (*reversed(rows[-1:]), *([lanes] if lanes and not launch.inner else [])):
        widened = min(size[axis.name] * room, padded(axis))
        room //= max(1, widened // size[axis.name])
        size[axis.name] = max(widened, size[axis.name])
