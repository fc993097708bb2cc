"""How many elements along each axis a GPU's program works on at a time, and with how many warps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.tree import SHARED, Blocks, Launch, Load, Plan, walk
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from normpass.backend.program.machine import Tiling
    from normpass.backend.program.tree import LoopAxis


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
    resident = _fits(launch, product(size.values()), tiling)
    if resident:
        size |= {axis.name: padded(axis) for axis in launch.inner}
    else:
        size |= _streamed(launch, tiling, product(size.values()))
    room = max(1, tiling.tile // product(size.values()))
    parts = room if launch.combined else 1
    if not launch.combined:
        _widen(plan, launch, shares, lanes, size, room)
    elements = product(size.values()) * parts
    warps = power_of_two(max(1, elements // (32 * tiling.per_thread)), down=True)
    warps = min(warps, tiling.most_warps)
    held = frozenset(axis.name for axis in launch.inner if resident or _covers(axis, size))
    return Blocks(shares, size, held, parts, warps, max(1, tiling.warps // warps))


def power_of_two(n: int, *, down: bool = False) -> int:
    """The next power of two from n, or the last one before it."""
    return 1 << (n.bit_length() - 1 if down else max(n - 1, 0).bit_length())


def padded(axis: LoopAxis) -> int:
    """A block that covers the axis, as far as its extent is known."""
    return power_of_two(max(axis.hint, 1))


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


def _fits(launch: Launch, beside: int, tiling: Tiling) -> bool:
    """Whether what a program must hold of its row fits in registers: inputs that several phases
    read, and the accumulators along the row."""
    inner = {axis.name: axis for axis in launch.inner}
    if any(axis.most is None for axis in inner.values()):
        return False

    def elements(axes: Iterable[str]) -> int:
        return product(padded(inner[axis]) for axis in axes if axis in inner) * beside

    whole = elements(inner)
    loads = Counter(n.access.buffer.name for n in walk(*launch.body) if isinstance(n, Load))
    accesses = {
        n.access.buffer.name: n.access.strides for n in walk(*launch.body) if isinstance(n, Load)
    }
    held = sum(elements(accesses[name]) for name, times in loads.items() if times > 1)
    held += sum(elements(accumulator.axes) for accumulator in launch.shared)
    return max(held, whole) <= tiling.resident


def _streamed(launch: Launch, tiling: Tiling, beside: int) -> dict[str, int]:
    """Blocks of a long row: short axes with arrays along them first, then from the inside."""
    arrays = {axis for accumulator in launch.shared for axis in accumulator.axes}
    inward = list(reversed(launch.inner))
    order = sorted(
        inward,
        key=lambda a: not (a.name in arrays and a.most is not None and padded(a) <= tiling.kept),
    )
    room, size = max(1, tiling.chunk // beside), {}
    for axis in order:
        size[axis.name] = min(padded(axis), room)
        room //= size[axis.name]
    return size


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
