"""Which part of a tensor a node takes: by a slice, or as one result of a split."""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from normpass.passes.vocabulary import SPLITS, argument

if TYPE_CHECKING:
    from torch.fx import Node


class Part(NamedTuple):
    """Neighbouring elements along a dimension, from one to before another."""

    dim: int
    start: int
    stop: int


def part_of(node: Node) -> Part | None:
    """What a slice takes or its scatter replaces, or one result of a split; all, of a split. None
    for steps, and for what is empty or of a size that is only known at run time.
    """
    is_item = node.target is operator.getitem
    taken = node.all_input_nodes[0] if is_item else node
    shape = taken.all_input_nodes[0].meta["val"].shape
    dim = argument(taken, "dim", 0) % len(shape)
    length, start, stop = shape[dim], argument(taken, "start", None), argument(taken, "end", None)
    if taken.target in SPLITS:
        sizes: Any = argument(taken, SPLITS[taken.target], None)
        if isinstance(sizes, int) and isinstance(length, int):
            sizes = [min(sizes, length - k) for k in range(0, length, sizes)]
        if not isinstance(sizes, list | tuple) or not all(isinstance(n, int) for n in sizes):
            return None
        ends: list[Any] = list(pairwise(accumulate(sizes, initial=0)))
        start, stop = ends[node.args[1]] if is_item else (0, length)  # type: ignore[index]
    known = all(isinstance(x, int) for x in (length, start or 0, stop or 0))
    if argument(taken, "step", 1) != 1 or not known:
        return None
    start, stop, _ = slice(start, stop).indices(length)
    return Part(dim, start, stop) if start < stop else None
