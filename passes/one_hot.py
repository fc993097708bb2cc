"""Integers in regions: positions along an axis, compared with one that counts. That is how Inductor
writes the gradient of a gather, such as a cross entropy's:

    position = iota(8192)
    one_hot  = where(target[:, None] == position, -1.0, 0.0)

Regions compute in floating point. Positions are exact there, and what is no position of these, how
large it may be, rounds to none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.passes.vocabulary import without_views

if TYPE_CHECKING:
    from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

INTEGERS = frozenset({torch.int32, torch.int64})
# Up to here float32 has every integer, and rounds none that is larger to a smaller one.
EXACT = 1 << 24


def is_one_hot(node: Node) -> bool:
    """Whether integers are compared with their positions along an axis."""
    if node.target is not aten.eq.Tensor or len(node.all_input_nodes) != 2:
        return False
    return (
        all(map(holds_integers, node.all_input_nodes))
        and sum(map(are_positions, node.all_input_nodes)) == 1
    )


def holds_integers(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in INTEGERS


def is_iota(node: Node) -> bool:
    """Whether these are consecutive integers as Inductor makes them, and no view of such."""
    return node.target is prims.iota.default


def are_positions(node: Node) -> bool:
    """Whether these are the numbers from 0 to less than so many, however they are looked at."""
    node = without_views(node)
    if not is_iota(node):
        return False
    (length,) = node.args
    steps = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    return isinstance(length, int) and length <= EXACT and steps == (0, 1)
