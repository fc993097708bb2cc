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
    Store,
    walk,
)
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.program.tree import Access, Kind, LoopAxis, Node, Plan

PREFETCH_ROWS = 2
# Bytes that are asked for during a pass and stay in a second-level cache until they are needed.
NEARBY = 512 * 1024
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
    it. rows: whether it is inside of rows that go together. again: tensors that later loops beside
    it or beside those around it read once more.
    """

    outer: LoopAxis | None = None
    divided: bool = False
    rows: bool = False
    again: frozenset[str] = frozenset()


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
        *_, last = [None, *(node for node in loop.body if isinstance(node, Loop))]
        ahead = self.following(loop, around, kind) or following
        body: list[Node] = []
        for k, node in enumerate(loop.body):
            if isinstance(node, Loop):
                again = around.again | _loaded(loop.body[k + 1 :]).keys()
                inside = Around(loop.axis, rows=rows, again=again)
                body.append(self.loop(node, inside, ahead if node is last else None))
            else:
                body.append(self.writing(self.asking(node, following), loop, rows=rows))
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
        """What the last pass of a loop's body should ask for: rows are read in a first pass and
        once more from cache in a last one, which leaves memory idle. Also what the only pass over
        pieces should, if these lie apart (no machine guesses where the next one begins) and are
        short enough to be in cache still when they are gone through.
        """
        vector, axis = self.plan.vector, loop.axis
        passes = [node for node in loop.body if isinstance(node, Loop)]
        if isinstance(kind, Jam) or axis.name == vector or not passes:
            return None
        if is_row_loop(loop, vector):
            if len(passes) > 1:
                distance = None if isinstance(kind, Abreast) else PREFETCH_ROWS
                return Following(axis, around.outer, distance)
            apart = self.bytes(passes[-1]) <= NEARBY and self.lies_apart(loop, around)
            return Following(axis, around.outer, 1) if apart else None
        nearby = self.bytes(passes[-1]) <= NEARBY
        return Following(axis, None, 1) if len(passes) > 1 and nearby else None

    def lies_apart(self, loop: Loop, around: Around) -> bool:
        """Whether the rows of a loop are pieces that lie apart, and are not read again soon."""
        length = self.plan.axis[self.plan.vector].extent
        loaded = _loaded(loop.body)
        return around.again.isdisjoint(loaded) and any(
            sympy.expand(access.strides[loop.axis.name] - length) != 0
            for access in loaded.values()
            if access.strides.get(self.plan.vector) == 1 and loop.axis.name in access.strides
        )

    def bytes(self, loop: Loop) -> int:
        """What a loop reads, with those around it standing still."""
        inside = {node.axis.name for node in walk(loop) if isinstance(node, Loop)}
        return sum(
            product(self.plan.axis[axis].hint for axis in inside & access.strides.keys())
            * access.buffer.dtype.itemsize
            for access in _loaded([loop]).values()
        )

    def asking(self, node: Node, following: Following | None) -> Node:
        """A leaf of a loop over lanes; what it loads along them is asked for ahead of time."""
        if following and isinstance(node, Load) and node.access.strides.get(self.plan.vector) == 1:
            return replace(node, ahead=following.ahead(node.access.strides))
        return node

    def writing(self, node: Node, loop: Loop, *, rows: bool) -> Node:
        """A leaf of a loop; what it writes along lanes is in order where this is the loop over
        them, and of one row at a time. rows: whether it is inside of rows that go together.
        """
        vector, together = self.plan.vector, self.plan.together
        if not isinstance(node, Store) or node.access.strides.get(vector) != 1:
            return node
        jammed = rows and together is not None and isinstance(together.kind, Jam)
        return replace(node, apart=jammed or loop.axis.name != vector)


def _loaded(nodes: Sequence[Node]) -> dict[str, Access]:
    """What is loaded in some nodes, by name."""
    return {n.access.buffer.name: n.access for n in walk(*nodes) if isinstance(n, Load)}
