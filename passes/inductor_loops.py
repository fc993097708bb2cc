"""The loops that Inductor would make of a region's nodes on a CPU.

Reductions and what has to be in memory get loops. Whatever pointwise leads to them is computed in
each loop that needs it, unless it is dear and needed twice: then it is stored. A reduction's loops
are over what it keeps, and inside over what it reduces; those that keep the same axes share the
outer loops (a group). So does a pointwise result made of theirs, where its own outermost loops are
the reductions': layer norm's forward is one group. Batch norm's result is a group of its own, and
so are group norm's, whose weights tell examples from groups, and sums over the outer axes (dgamma):
they read their inputs again, and compute again what they are made of.

Loops share outer ones only if all of them go along these by the same steps (`are_apart`). What is
stored of each row alone has lanes along the rows, a loop along a row goes from one to the next: a
statistic that is returned makes each loop go through memory by itself. So does a variance over few
numbers, which is found in two steps (`in_two_steps`): its mean is a loop of its own, and one more
divides it.

    group r     sum[c](gw), sum[c](gw * x_hat)  inside: c
                dx                              inside: c, from cache
    group c     sum[r](g * x_hat), sum[r](g)    inside: r, once more from memory

Read in torch 2.13 (codegen/cpp.py: CppScheduling, KernelGroup; ir.py: StorageBox; lowering.py:
use_two_step_variance).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from normpass.passes.axis_names import name_axes, reduced_axes
from normpass.passes.pieces import lanes_of
from normpass.passes.vocabulary import FUNCTIONS, REDUCTIONS, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import Node

    from normpass.passes.domain import Domain
    from normpass.passes.lower import Lowered

aten = torch.ops.aten
Axes = frozenset[str]

# What is made with one of these and used twice, or broadcast, is stored, and so is what is used
# twice and reads more tensors than config.realize_reads_threshold.
DEAR = frozenset({"exp", "log", "log1p", "sigmoid", "tanh"})
MOST_READS = 4
VARIANCES = ("var", "var_mean")
# float32 numbers in a vector; fewer than a quarter of them are gone through one by one.
LANES = 16
# Inner loops so many times as long as all outer ones are divided among workers instead.
MUCH_LONGER = 300


@dataclass
class Loop:
    """An inner loop: what it is there for, and the axes that it and those around it run over."""

    axes: Axes
    roots: list[Node] = field(default_factory=list)


@dataclass
class Group:
    """Loops inside of one another: the axes of the outer ones, and the inner ones, in order.

    apart: whether each inner loop has outer ones of its own.
    """

    outer: Axes
    apart: bool = False
    inner: dict[tuple[int, Axes], Loop] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Of loops that workers divide. A number alone is computed without."""
        return sum(bool(axes) for _, axes in self.inner) if self.apart else 1

    def add(self, place: int, axes: Axes, *roots: Node) -> None:
        self.inner.setdefault((place, axes), Loop(axes)).roots.extend(roots)

    @property
    def loops(self) -> list[Loop]:
        return [self.inner[key] for key in sorted(self.inner, key=lambda key: key[0])]


