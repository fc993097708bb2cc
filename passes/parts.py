"""Which part of a tensor a node takes: by a slice, as one element, or as one result of a split."""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from normpass.passes.vocabulary import SPLITS, argument

if TYPE_CHECKING:
    from torch.fx import Node

aten = torch.ops.aten


class Part(NamedTuple):
    """Neighbouring elements along a dimension, from one to before another.

    step: that many are one element here: a slice with steps takes the same of each. is_one: one
    element, whose dimension is gone.
    """

    dim: int
    start: int
    stop: int
    step: int = 1
    is_one: bool = False


def part_of(node: Node) -> Part | None:
    """What a node takes or a scatter replaces; all, of a split. None for what is empty, for steps
    that do not come out even, and for what is known only at run time.
    """
    is_item = node.target is operator.getitem
    taken = node.all_input_nodes[0] if is_item else node
    shape = taken.all_input_nodes[0].meta["val"].shape
    dim = argument(taken, "dim", 0) % len(shape)
    if not isinstance(shape[dim], int):
        return None
    length = shape[dim]
    if taken.target in SPLITS:
        return _result(taken, dim, length, node.args[1] if is_item else None)
    if taken.target in (aten.select.int, aten.select_scatter.default):
        index = argument(taken, "index", 0)
        if not isinstance(index, int):
            return None
        return Part(dim, index % length, index % length + 1, is_one=True)
    start, stop = argument(taken, "start", None), argument(taken, "end", None)
    step = argument(taken, "step", 1)
    if not all(isinstance(x, int) for x in (start or 0, stop or 0, step)):
        return None
    start, stop, _ = slice(start, stop).indices(length)
    if step != 1:
        is_even = start < step and length % step == 0 and stop > length - step + start
        return Part(dim, start, start + 1, step) if is_even else None
    return Part(dim, start, stop) if start < stop else None


def _result(split: Node, dim: int, length: int, index: Any) -> Part | None:
    """One result of a split; all of it without an index."""
    is_one = split.target is aten.unbind.int
    sizes: Any = 1 if is_one else split.args[1]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - k) for k in range(0, length, sizes)]
    if not isinstance(sizes, list | tuple) or not all(isinstance(n, int) for n in sizes):
        return None
    if index is None:
        return Part(dim, 0, length)
    first, last = list(pairwise(accumulate(sizes, initial=0)))[index]
    return Part(dim, first, last, is_one=is_one) if first < last else None
