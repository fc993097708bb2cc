"""Places every value of a region in a tree of loops, given their order.

Axes are put in one order, outermost first (axes.py). A value lives in the innermost loop among the
axes it varies over. A reduction is accumulated there and closes when the loop over the outermost
axis it reduces ends; whoever needs its result must therefore stand in a later loop over that axis.
So the body of a loop is a sequence of phases: the loops of phase 0, the reductions they close, the
loops of phase 1, and so on (`Scheduler.body`). Layer norm's backward is two phases over a row;
batch norm over rows in memory order is two phases over the whole tensor; layer norm's double
backward has three. What a later phase needs again it computes again from the inputs, which a row
that stays in cache makes cheap; only inner results that would need a reduction again, or a
transcendental function, are kept in arrays.

A reduction whose result still varies over axes inside the loop that it reduces (layer norm's
dgamma) accumulates into an array. Where that loop is parallel, every worker has an array of its own
and the arrays are combined in worker order: no atomics, the same bits from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normpass.backend.tree import (
    Access,
    Accumulate,
    Accumulator,
    Begin,
    Compute,
    Finish,
    Keep,
    Load,
    Loop,
    LoopAxis,
    Machine,
    Node,
    Recall,
    Regroup,
    Store,
)
from normpass.passes.region import REGROUP, Op, Region, product
from normpass.passes.vocabulary import COSTLY, EXPENSIVE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class _Effect:
    """Something a loop's body is there for: a store, an accumulation, or a value kept for later."""

    node: Store | Accumulate | Keep
    value: str
    axes: frozenset[str]


