"""Places every value of a region in a tree of loops, given their order.

Axes are put in one order, outermost first (axes.py). A value lives in the innermost loop among the
axes it varies over. A reduction is accumulated there and closes when the loop over the outermost
axis it reduces ends; whoever needs its result must therefore stand in a later loop over that axis.
So the body of a loop is a sequence of phases: the loops of phase 0, the reductions they close, the
loops of phase 1, and so on (`Scheduler.body`). Layer norm's backward is two phases over a row;
batch norm over rows in memory order is two phases over the whole tensor; layer norm's double
backward has three. What a later phase needs again it computes again from the inputs, which a row
that stays in cache makes cheap; only what would take long is kept in arrays (arrays.py).

A reduction whose result still varies over axes inside the loop that it reduces (layer norm's
dgamma) accumulates into an array. Where that loop is parallel, every worker has an array of its own
and the arrays are combined in worker order: no atomics, the same bits from run to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.program.arrays import Arrays, Effect
from normpass.backend.program.tree import (
    Accumulate,
    Accumulator,
    Begin,
    Compute,
    Finish,
    Keep,
    Load,
    Loop,
    Node,
    Recall,
    Regroup,
    Store,
)
from normpass.passes.region import REGROUP, Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Scheduler(Arrays):
    """Places every value of a region in the tree of loops. See the module's text."""

    def plan(self) -> tuple[Node, ...]:
        effects = [
            Effect(
                Store(output, self.accesses[output.buffer.name]),
                output.value,
                output.buffer.axes,
            )
            for output in self.region.outputs
        ]
        return tuple(self.body(0, effects, frozenset()))

    def body(self, depth: int, effects: list[Effect], known: frozenset[str]) -> list[Node]:
        """The nodes of the body that `depth` open loops enclose."""
        values = self.closure([effect.value for effect in effects], known)
        ready = self.phases(depth, values, self.delays(depth, values, effects))
        closing = [
            self.accumulator(op)
            for value in values
            if (op := self.region.producer.get(value))
            and op.is_reduction
            and value not in self.arrays
            and self.closes(op) == depth
        ]
        todo = [(ready.get(e.value, 0), e) for e in effects]
        todo += [
            (
                ready[acc.op.name] - 1,
                Effect(Accumulate(acc), operand, self.region.varies[operand]),
            )
            for acc in closing
            for operand in self.operands(acc.op.name)
        ]
        todo = self.postponed(depth, todo, known)
        todo += self.keeps(depth, todo, ready, known)

        nodes: list[Node] = []
        here = set(known)
        outside = dict(self.arrays)
        for phase in range(max((p for p, _ in todo), default=0) + 1):
            nodes += self.statements(depth, phase, values, ready, here)
            current = [effect for p, effect in todo if p == phase]
            nodes += [Begin(accumulator) for e in current for accumulator in self.begins(e, depth)]
            shallow = [e for e in current if self.level(e.axes) <= depth]
            nodes += [e.node for e in shallow]
            deep = [e for e in current if e not in shallow]
            if ahead := self.ahead(depth, deep, frozenset(here)):
                axis = self.order[depth].name
                ahead += [e for e in deep if axis not in e.axes]
                deep = [e for e in deep if axis in e.axes]
                nodes += self.loops(depth, ahead, frozenset(here))
                for effect in ahead:
                    self.remember(depth, effect.node)
            nodes += self.loops(depth, deep, frozenset(here))
            for effect in current:
                self.remember(depth, effect.node)
        self.arrays = outside  # what this body's arrays hold means nothing outside of it
        return nodes

    def postponed(
        self, depth: int, todo: list[tuple[int, Effect]], known: frozenset[str]
    ) -> list[tuple[int, Effect]]:
        """Pointwise values summed for an outer loop wait for the last phase if that reads what they
        need anyway: the first phase waits for memory, the last one has its row in cache.
        """
        last = max(phase for phase, _ in todo)
        waits = [
            isinstance(effect.node, Accumulate)
            and self.closes(effect.node.accumulator.op) < depth < self.level(effect.axes)
            for _, effect in todo
        ]
        final = [
            effect.value
            for (phase, effect), wait in zip(todo, waits, strict=True)
            if phase == last and not wait and self.level(effect.axes) > depth
        ]
        read = set(self.closure(final, known))
        return [
            (last, e) if w and self.needs_only(e.value, read, known) else (p, e)
            for (p, e), w in zip(todo, waits, strict=True)
        ]

    def needs_only(self, value: str, read: set[str], known: frozenset[str]) -> bool:
        """Whether a value is pointwise in inputs among these."""
        needs = self.closure([value], known)
        reduced = any(
            n in self.region.producer and self.region.producer[n].is_reduction for n in needs
        )
        return not reduced and read.issuperset(n for n in needs if n in self.inputs)

    def begins(self, effect: Effect, depth: int) -> list[Accumulator]:
        """The accumulator that an effect adds to, if this is the body in which it starts."""
        node = effect.node
        starts = isinstance(node, Accumulate) and self.closes(node.accumulator.op) == depth
        return [node.accumulator] if isinstance(node, Accumulate) and starts else []

    def remember(self, depth: int, node: Store | Accumulate | Keep) -> None:
        """After the loops of its phase, an array holds what was kept in them."""
        if isinstance(node, Keep) and self.inside(node.axes, depth) == node.axes:
            self.arrays[node.value] = Recall(node.value, node.axes, node.shared)

    def delays(
        self, depth: int, values: Sequence[str], effects: Sequence[Effect]
    ) -> dict[str, int]:
        """The phases of sums that could be added up earlier, in loops of their own, and wait for
        another sum that reads all that they read: nothing comes later for it, and memory is gone
        over once less.
        """
        delays: dict[str, int] = {}
        ready = self.phases(depth, values, delays)
        reads = {
            value: self.read_for(value, depth, values)
            for value in values
            if (op := self.region.producer.get(value)) and op.is_reduction
            if value not in self.arrays and self.closes(op) == depth
        }
        for value, mine in reads.items():
            latest = max(ready[other] for other, read in reads.items() if mine <= read)
            beside = (r for o, r in reads.items() if o != value and ready[o] == ready[value])
            if not mine or latest == ready[value] or any(mine & read for read in beside):
                continue
            later = self.phases(depth, values, {**delays, value: latest - 1})
            if all(later[effect.value] <= max(ready.values()) for effect in effects):
                delays[value] = latest - 1
                ready = later
        return delays

    def read_for(self, value: str, depth: int, values: Sequence[str]) -> set[str]:
        """The tensors that the loops for a sum read, besides what stands in the body itself; none
        if they add up sums of their own.
        """
        known = frozenset(each for each in values if self.computed_here(each, depth))
        needed = self.closure(self.operands(value), known)
        ops = [self.region.producer[each] for each in needed if each in self.region.producer]
        if any(op.is_reduction for op in ops):
            return set()
        return {each for each in needed if each in self.inputs}

    def phases(
        self, depth: int, values: Sequence[str], delays: Mapping[str, int]
    ) -> dict[str, int]:
        """The first phase of this body in whose loops each value can be used. delays: the first
        phases in which sums are added up.
        """
        ready: dict[str, int] = {}
        for value in values:
            phase = max((ready.get(arg, 0) for arg in self.operands(value)), default=0)
            if value in self.arrays:
                phase = 0
            elif (op := self.region.producer.get(value)) and op.is_reduction:
                phase = max(phase, delays.get(value, 0)) + (self.closes(op) == depth)
            elif op and op.fn == REGROUP:
                (source,) = self.operands(value) or (None,)
                if source and not self.computed_here(source, depth):
                    phase += self.regrouped[source] == depth
            ready[value] = phase
        return ready

    def statements(
        self,
        depth: int,
        phase: int,
        values: Sequence[str],
        ready: Mapping[str, int],
        here: set[str],
    ) -> list[Node]:
        """Values that live in this body itself and are due before the loops of a phase."""
        nodes: list[Node] = []
        for value in values:
            if ready[value] != phase or value in here:
                continue
            op = self.region.producer.get(value)
            if op and op.is_reduction and value not in self.arrays:
                if self.closes(op) == depth:
                    nodes.append(self.finish(op, here))
            elif self.level(self.region.varies[value]) <= depth:
                nodes.append(self.leaf(value))
                here.add(value)
        return nodes

    def finish(self, op: Op, here: set[str]) -> Finish:
        accumulator = self.accumulator(op)
        if accumulator.axes:
            self.arrays[op.name] = Recall(op.name, accumulator.axes, accumulator.shared)
        else:
            here.add(op.name)
        return Finish(accumulator)

    def leaf(self, value: str) -> Node:
        if value in self.arrays:
            return self.arrays[value]
        if value in self.inputs:
            return Load(self.accesses[value])
        op = self.region.producer[value]
        if op.fn == REGROUP:
            return Regroup(op, self.arrays[str(op.args[0])])
        return Compute(op)

    def loops(self, depth: int, effects: list[Effect], known: frozenset[str]) -> list[Node]:
        """The loops over the next axis for one phase, and the nests that do without that axis."""
        if not effects:
            return []
        axis = self.order[depth]
        over = [e for e in effects if axis.name in e.axes]
        rest = [e for e in effects if axis.name not in e.axes]
        nodes: list[Node] = []
        if over:
            body = self.body(depth + 1, over, known)
            nodes.append(Loop(axis, tuple(body), parallel=depth == 0))
        if rest:
            nodes += self.body(depth + 1, rest, known)
        return nodes
