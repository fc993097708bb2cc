"""From a region to a kernel plan: which loops, in which order, and what each of them computes.

A plan is a tree. Its leaves load, compute, accumulate and store; its inner nodes are loops over one
axis each. Every generator prints this tree, and none of them decides anything about dependences.

How the tree comes about. Axes are put in one order, outermost first (`choose_order`). A value lives in
the innermost loop among the axes it varies over. A reduction is accumulated there and closes when the
loop over the outermost axis it reduces ends; whoever needs its result must therefore stand in a later
loop over that axis. So the body of a loop is a sequence of phases: the loops of phase 0, the reductions
they close, the loops of phase 1, and so on (`_Scheduler.body`). Layer norm's backward is two phases
over a row; batch norm over rows in memory order is two phases over the whole tensor; layer norm's double
backward has three. What a later phase needs again it computes again from the inputs, which a row that
stays in cache makes cheap; only inner results that would need a reduction again, or a transcendental
function, are kept in arrays.

A reduction whose result still varies over axes inside the loop that it reduces (layer norm's dgamma)
accumulates into an array. Where that loop is parallel, every worker has an array of its own and the
arrays are combined in worker order: no atomics, the same bits from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import sympy

from normpass.passes.region import Axis, Buffer, Op, Output, Region, product

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# An extent that is only known at run time counts as this many elements in decisions.
ASSUMED_EXTENT = 1024
# Functions that are dearer to compute again than to read back from cache.
EXPENSIVE = frozenset(
    "exp expm1 log log1p pow tanh erf erfc sin cos sigmoid lgamma digamma asin acos atan sinh cosh".split()
)


@dataclass(frozen=True)
class Machine:
    """What a plan has to know of the machine it is for.

    workers: fewer independent pieces of work than this do not fill it.
    kept: kept rows beyond this many elements would push the row itself out of cache.
    """

    workers: int
    kept: int


CPU = Machine(workers=8, kept=64 * 1024)
# Memory between phases is dearer than any function there; what fits in registers is not computed twice anyway.
GPU = Machine(workers=256, kept=0)


@dataclass(frozen=True)
class LoopAxis:
    """An axis of the plan: one of the region's, or several of them that are one in memory."""

    name: str
    extent: sympy.Expr
    parts: tuple[str, ...]

    @property
    def hint(self) -> int:
        """The extent, or an assumed one, for decisions."""
        return int(self.extent.subs(dict.fromkeys(self.extent.free_symbols, ASSUMED_EXTENT)))


@dataclass(frozen=True)
class Access:
    """How a tensor is addressed: elements between neighbours along each axis of the plan."""

    buffer: Buffer
    strides: Mapping[str, sympy.Expr]


@dataclass(frozen=True)
class Accumulator:
    """What a reduction adds up in. `axes` is empty for a register.

    shared: the loop it closes at is the parallel one, so each worker needs its own and the results are
    combined afterwards.
    """

    op: Op
    axes: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Load:
    """value = tensor[...]"""

    access: Access


@dataclass(frozen=True)
class Compute:
    """value = fn(args), pointwise."""

    op: Op


@dataclass(frozen=True)
class Begin:
    """Sets an accumulator to its neutral element."""

    accumulator: Accumulator


@dataclass(frozen=True)
class Accumulate:
    """Adds a value to an accumulator."""

    accumulator: Accumulator


@dataclass(frozen=True)
class Finish:
    """Makes an accumulator's content a value: combines lanes, and workers where it is shared."""

    accumulator: Accumulator


@dataclass(frozen=True)
class Keep:
    """Writes a value to a worker's own array, for a later phase."""

    value: str
    axes: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Recall:
    """Reads a value back from an array: a kept one, or an accumulated one."""

    value: str
    axes: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Store:
    """tensor[...] = value"""

    output: Output
    access: Access


@dataclass(frozen=True)
class Loop:
    """A loop over one axis."""

    axis: LoopAxis
    body: tuple[Node, ...]
    parallel: bool = False


