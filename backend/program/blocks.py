"""Axes in two: blocks of an axis, and the elements of a block.

What is reduced along such an axis is reduced within a block first, in registers and first-level
cache, and the blocks' results are few enough to be looked at again. So few long rows are divided
among workers: all of them work on every row, and a gradient of the weight, a sum over rows, is
complete block by block.

    for i_block, divided among workers
        for r
            for i, a vector at a time
                add     x to sum_i
            add     sum_i to sum            (a part of every row's for each worker)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import sympy

from normpass.backend.program.axes import choose_order, local_axes
from normpass.backend.program.tree import LoopAxis
from normpass.passes.region import Output, Region, product

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.tree import Access
    from normpass.passes.region import Buffer


def block_size(axis: LoopAxis, smallest: int, largest: int) -> int | None:
    """The largest number within limits that divides an axis' extent; None if none is known to."""
    return max((d for d in sympy.divisors(axis.multiple) if smallest <= d <= largest), default=None)


def row_blocks(
    region: Region,
    axes: Sequence[LoopAxis],
    accesses: Mapping[str, Access],
    vector: str,
    machine: Machine,
) -> int | None:
    """The size of blocks of rows, where rows are what lanes run along and too few for the machine,
    or too long for its caches and added to others; None where rows stay whole.
    """
    blocking = machine.blocking
    if blocking is None or vector not in local_axes(region):
        return None
    (lanes,) = (axis for axis in axes if axis.name == vector)
    rows = [axis for axis in axes if axis.name != vector]
    if not rows:
        return None
    added_up = any(
        op.is_reduction and vector not in op.axes and vector in region.varies[op.name]
        for op in region.ops
    )
    row = sum(
        lanes.hint * access.buffer.dtype.itemsize
        for access in accesses.values()
        if vector in access.strides and len(access.strides) > 1
    )
    count = product(axis.hint for axis in rows)
    few = count < machine.workers and lanes.hint >= blocking.long_row
    long = added_up and row > blocking.row_bytes
    if not few and not long:
        return None
    least, most = blocking.row_block
    # What is added to others is complete block by block: its rows are gone through one by one.
    enough = lanes.hint * (1 if added_up else count) // machine.workers
    return block_size(lanes, least, max(least, min(most, enough)))


def column_blocks(
    region: Region,
    axes: Sequence[LoopAxis],
    accesses: Mapping[str, Access],
    vector: str,
    machine: Machine,
) -> tuple[str, int] | None:
    """The axis that all of the loops' sums run over, and the size of its blocks, where lanes are
    few: a block's loop stands inside of that over lanes, and adds up in registers. A GPU's programs
    do that anyway.
    """
    blocking, local = machine.blocking, local_axes(region)
    (lanes,) = (axis for axis in axes if axis.name == vector)
    if blocking is None or machine.tiling or lanes.hint > blocking.narrow or vector in local:
        return None
    first = choose_order(region, axes, accesses, vector, machine)[0]
    size = block_size(first, *blocking.column_block) if local == {first.name} else None
    return (first.name, size) if size else None


def in_blocks(
    region: Region,
    axes: Sequence[LoopAxis],
    accesses: Mapping[str, Access],
    name: str,
    size: int,
    *,
    outermost: bool = False,
) -> tuple[Region, tuple[LoopAxis, ...], dict[str, Access]]:
    """A coalesced region with an axis in blocks of so many elements, which divide its extent. What
    is in a block keeps the axis' name. outermost: whether workers divide the blocks.
    """
    blocks = f"{name}_block"
    while blocks in {axis.name for axis in axes}:  # of what is in a block already
        blocks = f"{blocks}_block"

    def divided(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            part for each in names for part in ((blocks, each) if each == name else (each,))
        )

    def buffer(of: Buffer) -> Buffer:
        return replace(of, dims=tuple((axis,) for axis in divided([axis for (axis,) in of.dims])))

    def access(of: Access) -> Access:
        steps: dict[str, sympy.Expr] = {}
        for axis, step in of.strides.items():  # innermost first
            steps[axis] = step
            if axis == name:
                steps[blocks] = step * size
        return replace(of, strides=steps)

    def halves(axis: LoopAxis) -> tuple[LoopAxis, ...]:
        if axis.name != name:
            return (axis,)
        return (
            LoopAxis(
                blocks,
                axis.extent / size,
                axis.parts,
                axis.most and axis.most // size,
                axis.multiple // size,
                outermost,
            ),
            LoopAxis(name, sympy.Integer(size), axis.parts, size, size, blocks=blocks),
        )

    region = replace(
        region,
        inputs=tuple(map(buffer, region.inputs)),
        ops=tuple(replace(op, axes=divided(op.axes)) for op in region.ops),
        outputs=tuple(Output(buffer(each.buffer), each.value) for each in region.outputs),
    )
    return (
        region,
        tuple(half for axis in axes for half in halves(axis)),
        {key: access(each) for key, each in accesses.items()},
    )
