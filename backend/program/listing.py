"""A program as text that people read: its loops and launches, how each goes, and what stands in
them. Snapshots hold it, and NORMPASS_DEBUG writes it beside the kernels.

    program rms_norm  r=r c=64, lanes along c
    for r, divided among workers, 4 rows at a time
        begin   power = sum[c]
        for c, a vector at a time
            load    x[r*64 c]
            square  = mul(x, x)
            add     square to power
        finish  power
        ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.program.tree import (
    Abreast,
    Accumulate,
    Allocate,
    Begin,
    Compute,
    Finish,
    Jam,
    Keep,
    Lanes,
    Load,
    Loop,
    Recall,
    Regroup,
    Staged,
    Store,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import sympy

    from normpass.backend.program.tree import (
        Accumulator,
        Kind,
        Launch,
        Leaf,
        LoopAxis,
        Node,
        Plan,
        Workspace,
    )


def listing(plan: Plan) -> str:
    """The program, a line for each loop and each node in it."""
    extents = " ".join(map(_extent, plan.axes))
    lines = [f"program {plan.region.name}  {extents}, lanes along {plan.vector}"]
    if plan.launches:
        for k, launch in enumerate(plan.launches):
            lines += [_launch(k, launch), *_indented(_nodes((*launch.scalars, *launch.body)))]
    else:
        lines += _nodes(plan.body)
    return "\n".join(lines)


def _extent(axis: LoopAxis) -> str:
    known = f"<={axis.most}" if axis.most is not None and not axis.extent.is_number else ""
    return f"{axis.name}={axis.extent}{known}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"    {line}"


def _nodes(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Loop):
            yield ", ".join([f"for {node.axis.name}", *_manner(node)])
            yield from _indented(_nodes(node.body))
        else:
            yield _leaf(node)


def _manner(loop: Loop) -> list[str]:
    """How a loop goes."""
    return [*(["divided among workers"] if loop.parallel else []), *_kind(loop.kind)]


def _kind(kind: Kind | None) -> list[str]:
    match kind:
        case Lanes(unrolled, aligned):
            found = ["a vector at a time"]
            found += ["unrolled"] if unrolled else []
            return found + ([f"aligned to {aligned.buffer.name}"] if aligned else [])
        case Jam(rows):
            return [f"{rows} rows at a time"]
        case Staged():
            return ["the next blocks fetched meanwhile"]
        case Abreast():
            return ["as many rows at a time as there are lanes"]
    return []


def _leaf(node: Leaf) -> str:
    match node:
        case Load(access, ahead):
            text = f"load    {access.buffer.name}{_strides(access.strides)}"
            if ahead is None:
                return text
            return f"{text}, ahead {ahead.elements}{' * lanes' if ahead.lanes else ''}"
        case Compute(op):
            return str(op)
        case Store(output, access, apart):
            text = f"store   {output.buffer.name}{_strides(access.strides)} = {output.value}"
            return f"{text}, apart" if apart else text
        case Begin(accumulator):
            return f"begin   {_accumulator(accumulator)}"
        case Accumulate(accumulator):
            return f"add     {accumulator.operand} to {accumulator.op.name}"
        case Finish(accumulator):
            return f"finish  {accumulator.op.name}"
    return _array(node)


def _array(node: Keep | Recall | Regroup | Allocate) -> str:
    match node:
        case Allocate(space):
            return f"array   {_space(space)}"
        case Keep(value, axes, shared):
            return f"keep    {value}{_axes(axes)}{_whose(shared=shared)}"
        case Recall(value, axes, shared):
            return f"recall  {value}{_axes(axes)}{_whose(shared=shared)}"
        case Regroup(op, array):
            return f"{op.name:<7} = regroup {array.value}{_axes(array.axes)}"


def _space(space: Workspace) -> str:
    """An array, and how many of it there are."""
    text = f"{space.value}{_axes(space.axes)}"
    text += ", for each of the rows that go together" if space.rows else ""
    return text + (", for each worker" if space.each else "")


def _accumulator(accumulator: Accumulator) -> str:
    op = accumulator.op
    text = f"{op.name} = {op.fn}[{' '.join(op.axes)}]"
    if accumulator.axes:
        text += f" in an array{_axes(accumulator.axes)}"
    elif accumulator.unrolled:
        text += " in several registers"
    long = ", long" if accumulator.long else ""
    return f"{text}{long}{', a part for each worker' if accumulator.shared else ''}"


def _axes(axes: Sequence[str]) -> str:
    return f"[{' '.join(axes)}]"


def _whose(*, shared: bool) -> str:
    return ", for all" if shared else ""


def _strides(strides: Mapping[str, sympy.Expr]) -> str:
    """The steps along each axis: "[r*64 c]"."""
    steps = [axis if step == 1 else f"{axis}*{_factor(step)}" for axis, step in strides.items()]
    return f"[{' '.join(reversed(steps))}]"


def _factor(step: sympy.Expr) -> str:
    return f"({step})" if step.is_Add else str(step).replace(" ", "")


def _launch(number: int, launch: Launch) -> str:
    blocks = launch.blocks
    size = [
        f"{axis}: {f'{count} of ' if (count := blocks.pieces.get(axis)) else ''}{block}"
        for axis, block in blocks.size.items()
        if axis and block > 1
    ]
    tiles = [axis.name for axis in launch.outer if axis.name not in blocks.shares]
    found = [f"launch {number}"]
    found += [f"tiles of {' '.join(tiles)}"] if tiles else []
    if blocks.shares:
        rows = blocks.size[""]
        found.append(f"{' '.join(blocks.shares)} shared out, {rows} at a time")
    found += [f"blocks {', '.join(size)}"] if size else []
    held = [axis.name for axis in launch.inner if axis.name in blocks.resident]
    streamed = [axis.name for axis in launch.inner if axis.name not in blocks.resident]
    found += [f"{' '.join(held)} {'held for sums' if blocks.again else 'held'}"] if held else []
    found += [f"{' '.join(streamed)} streamed"] if streamed else []
    once = [load.access.buffer.name for load in launch.held]
    found += [f"{' '.join(once)} read once"] if once else []
    found += ["the next rows fetched meanwhile"] if launch.fetch.rows else []
    combined = [each.op.name for each in launch.combined]
    found += (
        [f"combines {blocks.parts} parts of {' '.join(combined)} at a time"] if combined else []
    )
    found += [f"leaves parts of {' '.join(a.op.name for a in launch.shared)}"] * bool(launch.shared)
    kept = [f"{space.value}{_axes(space.axes)}" for space in launch.workspaces if not space.each]
    found += [f"writes {' '.join(kept)}"] if kept else []
    if team := launch.team:
        found += [f"teams of {team.blocks} blocks"] if team.blocks > 1 else []
        found += [f"{team.vectors} vectors of {team.lanes} in a thread"] if team.staged else []
        found += [f"{team.stages} rows on chip"] if team.staged else []
    return ", ".join([*found, f"{blocks.warps} warps"])