class InductorLoops:
    """The groups of loops for a region's nodes, in the order in which they run (`groups`).

    nodes, domain: as they were grown. lowered, sizes: what became of them, and the run-time sizes.
    """

    def __init__(
        self, nodes: Sequence[Node], domain: Domain, lowered: Lowered, sizes: Sequence[int]
    ) -> None:
        self.inside = set(nodes)
        self.domain = domain
        self.outputs = dict.fromkeys(map(_viewed, lowered.outputs))
        self.names = name_axes(nodes, domain)
        self.extents = lowered.region.extents(sizes)
        self.static = {axis.name for axis in lowered.region.axes if axis.extent is not None}
        self.order = _memory_order(lowered, self.extents)
        self.count_pieces_together()
        self.stored: set[Node] = set()
        for node in nodes:  # a later one is made of what was stored before
            if self.is_stored(node):
                self.stored.add(node)
        self.place: dict[Node, int] = {}  # of reductions and stored values, in their group
        self.around: dict[Axes, Group] = {}
        self.alone: dict[Axes, Group] = {}
        for node in nodes:
            if kind_of(node) is Kind.REDUCTION:
                self.add_reduction(node)
            elif node in self.outputs and kind_of(node) is Kind.POINTWISE:
                self.add_result(node)
        self.groups = [*self.around.values(), *self.alone.values()]
        for group in self.groups:
            group.apart = self.are_apart(group)

    def count_pieces_together(self) -> None:
        """Counts the elements of all pieces of a joined axis as the first one's: Inductor goes
        through them in one loop.
        """
        joined = {lanes_of(node, self.domain) for node in self.domain.dims}
        counted: set[str] = set()
        for pieces in sorted(joined, key=lambda pieces: -len(pieces)):
            names = [[self.names[axis] for axis in piece] for piece in pieces]
            axes = {axis for piece in names for axis in piece}
            if axes and counted.isdisjoint(axes):
                total = sum(prod(self.extents[axis] for axis in piece) for piece in names)
                self.extents |= dict.fromkeys(axes, 1) | {names[0][0]: total}
                counted |= axes

    # ---- loops

    def add_reduction(self, node: Node) -> None:
        outer = self.axes(node)
        over = outer | {self.names[axis] for axis in reduced_axes(node, self.domain)}
        group = self.around.setdefault(outer, Group(outer))
        place = self.after(node, outer)
        if self.in_two_steps(node):
            group.add(place, over, node)
            group.add(place + 1, outer)
            place += 2
        self.place[node] = place
        group.add(place, over, node)
        self.add_stored(node, group, place, over)

    def in_two_steps(self, node: Node) -> bool:
        """Whether a variance is found by its mean first, and not by Welford's formulas."""
        from torch._inductor import config

        if REDUCTIONS[node.target] not in VARIANCES:
            return False
        reduced = [self.names[axis] for axis in reduced_axes(node, self.domain)]
        # Before torch 2.13 only what is written out without a loop.
        most = getattr(config.cpp, "use_two_step_variance_threshold", 0)
        return (
            self.static.issuperset(reduced)
            and self.elements(frozenset(reduced)) <= most
            and self.elements(self.axes(node)) > 1
        )

    def are_apart(self, group: Group) -> bool:
        """Whether a group's loops cannot share outer ones."""
        within = [axes for loop in group.loops if (axes := loop.axes - group.outer)]
        turns = self.elements(group.outer)
        if not group.outer or not within:
            return not group.outer
        along_rows = self.order[-1] not in group.outer and turns >= LANES // 4
        if along_rows and len(within) < len(group.inner):
            return True
        known = self.static.issuperset(group.outer.union(*within))
        return known and any(0 < turns * MUCH_LONGER < self.outermost(axes) for axes in within)

    def outermost(self, axes: Axes) -> int:
        """Over how many elements the outermost loop runs: neighbours in memory are one."""
        first = min(map(self.order.index, axes))
        neighbours = takewhile(axes.__contains__, self.order[first:])
        return self.elements(frozenset(neighbours))

    def add_result(self, node: Node) -> None:
        axes = self.axes(node)
        group = self.group_of(node) or self.alone.setdefault(axes, Group(axes))
        place = self.after(node, group.outer)
        group.add(place, axes, node)
        self.add_stored(node, group, place, axes)

    def add_stored(self, root: Node, group: Group, place: int, over: Axes) -> None:
        """Gives stored values a place in the loop that is the first to need them, if that runs over
        their axes, or a group of their own.
        """
        for node in self.above(root):
            if node not in self.stored or node in self.place or node in self.outputs:
                continue
            axes = self.axes(node)
            home, at = group, place
            if axes != over:
                home = self.group_of(node) or self.alone.setdefault(axes, Group(axes))
                at = self.after(node, home.outer)
            self.place[node] = at
            home.add(at, axes, node)
            self.add_stored(node, home, at, axes)

    def group_of(self, node: Node) -> Group | None:
        """The group whose outer loops a pointwise result shares."""
        axes, own = self.axes(node), self.loops(node)
        for reduction in self.reductions(node):
            outer = self.loops(reduction)
            if axes == self.axes(reduction) or (outer and own[: len(outer)] == outer):
                return self.around[self.axes(reduction)]
        return None

    def after(self, node: Node, outer: Axes) -> int:
        """The first place among a group's inner loops at which all that a node needs is there."""
        needs = [self.place[r] + 1 for r in self.reductions(node) if self.axes(r) == outer]
        needs += [self.place[x] for x in self.above(node) if x in self.stored and x in self.place]
        return max(needs, default=0)

    def loops(self, node: Node) -> list[Axes]:
        """The axes of each loop over a node's elements, outermost first. Neighbouring dimensions
        are one loop where no tensor that is read tells them apart.
        """
        dims = [
            frozenset(self.names[axis] for axis in self.domain.axes_of((dim,)))
            for dim in self.domain.dims[node]
        ]
        place = self.order.index
        outermost_first = sorted(filter(None, dims), key=lambda dim: min(map(place, dim)))
        tensors = [self.axes(each) for each in self.above(node) if self.is_read(each)]
        loops: list[Axes] = []
        for dim in outermost_first:
            if loops and all(bool(loops[-1] & axes) == bool(dim & axes) for axes in tensors):
                dim |= loops.pop()
            loops.append(dim)
        return loops

    # ---- nodes

    def axes(self, node: Node) -> Axes:
        return frozenset(self.names[axis] for axis in self.domain.axes(node) if axis in self.names)

    def elements(self, axes: Axes) -> int:
        return prod(self.extents[axis] for axis in axes)

    def is_stored(self, node: Node) -> bool:
        """Whether a pointwise value is computed once, for several loops to read."""
        if kind_of(node) is not Kind.POINTWISE:
            return False
        if self.is_returned(node):
            return True
        made = [node, *self.above(node)]
        if any(function_of(each) in DEAR for each in made if not self.is_read(each)):
            return _is_reused(node) or self.is_broadcast(node)
        # Of a variance and its mean each is a tensor.
        reads = sum(map(self.is_read, made)) + sum(map(_is_second_result, made))
        return reads > MOST_READS and _is_reused(node)

    def is_broadcast(self, node: Node) -> bool:
        """Whether a node that uses a value, or a view of it, has more elements."""
        users = [user for user in node.users if user in self.inside]
        views = (user for user in users if kind_of(user) is Kind.VIEW)
        more = (not self.axes(user) <= self.axes(node) for user in users)
        return any(more) or any(map(self.is_broadcast, views))

    def is_returned(self, node: Node) -> bool:
        """Whether a graph returns a value, which is stored then before others use it."""
        return any(user.op == "output" for user in node.users)

    def is_read(self, node: Node) -> bool:
        """Whether a loop reads a node rather than computes it."""
        return node not in self.inside or node in self.stored or kind_of(node) is Kind.REDUCTION

    def above(self, node: Node) -> list[Node]:
        """What a node is computed from in its own loop: up to what is read there."""
        found: dict[Node, None] = {}
        waiting = list(node.all_input_nodes)
        while waiting:
            each = waiting.pop()
            if each in found or not isinstance(each.meta.get("val"), torch.Tensor | tuple | list):
                continue
            found[each] = None
            if not self.is_read(each):
                waiting += each.all_input_nodes
        return list(found)

    def reductions(self, node: Node) -> list[Node]:
        """The region's reductions whose results a node is computed from, without one in between."""
        found: dict[Node, None] = {}
        for each in self.above(node):
            if each in self.stored:
                found |= dict.fromkeys(self.reductions(each))
            elif each in self.inside and kind_of(each) is Kind.REDUCTION:
                found[each] = None
        return list(found)


