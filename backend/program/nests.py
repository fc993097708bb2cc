"""Which loops at the top workers divide, and the order of those that are divided as if they were
one: that of memory.

A loop over what is complete (a gradient of the weight, to be written) is one worker's where it is
short, and everybody's where it is not.

Which axis has to be outermost is decided by the sums (axes.py): what runs over the pixels of some
images side by side has its loop over the pixels outside. Where nothing but values stands between
such loops they may go in any order, and a worker whose share lies in one piece reads a stream.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from normpass.backend.program.tree import Compute, Load, Loop, Recall, Store, walk

if TYPE_CHECKING:
    from normpass.backend.program.tree import Access, LoopAxis, Node, Plan

# Elements from which a loop over results is divided: below, waking workers takes as long.
DIVIDED = 64 * 1024


def with_nests(plan: Plan) -> Plan:
    """The plan with its outermost loops in memory's order."""
    return replace(plan, body=tuple(map(partial(_arranged, plan), plan.body)))


def _arranged(plan: Plan, node: Node) -> Node:
    if not isinstance(node, Loop):
        return node
    if not node.parallel and _elements(node) >= DIVIDED and _only_writes(node):
        node = replace(node, parallel=True)
    return _in_order(node, plan)


def _elements(loop: Loop) -> int:
    inner = max((_elements(node) for node in loop.body if isinstance(node, Loop)), default=1)
    return loop.axis.hint * inner


def _only_writes(loop: Loop) -> bool:
    """Whether a loop reads what is complete and writes results, and nothing else comes of it."""
    return all(isinstance(node, Loop | Load | Compute | Recall | Store) for node in walk(loop))


def _in_order(loop: Loop, plan: Plan) -> Loop:
    axes, between, innermost = _nest(loop, plan.vector)
    order = sorted(axes, key=lambda axis: _step(axis, innermost), reverse=True)
    if not loop.parallel or order == axes or not _indifferent(axes, innermost, between):
        return loop
    body = innermost.body
    open_axes = {axis.name for axis in order}
    for axis in reversed(order):
        here = [leaf for leaf in between if axis.name in _axes(leaf, plan) & open_axes]
        between = [leaf for leaf in between if leaf not in here]
        open_axes.remove(axis.name)
        body = (Loop(axis, (*here, *body), parallel=axis is order[0]),)
    (nest,) = body
    assert isinstance(nest, Loop)
    return loop if between else nest  # none of the axes is a value's


def _nest(loop: Loop, vector: str) -> tuple[list[LoopAxis], list[Load | Compute], Loop]:
    """The axes of loops right inside of each other, outermost first, the values between them, and
    the innermost of them.
    """
    axes = [loop.axis]
    between: list[Load | Compute] = []
    while True:
        loops = [node for node in loop.body if isinstance(node, Loop)]
        values = [node for node in loop.body if isinstance(node, Load | Compute)]
        alone = len(loops) == 1 and len(values) + 1 == len(loop.body)
        if not alone or vector in (loop.axis.name, loops[0].axis.name):
            return axes, between, loop
        between += values
        (loop,) = loops
        axes.append(loop.axis)


def _accesses(loop: Loop) -> list[Access]:
    return [node.access for node in walk(loop) if isinstance(node, Load | Store)]


def _step(axis: LoopAxis, loop: Loop) -> int:
    """Elements from one step along an axis to the next, of what has most axes."""
    widest = max(_accesses(loop), key=lambda access: len(access.strides), default=None)
    return widest.step(axis.name) if widest else 0


def _indifferent(axes: list[LoopAxis], loop: Loop, between: list[Load | Compute]) -> bool:
    """Whether all that is large varies along all of these axes or none: what does not vary along
    one is in cache for all its steps where that is the inner one.
    """
    names = {axis.name for axis in axes}
    small = {leaf.access.buffer.name for leaf in between if isinstance(leaf, Load)}
    return all(
        names <= access.strides.keys() or names.isdisjoint(access.strides)
        for access in _accesses(loop)
        if access.buffer.name not in small
    )


def _axes(leaf: Load | Compute, plan: Plan) -> frozenset[str]:
    name = leaf.access.buffer.name if isinstance(leaf, Load) else leaf.op.name
    return plan.region.varies[name]