Leaf = Load | Compute | Begin | Accumulate | Finish | Keep | Recall | Store
Node = Leaf | Loop


@dataclass(frozen=True)
class Plan:
    """What a generator prints.

    region: the region, its reductions split where the loops need it.
    axes: the loops' axes, outermost first.
    vector: the axis along which lanes run.
    local: the axes that inner reductions reduce; one worker owns them unless the first of `axes` is one.
    body: the tree.
    """

    region: Region
    axes: tuple[LoopAxis, ...]
    vector: str
    local: frozenset[str]
    body: tuple[Node, ...]
    numel: Mapping[str, sympy.Expr] = field(default_factory=dict)

    @property
    def axis(self) -> dict[str, LoopAxis]:
        return {axis.name: axis for axis in self.axes}

    @property
    def row_elements(self) -> int:
        """Elements that one worker has before it between two phases, by hints."""
        return product(a.hint for a in self.axes if a.name in self.local)


def make_plan(region: Region, machine: Machine = CPU) -> Plan:
    """The plan of a region, from its text and the kind of machine alone: the same in every process."""
    region, axes, accesses, numel = _coalesce(region)
    local = local_axes(region)
    vector = choose_vector(axes, accesses)
    order = choose_order(axes, accesses, local, vector, machine.workers)
    region = _split_reductions(region, order)
    body = _Scheduler(region, order, accesses, machine).plan()
    return Plan(region, order, vector, local, body, numel)


# ---- axes


def _coalesce(
    region: Region,
) -> tuple[Region, tuple[LoopAxis, ...], dict[str, Access], dict[str, sympy.Expr]]:
    """Merges axes that are neighbours in every tensor and reduced together: fewer, longer loops.

    Returns the region over the merged axes, those, how each tensor is addressed (outputs under the name of their
    buffer), and what each `numel` value is.
    """
    symbols = {
        name: sympy.Symbol(name, integer=True, positive=True) for name in region.runtime_sizes
    }
    extent = {a.name: sympy.sympify(symbols.get(a.name, a.extent)) for a in region.axes}
    buffers = [*region.inputs, *(output.buffer for output in region.outputs)]
    strides = {buffer.name: _axis_strides(buffer, extent, symbols) for buffer in buffers}
    numel = {
        op.name: sympy.sympify(product(extent[axis] for axis in op.axes))
        for op in region.ops
        if op.fn == "numel"
    }
    groups = [op.axes for op in region.ops if op.is_reduction]
    axes = {axis: (axis,) for axis in extent}

    def mergeable(outer: str, inner: str) -> bool:
        together = all((outer in group) == (inner in group) for group in groups)
        return together and all(
            (outer in step) == (inner in step)
            and (outer not in step or step[outer] == step[inner] * extent[inner])
            for step in strides.values()
        )

    while pair := next(((a, b) for a in axes for b in axes if a != b and mergeable(a, b)), None):
        outer, inner = pair
        both = f"{outer}_{inner}"
        extent[both] = extent.pop(outer) * extent.pop(inner)
        axes[both] = axes.pop(outer) + axes.pop(inner)
        for step in strides.values():
            if inner in step:
                del step[outer]
                step[both] = step.pop(inner)
        groups = [_merge(group, outer, inner, both) for group in groups]
    merged = tuple(LoopAxis(name, extent[name], parts) for name, parts in axes.items())
    accesses = {b.name: Access(b, strides[b.name]) for b in buffers}
    return _over(region, groups, accesses), merged, accesses, numel


def _merge(group: tuple[str, ...], outer: str, inner: str, both: str) -> tuple[str, ...]:
    return tuple(both if axis == outer else axis for axis in group if axis != inner)


