"""How reductions add up on CPUs: in one register or in several that take turns, and whether so much
is added up that digits would be lost in one go.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.tree import (
    Accumulate,
    Accumulator,
    Begin,
    Finish,
    Jam,
    rewritten,
)

if TYPE_CHECKING:
    from normpass.backend.program.tree import Node, Plan

# A sum of more additions than this into one register is a long one. Counted with AVX2's eight lanes
# of floats, so that the text is the same on every machine: a row of 32768 is not long in the four
# registers of a row by itself, and is in the one that each of several rows has.
LONG, LANES, REGISTERS = 1024, 8, 4


def with_sums(plan: Plan) -> Plan:
    """The plan with how each of its reductions adds up."""
    whole = {node.accumulator.op.name for node in plan.body if isinstance(node, Begin)}

    def changed(node: Node) -> Node:
        if not isinstance(node, Begin | Accumulate | Finish):
            return node
        accumulator = node.accumulator
        unrolled = _takes_turns(accumulator, plan)
        if accumulator.axes:
            # What one worker adds up alone, or all of them in parts, has its own way.
            long = accumulator.op.name not in whole and _is_long(accumulator, plan)
        else:
            long = _is_long(accumulator, plan, lanes=LANES * (REGISTERS if unrolled else 1))
        return replace(node, accumulator=replace(accumulator, unrolled=unrolled, long=long))

    return replace(plan, body=rewritten(plan.body, changed))


def _takes_turns(accumulator: Accumulator, plan: Plan) -> bool:
    """Whether a reduction over lanes has several accumulators: where no jammed rows take turns
    anyway.
    """
    jammed = plan.together is not None and isinstance(plan.together.kind, Jam)
    over_lanes = plan.vector in plan.region.varies[accumulator.operand]
    return not jammed and not accumulator.axes and plan.vector in accumulator.op.axes and over_lanes


def _is_long(accumulator: Accumulator, plan: Plan, lanes: int = 1) -> bool:
    """Whether a register, or an element of an array, takes so many additions, or one cannot know
    how many.
    """
    if accumulator.op.fn != "sum":
        return False
    axes = [plan.axis[axis] for axis in accumulator.op.axes]
    times = math.prod(math.inf if axis.most is None else axis.most for axis in axes)
    return times > LONG * (lanes if plan.vector in accumulator.op.axes else 1)
