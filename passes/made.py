"""What Inductor computes where it is used, and so never has in memory."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

import torch

from normpass.passes.vocabulary import CUTS, IDENTITY, JOINS, VIEWS, Kind, kind_of, without_views

if TYPE_CHECKING:
    from collections.abc import Container

    from torch.fx import Node


aten = torch.ops.aten
# Parts of a tensor are read where they lie, and a joined one is computed where it will lie. So is a
# padded one, but that is for a convolution: MobileNets were measured with those norms fused.
PARTS = CUTS | {operator.getitem}


# What reads no elements.
SIZES = frozenset({aten.sym_size.int, aten.sym_stride.int})


class Sources(NamedTuple):
    """What a value is made of: the tensors in memory, and what is computed of them."""

    read: list[Node]
    computed: list[Node]


def only_computed_for(node: Node, inside: Container[Node]) -> bool:
    """Whether a region's input is pointwise and needed by nothing that would have it in memory."""
    node = without_views(node)
    return is_loop(node) and all(_reads_in_a_loop(user, inside) for user in node.users)


def only_used_beside(node: Node, inside: Container[Node]) -> bool:
    """Whether Inductor would never have a region's result in memory: all that need it are computed
    in one loop with it, because nothing else that they need comes of other than loops later on.
    """
    users = _loops_of(node, inside)
    if not users or not all(is_loop(user) or user.target in JOINS for user in users):
        return False
    later = _above(users, node, inside)
    return all(is_loop(x) or x.target in VIEWS | PARTS | JOINS for x in later)


def is_read_in_loops(node: Node, inside: Container[Node]) -> bool:
    """Whether loops of Inductor's read a region's result."""
    users = _loops_of(node, inside)
    return any(is_loop(user) or kind_of(user) is Kind.REDUCTION for user in users)


def _loops_of(node: Node, inside: Container[Node]) -> list[Node]:
    """What reads a result outside of its region, through views and in parts too."""
    found: list[Node] = []
    for user in node.users:
        if user.target in VIEWS or user.target in PARTS:
            found += _loops_of(user, inside)
        elif user not in inside:
            found.append(user)
    return found


def _above(users: list[Node], node: Node, inside: Container[Node]) -> set[Node]:
    """What users are computed from that is computed after a region's result."""
    found: set[Node] = set()
    waiting = [x for user in users for x in user.all_input_nodes]
    while waiting:
        x = waiting.pop()
        if x not in found and x not in inside and node < x:
            found.add(x)
            waiting += x.all_input_nodes
    return found


def _reads_in_a_loop(user: Node, inside: Container[Node]) -> bool:
    if user.target in VIEWS:
        return all(_reads_in_a_loop(each, inside) for each in user.users)
    in_a_loop = user in inside or is_loop(user) or kind_of(user) is Kind.REDUCTION
    return in_a_loop or user.target in SIZES


def is_loop(node: Node) -> bool:
    """Whether Inductor computes a node where it is used, or in one loop with what uses it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in IDENTITY


def is_truth(node: Node) -> bool:
    return bool(node.meta["val"].dtype is torch.bool)


def sharers(node: Node, inside: Container[Node]) -> int:
    """How many need a region's input in memory, if all that read it are regions."""
    node = without_views(node)
    return 1 + sum(user not in inside for user in _readers(node))


def _readers(node: Node) -> set[Node]:
    """Who reads a node, through views too."""
    found: set[Node] = set()
    for user in node.users:
        found |= _readers(user) if user.target in VIEWS else {user}
    return found


def sources(node: Node, inside: Container[Node]) -> Sources:
    """What Inductor reads and computes where it uses a region's input."""
    read: dict[Node, None] = {}
    computed: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in computed or not isinstance(each.meta.get("val"), torch.Tensor):
            continue
        if each.target in VIEWS or only_computed_for(each, inside):
            computed[each] = None
            waiting += each.all_input_nodes
        else:
            read[each] = None
    return Sources(list(read), list(computed))