def _over(
    region: Region, groups: Sequence[tuple[str, ...]], accesses: Mapping[str, Access]
) -> Region:
    """The region over merged axes, given those of its reductions. Its tensors' dimensions are the loops'
    axes; where elements lie is in the accesses alone."""

    def flat(buffer: Buffer) -> Buffer:
        return replace(
            buffer, dims=tuple((a,) for a in accesses[buffer.name].strides), strides=None
        )

    reduced = iter(groups)
    return replace(
        region,
        inputs=tuple(flat(buffer) for buffer in region.inputs),
        ops=tuple(replace(op, axes=next(reduced) if op.is_reduction else ()) for op in region.ops),
        outputs=tuple(Output(flat(output.buffer), output.value) for output in region.outputs),
    )


def _axis_strides(
    buffer: Buffer, extent: Mapping[str, sympy.Expr], symbols: Mapping[str, sympy.Symbol]
) -> dict[str, sympy.Expr]:
    """Elements between neighbours along every axis over which a tensor varies."""
    steps: dict[str, sympy.Expr] = {}
    contiguous: sympy.Expr = sympy.Integer(1)
    for k in reversed(range(len(buffer.dims))):
        if buffer.strides is None:
            step = contiguous
        else:
            stride = buffer.strides[k]
            step = symbols[stride] if isinstance(stride, str) else sympy.Integer(stride)
        for axis in reversed(buffer.dims[k]):
            if step != 0:
                steps[axis] = step
            step = step * extent[axis]
            contiguous = contiguous * extent[axis]
    return steps


def local_axes(region: Region) -> frozenset[str]:
    """Axes that some reduction reduces whose result meets a value that varies over them again."""
    behind: dict[str, frozenset[str]] = {}  # the axes reduced on the way to each value
    local: set[str] = set()
    for op in region.ops:
        args = [arg for arg in op.args if isinstance(arg, str)]
        reduced = frozenset().union(*(behind.get(arg, frozenset()) for arg in args))
        if not op.is_reduction:
            local |= reduced & region.varies[op.name]
        behind[op.name] = reduced | (set(op.axes) if op.is_reduction else set())
    for output in region.outputs:
        local |= behind.get(output.value, frozenset()) & output.buffer.axes
    return frozenset(local)


def choose_vector(axes: Sequence[LoopAxis], accesses: Mapping[str, Access]) -> str:
    """The axis along which most elements are neighbours in memory."""
    hint = {axis.name: axis.hint for axis in axes}
    score = dict.fromkeys(hint, 0)
    for access in accesses.values():
        for axis, stride in access.strides.items():
            if stride == 1:
                score[axis] += product(hint[a] for a in access.strides)
    return max(score, key=lambda axis: score[axis])


def choose_order(
    axes: Sequence[LoopAxis],
    accesses: Mapping[str, Access],
    local: frozenset[str],
    vector: str,
    workers: int,
) -> tuple[LoopAxis, ...]:
    """Outermost first: parallel axes, then local ones, each by falling stride.

    Where the parallel axes alone are too little work for a machine, or are only the lanes, the local axes
    go outside: two phases over memory with partial results in between.
    """
    widest = max(accesses.values(), key=lambda access: len(access.strides))

    def stride(axis: LoopAxis) -> int:
        step = sympy.sympify(widest.strides.get(axis.name, 0))
        return int(step.subs(dict.fromkeys(step.free_symbols, ASSUMED_EXTENT)))

    outer = sorted((a for a in axes if a.name not in local), key=stride, reverse=True)
    inner = sorted((a for a in axes if a.name in local), key=stride, reverse=True)
    pieces = product(a.hint for a in outer if a.name != vector)
    only_lanes = [a.name for a in outer] == [vector]
    if inner and (only_lanes or (pieces < workers and inner[0].name != vector)):
        return (inner[0], *outer, *inner[1:])
    return (*outer, *inner)


