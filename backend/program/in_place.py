"""Which results of a plan may be written over what they are computed of.

So they may where each element is read for the last time before the same one is written: in the same
step of a loop or in an earlier one of the loops beside it, with every loop around both going from
element to element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.program.tree import Load, Loop, Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from normpass.backend.program.tree import Access, Node, Plan

# A node of a plan: which of the nodes leads there, at the top and in each loop around it, and that
# loop's axis, which is empty at the top.
Path = tuple[tuple[int, str], ...]
Place = tuple["Path", "Access"]


def overwritable(plan: Plan) -> dict[str, frozenset[str]]:
    """The inputs that each output may be written over, by the names of their buffers."""
    loads: dict[str, list[Place]] = {}
    stores: dict[str, list[Place]] = {}
    for path, node in _with_paths(plan.body):
        if isinstance(node, Load):
            loads.setdefault(node.access.buffer.name, []).append((path, node.access))
        elif isinstance(node, Store):
            stores.setdefault(node.access.buffer.name, []).append((path, node.access))
    return {
        output: frozenset(
            name
            for name, reads in loads.items()
            if all(_may_follow(write, read) for write in writes for read in reads)
        )
        for output, writes in stores.items()
    }


def _with_paths(
    nodes: Sequence[Node], around: Path = (), axis: str = ""
) -> Iterator[tuple[Path, Node]]:
    for k, node in enumerate(nodes):
        path = (*around, (k, axis))
        yield path, node
        if isinstance(node, Loop):
            yield from _with_paths(node.body, path, node.axis.name)


def _may_follow(write: Place, read: Place) -> bool:
    """Whether what is read may be written over: in every loop around both each step has elements of
    its own, and there the last of them are read first.
    """
    (after, written), (before, loaded) = write, read
    if written.buffer.dtype is not loaded.buffer.dtype or written.strides != loaded.strides:
        return False
    around: set[str] = set()
    for (later, axis), (sooner, _) in zip(after, before, strict=False):
        around |= {axis} if axis else set()
        if later != sooner:
            return sooner < later and around <= written.strides.keys()
    return False
