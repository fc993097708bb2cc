"""What a GPU's programs read before they need it: once what is the same for all of their rows, and
during an iteration of a loop what the next ones need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

from normpass.backend.program.tree import (
    SHARED,
    Accumulate,
    Fetch,
    Keep,
    Load,
    Loop,
    Recall,
    Staged,
    rewritten,
    walk,
)
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.program.tree import Launch, Node, Plan


def with_fetches(plan: Plan) -> Plan:
    """The plan with what its launches hold for all rows, and what their loops fetch ahead."""
    width = plan.region.compute_dtype.itemsize
    launches = (replace(launch, held=_held(launch)) for launch in plan.launches)
    found = tuple(_Fetches(each, plan.vector, width).launch for each in launches)
    return replace(plan, launches=found)


class _Fetches:
    """Goes through a launch's loops. vector: the axis along which lanes run. width: bytes of a
    number that is computed with.
    """

    def __init__(self, launch: Launch, vector: str, width: int) -> None:
        self.given, self.vector, self.most = launch, vector, 0
        body = rewritten(launch.body, self.staged)
        rows = bool(launch.blocks.shares) and self.is_ahead(launch.body)
        beside = product(launch.blocks.size.values()) * launch.blocks.parts * width
        for accumulator in launch.combined:
            sizes = (launch.blocks.size[axis] for axis in accumulator.axes)
            self.most = max(self.most, product(sizes) * launch.blocks.parts * width)
        self.launch = replace(launch, body=body, fetch=Fetch(rows, self.most, beside))

    def staged(self, node: Node) -> Node:
        if self.is_printed(node) and self.is_ahead(node.body):
            return replace(node, kind=Staged())
        return node

    def is_printed(self, node: Node) -> TypeGuard[Loop]:
        """Whether a node is a loop of the kernel's text, rather than along a block."""
        return isinstance(node, Loop) and bool(self.given.streamed([node.axis.name]))

    def is_ahead(self, body: Sequence[Node]) -> bool:
        """Whether a loop with this in it fetches ahead: one that has no other in it, and neither
        reads nor writes arrays in memory, of which it would fetch what they held before.
        """
        inside = [*walk(*body)]
        if any(self.is_printed(node) or _is_array(self.given, node) for node in inside):
            return False
        loads = [load for load in self.loads(body) if load not in self.given.held]
        if any(map(self.is_across, loads)):
            return False
        self.most = max(self.most, sum(_bytes(self.given, load) for load in loads))
        return bool(loads)

    def is_across(self, load: Load) -> bool:
        """Whether a program of one warp reads a tensor whose neighbours lie along another axis than
        lanes do: Triton's compiler (3.9) dies of a segmentation fault where that is fetched ahead.
        """
        strides = load.access.strides
        across = strides.get(self.vector, 1) != 1 and 1 in strides.values()
        return across and self.given.blocks.warps == 1

    def loads(self, body: Sequence[Node]) -> list[Load]:
        """What is read each time that a loop's body is gone through."""
        if self.given.blocks.again:
            return [node for node in walk(*body) if isinstance(node, Load)]
        return [*_loads(body).values()]


def _loads(nodes: Sequence[Node]) -> dict[str, Load]:
    """The first load of each tensor."""
    loads: dict[str, Load] = {}
    for node in walk(*nodes):
        if isinstance(node, Load):
            loads.setdefault(node.access.buffer.name, node)
    return loads


def _held(launch: Launch) -> tuple[Load, ...]:
    """What all rows of a program read again, such as a weight, where one block covers it."""
    blocks = launch.blocks
    if not blocks.shares:
        return ()
    return tuple(
        load
        for load in _loads(launch.body).values()
        if set(blocks.shares).isdisjoint(load.access.strides)
        and not launch.streamed(load.access.strides)
    )


def _is_array(launch: Launch, node: Node) -> bool:
    """Whether a leaf is one of an array in memory that a program writes."""
    match node:
        case Accumulate(accumulator):
            return bool(launch.streamed(accumulator.axes))
        case Keep(_, axes, shared):
            return not shared and bool(launch.streamed(axes))
        case Recall(_, axes, shared):
            return not shared and bool(launch.streamed(axes))
    return False


def _bytes(launch: Launch, load: Load) -> int:
    """What one iteration reads of a tensor, at most."""
    blocks, axes = launch.blocks, {*load.access.strides}
    dims = {SHARED if axis in blocks.shares else axis for axis in axes}
    return product(map(blocks.covered, dims)) * int(load.access.buffer.dtype.itemsize)
