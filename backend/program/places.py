"""Where the values of a region live, given the order of its loops.

A value lives in the innermost loop among the axes it varies over. A reduction is accumulated there
and closes when the loop over the outermost axis it reduces ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.program.tree import Access, Accumulator, LoopAxis, Recall
from normpass.passes.region import REGROUP, Op, Region, product

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from normpass.backend.program.machine import Machine


class Places:
    """Where the values of a region live. arrays: those that can be read back where it is asked."""

    def __init__(
        self,
        region: Region,
        order: Sequence[LoopAxis],
        accesses: Mapping[str, Access],
        machine: Machine,
        vector: str,
        local: frozenset[str],
    ) -> None:
        self.vector, self.local = vector, local
        self.region = region
        self.order = order
        self.accesses = accesses
        self.machine = machine
        self.depth_of = {axis.name: k + 1 for k, axis in enumerate(order)}
        self.inputs = tuple(buffer.name for buffer in region.inputs)
        self.topological = [*self.inputs, *(op.name for op in region.ops)]
        self.arrays: dict[str, Recall] = {}
        # What is looked at by other axes, and in how many open loops its array lives: those that it
        # and all others that the loops run over have in common.
        self.regrouped = {str(op.args[0]): self.home(op) for op in region.ops if op.fn == REGROUP}

    def level(self, axes: Iterable[str]) -> int:
        """How many loops must be open for a value that varies over these axes."""
        return max((self.depth_of[axis] for axis in axes), default=0)

    def closes(self, op: Op) -> int:
        """How many loops are open where a reduction's result is complete: those outside of all that
        it reduces. Loops that what it adds up does without are not among them: its nest skips them.
        """
        first = min(self.depth_of[axis] for axis in op.axes)
        varies = self.region.varies[str(op.args[0])]
        around = [axis for axis in varies if self.depth_of[axis] < first]
        if self.is_shared_out(op, around):
            return 0
        return max((self.depth_of[axis] for axis in around), default=0)

    def is_shared_out(self, op: Op, around: Sequence[str]) -> bool:
        """Whether the rows that a sum adds up are divided among workers although it closes inside
        of other loops, which have too few elements for a machine: the weight's gradients of some
        examples. Each worker has a part of all sums then, and there is as much to divide as there
        are rows.
        """
        hint = {axis.name: axis.hint for axis in self.order}
        return (
            self.local.isdisjoint((*around, *op.axes))
            and self.depth_of[self.vector] > max(self.depth_of[axis] for axis in op.axes)
            and product(hint[axis] for axis in around) < self.machine.workers
            and product(hint[axis] for axis in self.region.varies[op.name]) <= self.machine.partial
        )

    def home(self, op: Op) -> int:
        """How many loops are open where what `op` looks at is an array."""
        common = self.region.varies[op.name] & self.region.varies[str(op.args[0])]
        return next(k for k, axis in enumerate(self.order) if axis.name not in common)

    def inside(self, axes: Iterable[str], depth: int) -> tuple[str, ...]:
        """The axes among these whose loops are not open yet, in loop order."""
        return tuple(
            a.name for a in self.order if a.name in set(axes) and self.depth_of[a.name] > depth
        )

    def accumulator(self, op: Op) -> Accumulator:
        closes = self.closes(op)
        return Accumulator(op, self.inside(self.region.varies[op.name], closes), closes == 0)

    def operands(self, value: str) -> list[str]:
        op = self.region.producer.get(value)
        if op is None or (op.fn == REGROUP and op.args[0] in self.arrays):
            return []
        return [arg for arg in op.args if isinstance(arg, str)]

    def closure(self, values: Iterable[str], known: frozenset[str]) -> list[str]:
        """What has to be computed for these values, in order, given what is known already."""
        wanted: set[str] = set()
        stack = list(values)
        while stack:
            value = stack.pop()
            if value not in wanted and value not in known:
                wanted.add(value)
                if value not in self.arrays:
                    stack.extend(self.operands(value))
        return [value for value in self.topological if value in wanted]

    def computed_here(self, value: str, depth: int) -> bool:
        """Whether a value is a body's own statement, so that all its later phases have it."""
        op = self.region.producer.get(value)
        if op and op.is_reduction:
            return self.closes(op) <= depth
        return self.level(self.region.varies[value]) <= depth

    def fits(self, axes: Iterable[str]) -> bool:
        """Whether an array over these axes leaves the rows their place in cache."""
        hints = {axis.name: axis.hint for axis in self.order}
        return product(hints[axis] for axis in axes) <= self.machine.kept
