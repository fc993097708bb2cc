"""How the loops of a program go on CPUs: which of them workers divide, which go over lanes, over
rows together or one by one, and what is asked for ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import sympy

from normpass.backend.program.rows import is_row_loop, unaligned_row
from normpass.backend.program.tree import (
    Abreast,
    Accumulate,
    Ahead,
    Compute,
    Jam,
    Lanes,
    Load,
    Loop,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from normpass.backend.program.tree import Kind, LoopAxis, Node, Plan

PREFETCH_ROWS = 2
# So many rows are gone through before what was asked for would have come.
FEW_ROWS = 64


def with_kinds(plan: Plan) -> Plan:
    """The plan with how each of its loops goes."""
    kinds = _Kinds(plan)
    return replace(
        plan,
        body=tuple(kinds.top(node) if isinstance(node, Loop) else node for node in plan.body),
    )


@dataclass(frozen=True)
class Around:
    """Where a loop stands. outer: the axis of the loop around it. divided: whether workers divide
    it. rows: whether it is inside of rows that go together.
    """

    outer: LoopAxis | None = None
    divided: bool = False
    rows: bool = False


@dataclass(frozen=True)
class Following:
    """Rows along an axis that are asked for while others are computed, so many further on: a
    number, or as many as there are lanes. outer: the axis of the loop around that over rows.
    """

    axis: LoopAxis
    outer: LoopAxis | None
    distance: int | None

    def ahead(self, strides: Mapping[str, sympy.Expr]) -> Ahead | None:
        """From a row to the one that is asked for; None where that is the same. Where few rows lie
        side by side it is the row that the next step outside leads to.
        """
        stride = strides.get(self.axis.name)
        if stride is None:
            return None
        if self.outer and self.axis.hint < FEW_ROWS:
            around = strides.get(self.outer.name)
            if around is None:
                return None
            if sympy.expand(around - stride * self.axis.extent) != 0:
                return Ahead(around)
        if self.distance is None:
            return Ahead(stride, lanes=True)
        return Ahead(self.distance * stride)


class _Kinds:
    """Goes through the loops of a plan from the outside."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def top(self, loop: Loop) -> Loop:
        """A loop at the top, with those in it that workers divide with it as if they were one: the
        only loop in it while there are but values beside it, up to that over lanes.
        """
        return self.divided(loop, None) if loop.parallel else self.loop(loop, Around(divided=True))

    def divided(self, loop: Loop, outer: LoopAxis | None) -> Loop:
        inner = self.divided_with(loop)
        if inner is None:
            return replace(self.loop(loop, Around(outer, divided=True)), parallel=True)
        body = tuple(
            self.divided(node, loop.axis) if isinstance(node, Loop) else node for node in loop.body
        )
        return replace(loop, body=body, parallel=True)

    def divided_with(self, loop: Loop) -> Loop | None:
        """The loop inside of a loop that is divided with it."""
        loops = [node for node in loop.body if isinstance(node, Loop)]
        vector = self.plan.vector
        if (
            loop.axis.name == vector
            or len(loops) != 1
            or not all(isinstance(node, Loop | Load | Compute) for node in loop.body)
            or loops[0].axis.name == vector
        ):
            return None
        return loops[0]

    def loop(self, loop: Loop, around: Around, following: Following | None = None) -> Loop:
        kind = self.kind(loop, around)
        rows = around.rows or isinstance(kind, Jam | Abreast)
        inside = Around(loop.axis, rows=rows)
        *_, last = [None, *(node for node in loop.body if isinstance(node, Loop))]
        ahead = self.following(loop, around, kind)
        body = [
            self.loop(node, inside, ahead if node is last else None)
            if isinstance(node, Loop)
            else self.asking(node, following)
            for node in loop.body
        ]
        return replace(loop, body=tuple(body), kind=kind)

    def kind(self, loop: Loop, around: Around) -> Kind | None:
        together = self.plan.together
        if loop.axis.name == self.plan.vector:
            return self.lanes(loop, around)
        if together is None or loop.axis.name != together.axis:
            return None
        if isinstance(together.kind, Abreast) and not is_row_loop(loop, self.plan.vector):
            return None
        return together.kind

    def lanes(self, loop: Loop, around: Around) -> Lanes:
        """What is left at the end goes through the same body. Lanes that add up in registers have
        several, and lanes that add up nothing begin where memory is aligned.
        """
        sums = [node.accumulator for node in walk(loop) if isinstance(node, Accumulate)]
        unrolled = any(accumulator.unrolled for accumulator in sums)
        long = any(
            node.accumulator.long and not node.accumulator.axes
            for node in loop.body
            if isinstance(node, Accumulate)
        )
        if unrolled or long or around.divided or around.rows:
            return Lanes(unrolled)
        return Lanes(unrolled, unaligned_row(loop, self.plan))

    def following(self, loop: Loop, around: Around, kind: Kind | None) -> Following | None:
        """What the last pass over a row should ask for: rows are read in a first pass and once more
        from cache in a last one, which leaves memory idle.
        """
        passes = sum(isinstance(child, Loop) for child in loop.body)
        if isinstance(kind, Jam) or passes < 2 or not is_row_loop(loop, self.plan.vector):
            return None
        distance = None if isinstance(kind, Abreast) else PREFETCH_ROWS
        return Following(loop.axis, around.outer, distance)

    def asking(self, node: Node, following: Following | None) -> Node:
        """A leaf of a loop over lanes; what it loads along them is asked for ahead of time."""
        if following and isinstance(node, Load) and node.access.strides.get(self.plan.vector) == 1:
            return replace(node, ahead=following.ahead(node.access.strides))
        return node
