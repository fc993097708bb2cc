"""Which rows go through a kernel together on CPUs, and which are written in aligned vectors.

A row is what lanes run along, where its own sums are needed again. Long rows are jammed: what does
not depend on the row is read once for four or two of them, and memory is asked for as many streams
at once. Short rows go abreast, as many as a vector has lanes: there the work of a row that is one
number, sums over lanes and roots of variances, takes as long as that of all its elements, and lanes
that run along the rows do it for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from normpass.backend.program.pointwise import truth_values
from normpass.backend.program.tree import (
    Abreast,
    Access,
    Accumulate,
    Begin,
    Compute,
    Finish,
    Jam,
    Keep,
    Leaf,
    Load,
    Loop,
    Recall,
    Store,
    Together,
    walk,
)
from normpass.passes.region import EXPAND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.tree import Node, Plan

# Measured on the backward of layer and RMS norm and layer norm's forward (float32, AVX-512, two
# threads) against one row at a time with the row after the next prefetched: four rows are 1.1x to
# 1.5x faster from 8 KiB a row where rows are added to arrays, from 16 KiB elsewhere, and slower
# below. Around 128 KiB two rows still fit in a second-level cache of 1 MiB and four do not: there
# two are 1.1x faster than four. Where a vector is half a line (AVX2), four rows with arrays are
# 1.0x to 1.2x faster too, but without any one at a time is: layer norm's forward, rows of 16 to 256
# KiB, on two processors 1.07x to 1.36x and 0.91x to 1.66x (1.15x in the mean) in float32, 0.98x to
# 1.2x in bfloat16.
JAM = 4
JAM_FROM, JAM_FROM_WITH_ARRAYS = 16 * 1024, 8 * 1024
PAIRS = range(96 * 1024, 256 * 1024)
# Rows go abreast where that pays, measured with one thread (AVX-512) on rows of 32 to 256 elements
# of layer and RMS norm and softmax, forward and backward, against one row at a time with the row
# after the next prefetched. Up to so many bytes a row, bfloat16 rows are 1.1x to 1.8x faster, and
# float32 rows that are gone over three times 1.1x to 1.4x; two times 0.85x to 1.05x, which wait for
# memory anyway. Longer rows, 16 of them and the next 16, leave a first-level cache too soon (0.6x
# to 0.9x at 1024 bytes), and so do float32 rows that lie far apart (0.8x to 0.9x). Of float32 rows
# that begin anywhere, lines are written in parts (0.75x at 100 elements).
ABREAST, PASSES = 768, 3
# Rows of so many elements are written in vectors that begin where memory is aligned, wherever the
# row begins (each_aligned in normpass.h). Where they are added to arrays, a vector of these is then
# made of two that the row before has written, which has to be waited for unless that is long ago.
ALIGN_FROM, ALIGN_FROM_WITH_ARRAYS = 128, 512
MOST_LANES = 16


def with_rows_together(plan: Plan, machine: Machine) -> Plan:
    """The plan with which of its rows go together."""
    return replace(plan, together=_rows_together(plan, machine))


def _rows_together(plan: Plan, machine: Machine) -> Together | None:
    """None if they go one by one."""
    loops = list(_row_loops(plan))
    if plan.vector not in plan.local or len({loop.axis.name for loop in loops}) != 1:
        return None
    axis = loops[0].axis
    arrays = [
        node.accumulator
        for loop in plan.body
        for node in walk(loop)
        if isinstance(node, Accumulate) and node.accumulator.axes
    ]
    if any(axis.name in plan.region.varies[each.op.name] - set(each.axes) for each in arrays):
        return None  # each row has an array of its own, and there is one
    if any(_is_crossed(loop, plan) for loop in loops) and axis.name not in plan.local:
        return Together(axis.name, Jam(MOST_LANES))
    if any(axis.name in each.axes for each in arrays):
        return None  # each is added to elements of its own, as a bias of every row
    if len(loops) == 1 and _may_go_abreast(plan, loops[0]):
        return Together(axis.name, Abreast())
    if axis.name in plan.local and len(plan.axes) > 2:
        return None  # its rows have sums in common
    row = plan.axis[plan.vector].hint * (8 if plan.region.compute_dtype is torch.float64 else 4)
    if row < (JAM_FROM_WITH_ARRAYS if arrays else JAM_FROM):
        return None
    last = [child for child in loops[-1].body if isinstance(child, Loop)][-1]
    if not arrays and not machine.whole_lines:
        # Alone they are written past the caches, in lines; what writes none is no slower alone.
        return None
    if not arrays and unaligned_row(last, plan):
        return None  # to begin where memory is aligned gains more, and is another place in each row
    return Together(axis.name, Jam(2 if row in PAIRS else JAM))


def _row_loops(plan: Plan) -> Iterator[Loop]:
    """The loops over rows."""
    for top in plan.body:
        for node in walk(top):
            if isinstance(node, Loop) and is_row_loop(node, plan.vector):
                yield node


def is_row_loop(node: Loop, vector: str) -> bool:
    """Whether a loop has loops over lanes in it, and no others."""
    inside = {child.axis.name for child in node.body if isinstance(child, Loop)}
    return node.axis.name != vector and inside == {vector}


def _is_crossed(rows: Loop, plan: Plan) -> bool:
    """Whether a tensor has the rows of a loop side by side and their elements far apart: a line of
    memory has elements of as many rows as a vector has lanes.
    """
    return any(
        node.access.strides.get(rows.axis.name) == 1
        and node.access.strides.get(plan.vector, 1) != 1
        for node in walk(rows)
        if isinstance(node, Load | Store)
    )


def _may_go_abreast(plan: Plan, rows: Loop) -> bool:
    """Whether it pays for rows to go abreast, nothing but sums over lanes is added up for them, and
    what each has one of are numbers.
    """
    extent, axis = plan.axis[plan.vector].extent, rows.axis
    if not extent.is_number or axis.name in plan.local or axis.hint < JAM:
        return False
    number = plan.region.compute_dtype.itemsize
    loads = _loaded_by_lanes(rows, plan)
    kinds = [access.buffer.dtype for access in loads]
    kept = {leaf.value for leaf in _leaves(rows) if isinstance(leaf, Keep)}
    size = extent * (sum(kind.itemsize for kind in kinds) + number * len(kept))
    narrow = any(kind.is_floating_point and kind.itemsize < number for kind in kinds)
    whole = extent % MOST_LANES == 0 and all(a.strides[axis.name] == extent for a in loads)
    passes = sum(isinstance(child, Loop) for child in rows.body)
    pays = size <= ABREAST and (narrow or (whole and passes >= PASSES))
    return pays and all(_works_abreast(leaf, plan, axis.name) for leaf in _leaves(rows))


def _loaded_by_lanes(rows: Loop, plan: Plan) -> list[Access]:
    """What loops over the elements of rows load of each row."""
    loads = {
        leaf.access.buffer.name: leaf.access for leaf in _leaves(rows) if isinstance(leaf, Load)
    }
    return [a for a in loads.values() if {rows.axis.name, plan.vector} <= a.strides.keys()]


def _works_abreast(leaf: Leaf, plan: Plan, rows: str) -> bool:
    truth, varies = truth_values(plan.region), plan.region.varies

    def is_truth_of_rows(value: str) -> bool:
        return value in truth and rows in varies[value] and plan.vector not in varies[value]

    match leaf:
        case Accumulate(accumulator):
            over_lanes = plan.vector in varies[accumulator.operand]
            return over_lanes and bool(accumulator.axes or rows in varies[accumulator.op.name])
        case Keep(value, axes, _) | Recall(value, axes, _):
            return rows not in axes and plan.vector in varies[value]
        case Load(access):
            return not is_truth_of_rows(access.buffer.name)
        case Compute(op):
            return op.fn != EXPAND and not is_truth_of_rows(op.name)
        case Begin() | Finish() | Store():
            return True
        case _:
            return False


def _leaves(node: Node) -> Iterator[Leaf]:
    for each in walk(node):
        if not isinstance(each, Loop):
            yield each


def unaligned_row(loop: Loop, plan: Plan) -> Access | None:
    """What a loop over lanes writes, if its rows begin anywhere and are long enough for that to
    matter.
    """
    stored = [leaf.access for leaf in loop.body if isinstance(leaf, Store)]
    access = next((a for a in stored if a.strides.get(plan.vector) == 1), None)
    adds = any(isinstance(leaf, Accumulate) for leaf in loop.body)
    if access is None or access.buffer.dtype is not torch.float32:
        return None  # only of these a vector is a whole line, and written past the caches
    if loop.axis.hint < (ALIGN_FROM_WITH_ARRAYS if adds else ALIGN_FROM):
        return None
    others = [step for axis, step in access.strides.items() if axis != plan.vector]
    return None if all(access.sizes.divisor(step) % MOST_LANES == 0 for step in others) else access
