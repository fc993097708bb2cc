"""The arrays that a kernel needs between its loops or between its launches, and who has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.tree import (
    Accumulate,
    Allocate,
    Begin,
    Keep,
    Loop,
    Workspace,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.backend.program.tree import Accumulator, Launch, Node, Plan


def with_workspaces(plan: Plan) -> Plan:
    """The plan with the arrays of its loops, on GPUs with those of its launches."""
    if plan.launches:
        launches = (replace(each, workspaces=_of_launch(plan, each)) for each in plan.launches)
        return replace(plan, launches=tuple(launches))
    return replace(plan, body=tuple(_allocated(plan)))


def _allocated(plan: Plan) -> Iterator[Node]:
    """The nodes at the top, each after the arrays that it is the first to need: loops that compute
    the same values again have the same array for them.
    """
    known: set[tuple[str, tuple[str, ...]]] = set()
    for node in plan.body:
        needed = _needed(plan, node)
        for space in needed:
            if (space.value, space.axes) not in known:
                known.add((space.value, space.axes))
                yield Allocate(space)
        own = tuple(space for space in needed if space.each)
        yield replace(node, own=own) if isinstance(node, Loop) else node


def _needed(plan: Plan, node: Node) -> tuple[Workspace, ...]:
    """The arrays that a node at the top writes to."""
    if isinstance(node, Begin) and node.accumulator.shared:
        return (_of_sums(node.accumulator),)
    if not isinstance(node, Loop):
        return ()
    kept, own, shared = dict[str, Workspace](), dict[str, Workspace](), dict[str, Workspace]()
    for leaf in walk(node):
        match leaf:
            case Keep(value, axes, is_read_later):
                each = node.parallel and not is_read_later
                rows = _has_rows(plan, value, axes)
                kept[str((value, axes))] = Workspace(value, axes, each=each, rows=rows)
            case Begin(accumulator) if accumulator.axes:
                own[accumulator.op.name] = _of_sums(accumulator)
            case Accumulate(accumulator) if accumulator.shared:
                shared[accumulator.op.name] = _of_sums(accumulator)
    return (*kept.values(), *own.values(), *shared.values())


def _of_sums(accumulator: Accumulator) -> Workspace:
    return Workspace(accumulator.op.name, accumulator.axes, each=True, sums=accumulator)


def _has_rows(plan: Plan, value: str, axes: tuple[str, ...]) -> bool:
    """Whether each of the rows that go together has an array of its own."""
    together = plan.together
    if together is None or together.axis in axes:
        return False
    return together.axis in plan.region.varies[value]


def _of_launch(plan: Plan, launch: Launch) -> tuple[Workspace, ...]:
    """The arrays in global memory that a launch writes to: every program's partial results, those
    that it adds to there before those that it leaves at its end, and what crosses from one phase or
    launch to another and no block holds.
    """
    streamed = [each for each in launch.shared if launch.streamed(each.axes)]
    parts = [*streamed, *(each for each in launch.shared if each not in streamed)]
    kept: dict[str, Workspace] = {}
    for node in walk(*launch.body):
        match node:
            case Begin(accumulator) if launch.streamed(accumulator.axes):
                kept[accumulator.op.name] = _kept(plan, accumulator.op.name, accumulator)
            case Keep(value, axes, is_read_later) if is_read_later or launch.streamed(axes):
                kept[value] = _kept(plan, value)
    return (*map(_of_sums, parts), *kept.values())


def _kept(plan: Plan, value: str, sums: Accumulator | None = None) -> Workspace:
    """An array of one element for each of a value's."""
    varies = plan.region.varies[value]
    axes = tuple(axis.name for axis in plan.axes if axis.name in varies)
    return Workspace(value, axes, each=False, sums=sums)