class Scheduler:
    """Places every value of a region in the tree of loops. See the module's text."""

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

    def plan(self) -> tuple[Node, ...]:
        effects = [
            _Effect(
                Store(output, self.accesses[output.buffer.name]),
                output.value,
                output.buffer.axes,
            )
            for output in self.region.outputs
        ]
        return tuple(self.body(0, effects, frozenset()))

    # -- where things live

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

    # -- one body

    def body(self, depth: int, effects: list[_Effect], known: frozenset[str]) -> list[Node]:
        """The nodes of the body that `depth` open loops enclose."""
        values = self.closure([effect.value for effect in effects], known)
        ready = self.phases(depth, values)
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
                _Effect(Accumulate(acc), operand, self.region.varies[operand]),
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

    def ahead(self, depth: int, effects: list[_Effect], known: frozenset[str]) -> list[_Effect]:
        """Values that would be computed for each element although they do not vary along some loop
        around the lanes (rstd of channels that are last in memory): once, in a nest of their own.
        """
        needed = self.closure([effect.value for effect in effects], known)
        uses = [(effect.value, effect.axes) for effect in effects]
        uses += [(arg, self.region.varies[v]) for v in needed for arg in self.operands(v)]
        found = dict.fromkeys(
            value
            for value, axes in uses
            if value in needed
            and value not in self.arrays
            and self.vector in self.region.varies[value]
            and not self.region.varies[value].issuperset(self.inside(axes, depth))
            and self.fits(self.inside(self.region.varies[value], depth))
            and self.is_costly(value, known)
        )
        return [
            _Effect(
                Keep(value, self.inside(self.region.varies[value], depth), shared=depth == 0),
                value,
                self.region.varies[value],
            )
            for value in found
        ]

    def is_costly(self, value: str, known: frozenset[str]) -> bool:
        """Whether a value takes longer to compute than to read, and needs no sums for it that are
        not there yet.
        """
        made = [self.region.producer.get(each) for each in self.closure([value], known)]
        ops = [op for op in made if op and op.name not in self.arrays]
        return any(op.fn in COSTLY for op in ops) and not any(
            op.is_reduction or op.fn == REGROUP for op in ops
        )

    def postponed(
        self, depth: int, todo: list[tuple[int, _Effect]], known: frozenset[str]
    ) -> list[tuple[int, _Effect]]:
        """Pointwise values summed for an outer loop wait for the last phase if that reads what they
        need anyway: the first phase waits for memory, the last one has its row in cache.
        """
        last = max(phase for phase, _ in todo)
        waits = [
            isinstance(effect.node, Accumulate)
            and self.closes(effect.node.accumulator.op) < depth < self.level(effect.axes)
            for _, effect in todo
        ]
        final = [e.value for (p, e), w in zip(todo, waits, strict=True) if p == last and not w]
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

    def begins(self, effect: _Effect, depth: int) -> list[Accumulator]:
        """The accumulator that an effect adds to, if this is the body in which it starts."""
        node = effect.node
        starts = isinstance(node, Accumulate) and self.closes(node.accumulator.op) == depth
        return [node.accumulator] if isinstance(node, Accumulate) and starts else []

    def remember(self, depth: int, node: Store | Accumulate | Keep) -> None:
        """After the loops of its phase, an array holds what was kept in them."""
        if isinstance(node, Keep) and self.inside(node.axes, depth) == node.axes:
            self.arrays[node.value] = Recall(node.value, node.axes, node.shared)

    def phases(self, depth: int, values: Sequence[str]) -> dict[str, int]:
        """The first phase of this body in whose loops each value can be used."""
        ready: dict[str, int] = {}
        for value in values:
            phase = max((ready.get(arg, 0) for arg in self.operands(value)), default=0)
            if value in self.arrays:
                phase = 0
            elif (op := self.region.producer.get(value)) and op.is_reduction:
                phase += self.closes(op) == depth
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

    def keeps(
        self,
        depth: int,
        todo: Sequence[tuple[int, _Effect]],
        ready: Mapping[str, int],
        known: frozenset[str],
    ) -> list[tuple[int, _Effect]]:
        """Values of earlier phases that a later one should read back rather than compute again."""
        kept: dict[str, tuple[int, _Effect]] = {}
        work = [(phase, effect.value) for phase, effect in todo]
        seen: set[tuple[int, str]] = set()
        while work:
            phase, value = work.pop()
            if (phase, value) in seen or value in known or value in self.arrays:
                continue
            seen.add((phase, value))
            if self.computed_here(value, depth):
                continue
            axes = self.inside(self.region.varies[value], depth)
            if ready.get(value, 0) < phase and axes and self.worth_keeping(value, axes, depth):
                if self.region.producer[value].fn in EXPENSIVE:
                    value = self.stands_for(value, depth, phase, todo, ready, known)
                keep = Keep(value, axes, shared=depth == 0)
                kept[value] = (ready[value], _Effect(keep, value, self.region.varies[value]))
                phase = ready[value]
            work += [(phase, operand) for operand in self.operands(value)]
        return list(kept.values())

    def stands_for(
        self,
        value: str,
        depth: int,
        phase: int,
        todo: Sequence[tuple[int, _Effect]],
        ready: Mapping[str, int],
        known: frozenset[str],
    ) -> str:
        """What a phase reads back instead of a value: the last one that an earlier phase computes
        from it, over the same axes, and that is all this phase needs it for.
        """
        axes = self.inside(self.region.varies[value], depth)
        later = [effect.value for p, effect in todo if p == phase]
        before = self.closure([e.value for p, e in todo if p < phase], known)
        for candidate in reversed(before):
            op = self.region.producer.get(candidate)
            if (
                op
                and not op.is_reduction
                and ready[candidate] == ready[value]
                and self.inside(self.region.varies[candidate], depth) == axes
                and value in self.closure([candidate], known)
                and value not in self.closure(later, known | {candidate})
            ):
                return candidate
        return value

    def computed_here(self, value: str, depth: int) -> bool:
        """Whether a value is a body's own statement, so that all its later phases have it."""
        op = self.region.producer.get(value)
        if op and op.is_reduction:
            return self.closes(op) <= depth
        return self.level(self.region.varies[value]) <= depth

    def worth_keeping(self, value: str, axes: tuple[str, ...], depth: int) -> bool:
        op = self.region.producer.get(value)
        if op is None:
            return False
        if value in self.regrouped:
            return self.regrouped[value] == depth
        if op.is_reduction:
            return self.closes(op) > depth
        return depth > 0 and op.fn in EXPENSIVE and self.fits(axes)

    def fits(self, axes: Iterable[str]) -> bool:
        """Whether an array over these axes leaves the rows their place in cache."""
        hints = {axis.name: axis.hint for axis in self.order}
        return product(hints[axis] for axis in axes) <= self.machine.kept

    def loops(self, depth: int, effects: list[_Effect], known: frozenset[str]) -> list[Node]:
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
