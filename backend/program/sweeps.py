"""Reductions in one sweep of memory, where one needs another and what they are of has left the
caches by then, or does not fit in registers.

A variance is of what is less its mean, the exponentials of a softmax are of what is less its
maximum: in order, each reduction is a sweep of its own. Of a block that is in first-level cache
both cost one, with a mean or a maximum of the block's own, and what is made of the blocks' results
is little: variances.py and exponentials.py say how.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.axes import choose_order, has_crossed_rows
from normpass.backend.program.blocks import block_size, in_blocks
from normpass.backend.program.exponentials import exponentials
from normpass.backend.program.variances import variances
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.program.chain import Chain
    from normpass.backend.program.machine import Machine
    from normpass.backend.program.tree import Access, LoopAxis
    from normpass.passes.region import Op, Region


def sweeps_in_blocks(
    region: Region,
    axes: tuple[LoopAxis, ...],
    accesses: dict[str, Access],
    vector: str,
    machine: Machine,
) -> tuple[Region, tuple[LoopAxis, ...], dict[str, Access]]:
    """A coalesced region in which large chains are made of those of blocks, and an axis may be in
    two for that.
    """
    if machine.blocking is None or has_crossed_rows(accesses, vector):
        return region, axes, accesses  # rows next to each other go together, for their whole length
    for name in [each.second.name for each in _chains(region)]:
        found = _chain(region, name)
        order = choose_order(region, axes, accesses, vector, machine)
        near = found and _block(found, region, order, vector, machine)
        if not near:
            continue
        *whole, (last, size) = near
        if size is not None:
            region, axes, accesses = in_blocks(region, axes, accesses, last, size)
        if found := _chain(region, name):
            region = _rewritten(region, axes, found, frozenset((last, *(a for a, _ in whole))))
    return region, axes, accesses


def _chains(region: Region) -> list[Chain]:
    return [*variances(region), *exponentials(region)]


def _chain(region: Region, name: str) -> Chain | None:
    """One of a region's, by the name of its second reduction, as it is by now."""
    return next((each for each in _chains(region) if each.second.name == name), None)


def _block(
    found: Chain,
    region: Region,
    order: Sequence[LoopAxis],
    vector: str,
    machine: Machine,
) -> list[tuple[str, int | None]] | None:
    """The axes of a block, innermost first: whole ones, and of the last one so many elements. None
    where sums run over what stays in cache, or the extents have no such part.
    """
    blocking = machine.blocking
    assert blocking is not None
    varies = region.varies[found.x]
    reduced = [axis for axis in order if axis.name in found.first.axes]
    itemsize = region.compute_dtype.itemsize
    around = [] if order[0] in reduced else order[: order.index(reduced[0])]
    beside = [axis for axis in order if axis.name in varies and axis not in (*reduced, *around)]
    row = product(axis.hint for axis in (*reduced, *beside)) * itemsize
    if row <= blocking.sweep:
        return None
    # What stands outside of a block does not stay: of other axes only the lanes go through it, on
    # GPUs as many of them as a program has.
    most_lanes = machine.tiling.narrow if machine.tiling else sys.maxsize
    lanes = product(min(axis.hint, most_lanes) for axis in beside if axis.name == vector)
    room = blocking.sweep_block // (itemsize * lanes)
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
    region: Region, axes: Sequence[LoopAxis], found: Chain, block: frozenset[str]
) -> Region:
    near = tuple(axis for axis in found.first.axes if axis in block)
    far = tuple(axis for axis in found.first.axes if axis not in block)
    count = product(int(axis.extent) for axis in axes if axis.name in near)
    of = found.in_blocks(near, far, count)
    ops = [each for op in region.ops for each in of.get(op.name, (op,))]
    return _without_unused(replace(region, ops=tuple(ops)))


def _without_unused(region: Region) -> Region:
    used = {output.value for output in region.outputs}
    kept: list[Op] = []
    for op in reversed(region.ops):
        if op.name in used:
            kept.append(op)
            used |= {arg for arg in op.args if isinstance(arg, str)}
    return replace(region, ops=tuple(reversed(kept)))
