"""What Inductor computes where it is used, and so never has in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from normpass.passes.vocabulary import IDENTITY, VIEWS, Kind, kind_of, without_views

if TYPE_CHECKING:
    from collections.abc import Container

    from torch.fx import Node


class Sources(NamedTuple):
    """What a value is made of: the tensors in memory, and what is computed of them."""

    read: list[Node]
    computed: list[Node]


def only_computed_for(node: Node, inside: Container[Node]) -> bool:
    """Whether a region's input is pointwise and needed by nothing that would have it in memory."""
    node = without_views(node)
    return is_loop(node) and all(_reads_in_a_loop(user, inside) for user in node.users)


def _reads_in_a_loop(user: Node, inside: Container[Node]) -> bool:
    if user.target in VIEWS:
        return all(_reads_in_a_loop(each, inside) for each in user.users)
    return user in inside or is_loop(user) or kind_of(user) is Kind.REDUCTION


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