def _viewed(node: Node) -> Node:
    """What a node is a view of, or itself."""
    while kind_of(node) is Kind.VIEW:
        node = node.all_input_nodes[0]
    return node


def _is_reused(node: Node) -> bool:
    """Whether several nodes use a value, or a view of it."""
    views = (user for user in node.users if kind_of(user) is Kind.VIEW)
    return len(node.users) > 1 or any(map(_is_reused, views))


def _is_second_result(node: Node) -> bool:
    return kind_of(node) is Kind.ITEM and node.args[1:] == (1,)


def function_of(node: Node) -> str:
    """The function that a pointwise node computes, "" for several cheap ones."""
    target: Any = node.target
    if target in (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor):
        names = {0: "", 1: "", 2: "", 3: "", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
        exponent = node.args[1]
        return names.get(exponent, "pow") if isinstance(exponent, int | float) else "pow"
    return FUNCTIONS.get(target, "")


def _memory_order(lowered: Lowered, extents: Mapping[str, int]) -> list[str]:
    """The region's axes as its widest tensor has them in memory, outermost first."""
    region = lowered.region
    buffers = [*region.inputs, *(output.buffer for output in region.outputs)]
    widest = max(buffers, key=lambda buffer: len(buffer.axes))
    step: dict[str, int] = {}
    for dim, stride in zip(widest.dims, region.strides(widest, extents), strict=True):
        for axis in reversed(dim):
            step[axis] = stride
            stride *= extents[axis]
    return sorted((axis.name for axis in region.axes), key=lambda name: -step.get(name, 0))
