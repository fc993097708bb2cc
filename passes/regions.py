"""Grows regions: from a reduction outward over everything that shares its iteration domain.

A region starts as one reduction and takes in, as long as something fits: what its nodes read, what
reads their results, and what reads the same tensors over the whole domain (dgamma beside dx). A
node fits if its dimensions are made of the region's axes and if the region stays convex: where a
path leaves and comes back, the nodes between come along or the candidate stays out. A region is
worth the name if a reduction's result meets the domain again (an inner reduction), which is what
every norm has and a plain sum has not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from normpass.passes.axis_table import NotExpressible
from normpass.passes.domain import Domain
from normpass.passes.one_hot import holds_integers, is_one_hot
from normpass.passes.sizes import hint
from normpass.passes.vocabulary import (
    DTYPES,
    IDENTITY,
    PIECEWISE,
    RANDOM,
    SPLITS,
    Kind,
    kind_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence

    from torch.fx import Graph, Node

# A kernel that reads and writes more tensors than this runs out of registers and of address
# streams.
MOST_TENSORS = 24

# What AOTAutograd marks nodes with that it traced for the backward.
BACKWARD_TAGS = frozenset({"is_backward", "must_be_in_backward"})

# Operators of torch.distributed that stand in graphs.
COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"}
)


@dataclass
class Grown:
    """The nodes of a region, in the graph's order, and their domain."""

    nodes: list[Node]
    domain: Domain


@dataclass
class Reach:
    """Which nodes lie behind and before each node, as bit sets over positions in the graph."""

    order: dict[Node, int] = field(default_factory=dict)
    above: dict[Node, int] = field(default_factory=dict)
    below: dict[Node, int] = field(default_factory=dict)
    mutations: list[int] = field(default_factory=list)
    collectives: int = 0
    late: int = 0  # in a joint graph of forward and backward what is of the backward, else 0

    @classmethod
    def of(cls, graph: Graph) -> Reach:
        nodes = list(graph.nodes)
        reach = cls({node: k for k, node in enumerate(nodes)})
        for node in nodes:
            bits = 0
            for arg in node.all_input_nodes:
                bits |= reach.above[arg] | 1 << reach.order[arg]
            reach.above[node] = bits
        for node in reversed(nodes):
            bits = 0
            for user in node.users:
                bits |= reach.below[user] | 1 << reach.order[user]
            reach.below[node] = bits
        reach.mutations = [reach.order[node] for node in nodes if mutates(node)]
        reach.collectives = sum(1 << k for k, node in enumerate(nodes) if is_collective(node))
        if is_joint(graph):
            for node in nodes:
                if is_tangent(node):
                    reach.late |= reach.below[node]
                if node.meta.get("partitioner_tag") in BACKWARD_TAGS:
                    reach.late |= 1 << reach.order[node]
        return reach

    def between(self, nodes: Iterable[Node]) -> int:
        """Nodes outside a set that lie on a path from it back to it."""
        above = below = inside = 0
        for node in nodes:
            above |= self.above[node]
            below |= self.below[node]
            inside |= 1 << self.order[node]
        return above & below & ~inside

    def crosses_mutation(self, nodes: Iterable[Node]) -> bool:
        """Whether something is written in place between the first and the last of these nodes."""
        positions = [self.order[node] for node in nodes]
        return any(min(positions) < k < max(positions) for k in self.mutations)

    def delays_collective(self, nodes: Iterable[Node], outside: Iterable[Node]) -> bool:
        """Whether a collective that waits for one of these nodes would wait for an input of others,
        `outside`, that stands behind it.
        """
        if not self.collectives:
            return False
        below = 0
        for node in nodes:
            below |= self.below[node]
        waiting = self.collectives & below
        first = (waiting & -waiting).bit_length() - 1
        return bool(waiting) and any(self.order[node] > first for node in outside)

    def joins_forward_to_backward(self, nodes: Collection[Node]) -> bool:
        """Whether, in a joint graph, something of the forward would wait for the backward: these
        nodes are of both, and other nodes of the forward read one.
        """
        if not self.late:
            return False
        early = [node for node in nodes if not self.is_late(node)]
        if len(early) == len(nodes):
            return False
        users = {user for node in early for user in node.users}.difference(nodes)
        return any(user.op == "output" or not self.is_late(user) for user in users)

    def is_late(self, node: Node) -> bool:
        return bool(self.late >> self.order[node] & 1)


def is_collective(node: Node) -> bool:
    """Whether processes meet here, or wait for each other."""
    return getattr(node.target, "namespace", "") in COLLECTIVE_NAMESPACES


def is_tangent(node: Node) -> bool:
    """Whether this is the gradient of a result, as AOTAutograd names it."""
    return node.op == "placeholder" and "tangents" in node.name


def is_joint(graph: Graph) -> bool:
    """Whether this is a forward and its backward in one, which AOTAutograd has still to take apart:
    it takes tangents, and has results that do not depend on them.
    """
    behind = set(filter(is_tangent, graph.nodes))
    for node in graph.nodes if behind else ():
        if node.op == "output":
            return not behind.issuperset(node.all_input_nodes)
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return False