def _split_reductions(region: Region, order: Sequence[LoopAxis]) -> Region:
    """Splits a reduction in two where its innermost axes can close in a register before the rest
    accumulates in an array (group norm's dgamma: over pixels first, then over the batch)."""
    index = {axis.name: k for k, axis in enumerate(order)}
    ops: list[Op] = []
    for op in region.ops:
        if op.is_reduction:
            kept = [index[axis] for axis in region.varies[op.name]]
            first = min(index[axis] for axis in op.axes)
            deepest = max((k for k in kept if k > first), default=-1)
            near = tuple(axis for axis in op.axes if deepest >= 0 and index[axis] > deepest)
            if near:
                ops.append(Op(f"{op.name}_{'_'.join(near)}", op.fn, op.args, near))
                far = tuple(axis for axis in op.axes if axis not in near)
                op = Op(op.name, op.fn, (ops[-1].name,), far)
        ops.append(op)
    return replace(region, ops=tuple(ops))


# ---- the tree


@dataclass(frozen=True)
class _Effect:
    """Something a loop's body is there for: a store, an accumulation, or a value kept for later."""

    node: Store | Accumulate | Keep
    value: str
    axes: frozenset[str]


class _Scheduler:
    """Places every value of a region in the tree of loops. See the module's text."""

    def __init__(
        self,
        region: Region,
        order: Sequence[LoopAxis],
        accesses: Mapping[str, Access],
        machine: Machine,
    ) -> None:
        self.region = region
        self.order = order
        self.accesses = accesses
        self.machine = machine
        self.depth_of = {axis.name: k + 1 for k, axis in enumerate(order)}
        self.inputs = tuple(buffer.name for buffer in region.inputs)
        self.topological = [*self.inputs, *(op.name for op in region.ops)]
        self.arrays: dict[str, Recall] = {}

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
        """How many loops are open where a reduction's result is complete: those outside of all that it
        reduces. Loops that what it adds up does without are not among them: its nest skips them."""
        first = min(self.depth_of[axis] for axis in op.axes)
        varies = self.region.varies[str(op.args[0])]
        return max((d for axis in varies if (d := self.depth_of[axis]) < first), default=0)

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
        return [arg for arg in op.args if isinstance(arg, str)] if op else []

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
            nodes += [Begin(e.node.accumulator) for e in current if self.begins(e, depth)]
            shallow = [e for e in current if self.level(e.axes) <= depth]
            nodes += [e.node for e in shallow]
            nodes += self.loops(depth, [e for e in current if e not in shallow], frozenset(here))
            for effect in current:
                self.remember(depth, effect.node)
        self.arrays = outside  # what this body's arrays hold means nothing outside of it
        return nodes

    def postponed(
        self, depth: int, todo: list[tuple[int, _Effect]], known: frozenset[str]
    ) -> list[tuple[int, _Effect]]:
        """Pointwise values summed for an outer loop wait for the last phase if that reads what they need anyway: the first
        phase waits for memory, the last one has its row in cache."""
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

    def begins(self, effect: _Effect, depth: int) -> bool:
        node = effect.node
        return isinstance(node, Accumulate) and self.closes(node.accumulator.op) == depth

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
        return Compute(self.region.producer[value])

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
                keep = Keep(value, axes, shared=depth == 0)
                kept[value] = (ready[value], _Effect(keep, value, self.region.varies[value]))
                phase = ready[value]
            work += [(phase, operand) for operand in self.operands(value)]
        return list(kept.values())

    def computed_here(self, value: str, depth: int) -> bool:
        """Whether a value is one of a body's own statements, so that all its later phases have it."""
        op = self.region.producer.get(value)
        if op and op.is_reduction:
            return self.closes(op) <= depth
        return self.level(self.region.varies[value]) <= depth

    def worth_keeping(self, value: str, axes: tuple[str, ...], depth: int) -> bool:
        op = self.region.producer.get(value)
        if op is None:
            return False
        if op.is_reduction:
            return self.closes(op) > depth
        hints = {axis.name: axis.hint for axis in self.order}
        return (
            depth > 0
            and op.fn in EXPENSIVE
            and product(hints[axis] for axis in axes) <= self.machine.kept
        )

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
