"""Variances in one sweep of memory, where what they are of has left the caches before the mean is
known.

    mean = sum(x) / n                       over blocks b of elements p
    var  = sum((x - mean)^2) / n

takes two sweeps. Of a block that is in first-level cache all sums cost one:

    s_b = sum[p](x)     m_b = s_b / n_b     c_b = sum[p](x - m_b)     q_b = sum[p]((x - m_b)^2)

and then, of few numbers, as exactly as in two sweeps:

    sum(x)          = sum[b](s_b)
    sum((x - m)^2)  = sum[b](q_b + (m_b - m) (n_b (m_b - m) + 2 c_b))   for any m that all x share

This is how Chan, Golub and LeVeque combine variances ("Algorithms for Computing the Sample
Variance", 1983), with all blocks at once, so that no running mean is divided for; c_b, zero but for
the rounding of m_b, is what their corrected two-pass algorithm subtracts. Without it digits are
lost where the mean is many deviations from zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from normpass.backend.program.axes import choose_order, has_crossed_rows
from normpass.backend.program.blocks import block_size, in_blocks
from normpass.passes.region import Op, product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.program.machine import Blocking, Machine
    from normpass.backend.program.tree import Access, LoopAxis
    from normpass.passes.region import Region


# What the values are called after the sum of squares that they make up.
OF_BLOCKS = ["part", "mean", "centred", "square", "lost", "within"]
COMBINED = ["apart", "more", "twice", "of_apart", "times", "between", "rest"]


@dataclass(frozen=True)
class _Variance:
    """squares = sum[axes]((x - m)^2), where total = sum[axes](x) is on the way to m."""

    x: str
    m: str
    total: Op
    squares: Op


def variances_in_blocks(
    region: Region,
    axes: tuple[LoopAxis, ...],
    accesses: dict[str, Access],
    vector: str,
    machine: Machine,
) -> tuple[Region, tuple[LoopAxis, ...], dict[str, Access]]:
    """A coalesced region in which large variances are made of those of blocks, and an axis may be
    in two for that.
    """
    if machine.blocking is None or has_crossed_rows(accesses, vector):
        return region, axes, accesses  # rows next to each other go together, for their whole length
    for name in [each.squares.name for each in _variances(region)]:
        found = _variance(region, name)
        order = choose_order(region, axes, accesses, vector, machine)
        near = found and _block(found, region, order, vector, machine.blocking)
        if not near:
            continue
        *whole, (last, size) = near
        if size is not None:
            region, axes, accesses = in_blocks(region, axes, accesses, last, size)
        if found := _variance(region, name):
            region = _rewritten(region, axes, found, frozenset((last, *(a for a, _ in whole))))
    return region, axes, accesses


def _variance(region: Region, squares: str) -> _Variance | None:
    """One of a region's, by the name of its sum, as it is by now."""
    return next((each for each in _variances(region) if each.squares.name == squares), None)


def _variances(region: Region) -> list[_Variance]:
    found = []
    for op in region.ops:
        square = region.producer.get(str(op.args[0])) if op.fn == "sum" else None
        if square is None or square.fn != "mul" or square.args[0] != square.args[1]:
            continue
        difference = region.producer.get(str(square.args[0]))
        if difference is None or difference.fn != "sub":
            continue
        x, m = difference.args
        total = next((o for o in _behind(region, m) if o.fn == "sum" and o.args == (x,)), None)
        if total and set(total.axes) == set(op.axes) <= region.varies[str(x)]:
            found.append(_Variance(str(x), str(m), total, op))
    return [each for each in found if region.varies[each.m].isdisjoint(each.total.axes)]


def _behind(region: Region, value: object) -> list[Op]:
    """The ops that a value is made by."""
    stack, seen = [value], []
    while stack:
        op = region.producer.get(str(stack.pop()))
        if op and op not in seen:
            seen.append(op)
            stack += op.args
    return seen


def _block(
    found: _Variance,
    region: Region,
    order: Sequence[LoopAxis],
    vector: str,
    blocking: Blocking,
) -> list[tuple[str, int | None]] | None:
    """The axes of a block, innermost first: whole ones, and of the last one so many elements. None
    where sums run over what stays in cache, or the extents have no such part.
    """
    varies = region.varies[found.x]
    reduced = [axis for axis in order if axis.name in found.total.axes]
    itemsize = region.compute_dtype.itemsize
    around = [] if order[0] in reduced else order[: order.index(reduced[0])]
    beside = [axis for axis in order if axis.name in varies and axis not in (*reduced, *around)]
    row = product(axis.hint for axis in (*reduced, *beside)) * itemsize
    if row <= blocking.variance:
        return None
    # What stands outside of a block does not stay: of other axes only the lanes go through it.
    lanes = product(axis.hint for axis in beside if axis.name == vector)
    room = blocking.variance_block // (itemsize * lanes)
    block: list[tuple[str, int | None]] = []
    taken = 1
    for axis in reversed(reduced):
        most = room // taken
        if axis.name != vector:
            most = min(most, blocking.column_block[1])
        if axis.extent.is_number and axis.hint <= most and axis is not reduced[0]:
            block.append((axis.name, None))
            taken *= axis.hint
            continue
        size = block_size(axis, max(2, blocking.least // taken), most)
        if size is not None:
            block.append((axis.name, size))
            taken *= size
        break
    return block if taken >= blocking.least else None


def _rewritten(
    region: Region, axes: Sequence[LoopAxis], found: _Variance, near: frozenset[str]
) -> Region:
    total, squares = found.total, found.squares
    near_axes = tuple(axis for axis in total.axes if axis in near)
    far = tuple(axis for axis in total.axes if axis not in near)
    many = float(product(int(axis.extent) for axis in axes if axis.name in near))
    part, mean, centred, square, lost, within = (f"{squares.name}_{name}" for name in OF_BLOCKS)
    apart, more, twice, of_apart, times, between, rest = (
        f"{squares.name}_{name}" for name in COMBINED
    )
    of_blocks = [
        Op(part, "sum", (found.x,), near_axes),
        Op(mean, "div", (part, many)),
        Op(centred, "sub", (found.x, mean)),
        Op(square, "mul", (centred, centred)),
        Op(lost, "sum", (centred,), near_axes),
        Op(within, "sum", (square,), near_axes),
        Op(total.name, "sum", (part,), far),
    ]
    combined = [
        Op(apart, "sub", (mean, found.m)),
        Op(more, "mul", (apart, many)),
        Op(twice, "mul", (lost, 2.0)),
        Op(of_apart, "add", (more, twice)),
        Op(times, "mul", (apart, of_apart)),
        Op(between, "sum", (times,), far),
        Op(rest, "sum", (within,), far),
        Op(squares.name, "add", (rest, between)),
    ]
    ops: list[Op] = []
    for op in region.ops:
        ops += of_blocks if op == total else combined if op == squares else [op]
    return _without_unused(replace(region, ops=tuple(ops)))


def _without_unused(region: Region) -> Region:
    used = {output.value for output in region.outputs}
    kept: list[Op] = []
    for op in reversed(region.ops):
        if op.name in used:
            kept.append(op)
            used |= {arg for arg in op.args if isinstance(arg, str)}
    return replace(region, ops=tuple(reversed(kept)))
