"""The axes of a plan: which of the region's are one in memory, which are local, and the order of
the loops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import sympy

from normpass.backend.program.sizes import Sizes, symbol
from normpass.backend.program.tree import Access, LoopAxis
from normpass.passes.region import REGROUP, Buffer, Op, Output, Region, product

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass

# A sum over this many elements is added up on its own before it joins others: the price, one number
# for all lanes, is small then.
LONG = 512


def coalesce(
    region: Region, classes: Sequence[SizeClass] = ()
) -> tuple[Region, tuple[LoopAxis, ...], dict[str, Access], dict[str, sympy.Expr]]:
    """Merges axes that are neighbours in every tensor and reduced together: fewer, longer loops.

    classes: those of its run-time sizes, if they are known.
    Returns the region over the merged axes, those, how each tensor is addressed (outputs under the
    name of their buffer), and what each `numel` value is.
    """
    symbols = {name: symbol(name) for name in region.runtime_sizes}
    sizes = Sizes.of(region, classes)
    extent = {a.name: sympy.sympify(symbols.get(a.name, a.extent)) for a in region.axes}
    buffers = [*region.inputs, *(output.buffer for output in region.outputs)]
    strides = {buffer.name: _axis_strides(buffer, extent, symbols) for buffer in buffers}
    numel = {
        op.name: sympy.sympify(product(extent[axis] for axis in op.axes))
        for op in region.ops
        if op.fn == "numel"
    }
    groups = [op.axes for op in region.ops if op.is_reduction]
    axes: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in extent}

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
    merged = tuple(
        LoopAxis(name, extent[name], parts, sizes.most(extent[name]), sizes.divisor(extent[name]))
        for name, parts in axes.items()
    )
    accesses = {b.name: Access(b, strides[b.name], sizes) for b in buffers}
    return _over(region, groups, accesses), merged, accesses, numel


def _merge(group: tuple[str, ...], outer: str, inner: str, both: str) -> tuple[str, ...]:
    return tuple(both if axis == outer else axis for axis in group if axis != inner)


def _over(
    region: Region, groups: Sequence[tuple[str, ...]], accesses: Mapping[str, Access]
) -> Region:
    """The region over merged axes, given those of its reductions. Its tensors' dimensions are the
    loops' axes; where elements lie is in the accesses alone.
    """

    def flat(buffer: Buffer) -> Buffer:
        outermost_first = reversed(list(accesses[buffer.name].strides))
        return replace(buffer, dims=tuple((axis,) for axis in outermost_first), strides=None)

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


def choose_vector(
    region: Region, axes: Sequence[LoopAxis], accesses: Mapping[str, Access], machine: Machine
) -> str:
    """The axis along which most elements are neighbours in memory, or every second of them where
    two take turns. Where large tensors differ in that, one whose sums are needed again, if there is
    such: they add up in registers then, of rows that go together (rows.py).
    """
    hint = {axis.name: axis.hint for axis in axes}
    score = dict.fromkeys(hint, 0)
    largest = max((_elements(access, hint) for access in accesses.values()), default=1)
    of_large: set[str] = set()
    for access in accesses.values():
        for axis, stride in access.strides.items():
            if stride == 1 or (stride == 2 and 1 not in access.strides.values()):
                score[axis] += _elements(access, hint)
                of_large |= {axis} if 2 * _elements(access, hint) > largest else set()
    local = of_large & local_axes(region)
    candidates = local if machine.has_vectors and len(of_large) > 1 and local else hint
    return max(candidates, key=lambda axis: score[axis])


def has_crossed_rows(accesses: Mapping[str, Access], vector: str) -> bool:
    """Whether some tensor has rows side by side and their elements far apart."""
    return any(
        vector in access.strides and access.strides[vector] != 1 and 1 in access.strides.values()
        for access in accesses.values()
    )


def _elements(access: Access, hint: Mapping[str, int]) -> int:
    return product(hint[axis] for axis in access.strides)


def choose_order(
    region: Region,
    axes: Sequence[LoopAxis],
    accesses: Mapping[str, Access],
    vector: str,
    machine: Machine,
) -> tuple[LoopAxis, ...]:
    """Outermost first: parallel axes, then local ones, each by falling stride; of the parallel ones
    those last whose sums would be too large for every worker to have a part of.

    Where the parallel axes alone are too little work for a machine, or are only the lanes, the
    local axes go outside: two phases over memory with partial results in between.
    """
    local = local_axes(region)
    if any(op.fn == REGROUP for op in region.ops):
        local |= {vector}  # the lanes of whole groups stay inside of what their sums run over
    widest = max(accesses.values(), key=lambda access: len(access.strides))

    def stride(axis: LoopAxis) -> int:
        return widest.step(axis.name)

    outer = sorted((a for a in axes if a.name not in local), key=stride, reverse=True)
    late = _added_up_last(region, axes, outer, vector, machine)
    outer.sort(key=lambda axis: axis.name in late)
    inner = sorted((a for a in axes if a.name in local), key=stride, reverse=True)
    inner.sort(key=lambda axis: not axis.outermost)
    pieces = product(a.hint for a in outer if a.name != vector)
    if machine.columns and inner and vector not in local:
        return (*outer, *inner)
    only_lanes = [a.name for a in outer] == [vector]
    if inner and only_lanes and machine.blocking and outer[0].hint > machine.blocking.narrow:
        return (*inner, *outer)  # a row at a time
    few = pieces < machine.workers and inner and inner[0].name != vector
    if inner and (only_lanes or few or inner[0].outermost):
        return (inner[0], *outer, *inner[1:])
    return (*outer, *inner)


def _added_up_last(
    region: Region,
    axes: Sequence[LoopAxis],
    outer: Sequence[LoopAxis],
    vector: str,
    machine: Machine,
) -> set[str]:
    """The parallel axes that a sum runs over and whose loops belong inside of those that it varies
    over (a bias of all images' scores): there it is complete after them, a row at a time.
    """
    hint = {axis.name: axis.hint for axis in axes}
    parallel = {axis.name for axis in outer}
    late: set[str] = set()
    for op in region.ops:
        sums = region.varies[op.name] & hint.keys()
        kept = sums & parallel
        if (
            op.is_reduction
            and vector not in parallel
            and product(hint[axis] for axis in sums) > machine.partial
            and product(hint[axis] for axis in kept) >= machine.workers
        ):
            late |= set(op.axes) & parallel
    return late


def _long_last(op: Op, order: Sequence[LoopAxis]) -> tuple[str, ...]:
    """The innermost of several axes of a sum, if its elements are many, or those of a block: how
    often something is added to an array is counted in steps of the loop outside.
    """
    reduced = [axis for axis in order if axis.name in op.axes]
    if op.fn != "sum" or len(reduced) < 2:
        return ()
    last = reduced[-1]
    return (last.name,) if last.hint >= LONG or last.blocks in op.axes else ()


def split_reductions(region: Region, order: Sequence[LoopAxis]) -> Region:
    """Splits a reduction in two where its innermost axes can close in a register before the rest
    accumulates in an array (group norm's dgamma: over pixels first, then over the batch), and
    where the last of several axes is long: sums of sums lose fewer digits.
    """
    index = {axis.name: k for k, axis in enumerate(order)}
    ops: list[Op] = []
    for op in region.ops:
        if op.is_reduction:
            kept = [index[axis] for axis in region.varies[op.name]]
            first = min(index[axis] for axis in op.axes)
            deepest = max((k for k in kept if k > first), default=-1)
            near = tuple(axis for axis in op.axes if deepest >= 0 and index[axis] > deepest)
            near = near or _long_last(op, order)
            if near:
                ops.append(Op(f"{op.name}_{'_'.join(near)}", op.fn, op.args, near))
                far = tuple(axis for axis in op.axes if axis not in near)
                op = Op(op.name, op.fn, (ops[-1].name,), far)
        ops.append(op)
    return replace(region, ops=tuple(ops))