def mutates(node: Node) -> bool:
    """Whether a node writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def fusable(node: Node, *, in_pieces: bool = False) -> bool:
    """Whether a region may hold this node at all. in_pieces: one that may hold parts of tensors.

    What is computed from integers stays outside (the mask of `iota <= iota`), but for what is one
    at a position and zero elsewhere. So does what is made of random numbers: Inductor draws them
    where they are used, and a region would have them written.
    """
    kind = kind_of(node)
    if kind is Kind.OTHER or (kind in PIECEWISE and not in_pieces):
        return False
    if is_one_hot(node) or (kind is Kind.VIEW and holds_integers(node)):
        return True
    return all(map(_is_float_or_truth, _tensors(node))) and all(
        not _is_drawn(arg) and all(map(_is_float_or_truth, _tensors(arg)))
        for arg in node.all_input_nodes
        if not isinstance(arg.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
    )


def _is_drawn(node: Node) -> bool:
    """Whether these are random numbers, or a cast of some: dropout in half precision has one."""
    while node.target in IDENTITY:
        node = node.all_input_nodes[-1]
    return node.target in RANDOM


def _tensors(node: Node) -> Sequence[Any]:
    values = node.meta.get("val")
    return values if isinstance(values, tuple | list) else [values]


def _is_float_or_truth(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.dtype in DTYPES and value.layout is torch.strided
    )


def seeds(graph: Graph) -> list[Node]:
    """Reductions, those over the largest domain first."""
    found = [node for node in graph.nodes if kind_of(node) is Kind.REDUCTION and fusable(node)]
    return sorted(found, key=lambda node: -hint(node.all_input_nodes[0].meta["val"].numel()))


class Grower:
    """Grows regions in one graph. `reach` describes the graph as it is now."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.reach = Reach.of(graph)
        self.by_position = list(graph.nodes)
        self.barred: Container[Node] = ()
        self.in_pieces = False
        self.known: dict[tuple[Node, bool], bool] = {}

    def grow(
        self, seed: Node, barred: Container[Node] = (), *, in_pieces: bool = False
    ) -> Grown | None:
        """The largest region around a seed without what is barred; None if not even the seed has a
        domain. in_pieces: whether it may hold parts of tensors and what is put together of such
        (pieces.py).
        """
        self.barred, self.in_pieces = barred, in_pieces
        domain = Domain()
        try:
            domain.add(seed)
        except NotExpressible:
            return None
        source = seed.all_input_nodes[0]
        whole = domain.whole_axes(source)
        members = {seed}
        changed = True
        while changed:
            changed = False
            for candidate in self.neighbours(members, domain, whole):
                if candidate in members:
                    continue
                grown = self.attempt(candidate, members, domain, whole)
                if grown is not None:
                    members, domain = grown
                    changed = True
        return Grown(sorted(members, key=self.reach.order.__getitem__), domain)

    def neighbours(self, members: set[Node], domain: Domain, whole: tuple[int, ...]) -> list[Node]:
        """Nodes to try next: what members read, what reads members, what reads the same whole
        tensors.
        """
        reads = {arg for node in members for arg in node.all_input_nodes} - members
        users = {user for node in members for user in node.users} - members
        extent = len(domain.resolve(whole))
        siblings = {
            user
            for arg in reads
            if arg in domain.dims and len(domain.whole_axes(arg)) == extent
            for user in arg.users
        } - members
        key = self.reach.order.__getitem__
        return [
            node
            for node in (
                *sorted(reads, key=key, reverse=True),
                *sorted(users, key=key),
                *sorted(siblings, key=key),
            )
            if self.may_hold(node)
        ]

    def may_hold(self, node: Node) -> bool:
        """Whether the region may hold a node."""
        key = node, self.in_pieces
        if key not in self.known:
            self.known[key] = fusable(node, in_pieces=self.in_pieces)
        return self.known[key] and node not in self.barred

    def attempt(
        self, candidate: Node, members: set[Node], domain: Domain, whole: tuple[int, ...]
    ) -> tuple[set[Node], Domain] | None:
        """The region with a candidate, and what lies between, or None."""
        # A result of a split comes with the split.
        added = {candidate, *(x for x in candidate.all_input_nodes if x.target in SPLITS)}
        added -= members
        between = self.reach.between([*members, *added])
        while between:
            low = between & -between
            added.add(self.by_position[low.bit_length() - 1])
            between ^= low
        if not all(map(self.may_hold, added)) or self.reach.crosses_mutation(members | added):
            return None
        trial = domain.copy()
        try:
            for node in sorted(added, key=self.reach.order.__getitem__):
                trial.add(node)
        except NotExpressible:
            return None
        inside = set(trial.axes_of((whole,)))
        if not all(map(inside.issuperset, trial.every_axes())):
            return None
        grown = members | added
        outside = {arg for node in grown for arg in node.all_input_nodes} - grown
        if len(outside) > MOST_TENSORS or self.devices(grown | outside) > 1:
            return None
        reach = self.reach
        if reach.joins_forward_to_backward(grown) or reach.delays_collective(grown, outside):
            return None
        return grown, trial

    def devices(self, nodes: set[Node]) -> int:
        """On how many devices these tensors lie; a CPU scalar beside GPU tensors counts."""
        return len(
            {
                node.meta["val"].device
                for node in nodes
                if isinstance(node.meta.get("val"), torch.Tensor)
            }
        )
