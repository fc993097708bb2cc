"""What Inductor would do with a region's nodes on a CPU: its loops, and what they read and compute.

Reductions and what has to be in memory get loops, and whatever pointwise leads to them is computed
in each loop that needs it, unless it is dear and needed twice (`kept`). A reduction's loops are over what it keeps, and inside over what it
reduces; those that keep the same axes share the outer loops (a group). So does a pointwise result
made of theirs, where its own outermost loops are the reductions': layer norm's forward is one
group, and what it reads once more comes from cache. Batch norm's result is a group of its own, and
so are group norm's, whose weights tell examples from groups, and sums over the outer axes (dgamma):
they read their inputs again, and compute again what they are made of.

    group r     sum[c](gw), sum[c](gw * x_hat)  inside: c
                dx                              inside: c, from cache
    group c     sum[r](g * x_hat), sum[r](g)    inside: r, once more from memory

Checked on the code of torch 2.13 (codegen/cpp.py: CppScheduling, KernelGroup).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from normpass.passes.axis_names import name_axes, reduced_axes
from normpass.passes.cost import PRICED, Work
from normpass.passes.made import only_computed_for, sources
from normpass.passes.sizes import nbytes
from normpass.passes.vocabulary import COMPOSED, FUNCTIONS, REDUCTIONS, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import Node

    from normpass.passes.cost import Conditions
    from normpass.passes.domain import Domain
    from normpass.passes.lower import Lowered

aten = torch.ops.aten

# config.cpp.min_chunk_size: fewer elements are one worker's.
LEAST_CHUNK = 512
# Neighbours in memory that a loop over an outer axis takes at once.
LANES = 16
# Reductions whose result is divided by a number of elements wherever it is used.
DIVIDED = ("mean", "var", "var_mean")
WELFORD = ("var", "var_mean")
# What is made with one of these and used twice is kept in a buffer (ir.py: StorageBox), and so is
# what reads more tensors than config.realize_reads_threshold.
DEAR = frozenset({"exp", "log", "log1p", "sigmoid", "tanh"})
MOST_READS = 4


@dataclass
class _Loop:
    """An inner loop: its roots, and over which axes it and those around it run together."""

    axes: frozenset[str]
    roots: list[Node] = field(default_factory=list)


@dataclass
class _Group:
    """Loops inside of one another: the axes of the outer ones, and the inner ones by the order in
    which they run.
    """

    kept: frozenset[str]
    loops: dict[tuple[int, frozenset[str]], _Loop] = field(default_factory=dict)

    def add(self, level: int, axes: frozenset[str], root: Node) -> None:
        self.loops.setdefault((level, axes), _Loop(axes)).roots.append(root)

    def in_order(self) -> list[_Loop]:
        return [self.loops[key] for key in sorted(self.loops, key=lambda key: key[0])]


def theirs(
    nodes: Sequence[Node],
    domain: Domain,
    lowered: Lowered,
    sizes: Sequence[int],
    conditions: Conditions,
) -> Work:
    """What Inductor would do with the nodes of a region.

    nodes, domain: as they were grown. lowered, sizes: what became of them, and the run-time sizes.
    """
    return _Inductor(nodes, domain, lowered, sizes, conditions).work()


class _Inductor:
    def __init__(
        self,
        nodes: Sequence[Node],
        domain: Domain,
        lowered: Lowered,
        sizes: Sequence[int],
        conditions: Conditions,
    ) -> None:
        self.nodes = nodes
        self.inside = set(nodes)
        self.domain = domain
        self.outputs = lowered.outputs
        self.conditions = conditions
        self.names = name_axes(nodes, domain)
        self.extents = lowered.region.extents(sizes)
        self.order = _memory_order(lowered, self.extents)
        self.neighbours = self.innermost()
        self.level: dict[Node, int] = {}
        self.kept: set[Node] = set()
        self.placed: set[Node] = set()
        for node in nodes:  # a later one is made of what was kept before
            if self.is_kept(node):
                self.kept.add(node)

    def is_kept(self, node: Node) -> bool:
        """Whether Inductor computes a pointwise value once, for several loops to read."""
        if kind_of(node) is not Kind.POINTWISE or len(node.users) < 2:
            return False
        made = [node, *self.above(node)]
        reads = sum(map(self.is_read, made))
        return reads > MOST_READS or any(
            function_of(each) in DEAR for each in made if not self.is_read(each)
        )

    # ---- loops

    def axes(self, node: Node) -> frozenset[str]:
        return frozenset(self.names[axis] for axis in self.domain.axes(node) if axis in self.names)

    def innermost(self) -> frozenset[str]:
        """The last axes in memory, as far as all tensors and reductions have them together."""
        together = {self.axes(node) for node in self.domain.dims}
        axes = self.order[-1:]
        for axis in reversed(self.order[:-1]):
            if any((axis in each) != (axes[-1] in each) for each in together):
                break
            axes.append(axis)
        return frozenset(axes)

    def elements(self, axes: frozenset[str]) -> int:
        return prod(self.extents[axis] for axis in axes)

    def groups(self) -> list[_Group]:
        """The groups, in the order in which they run."""
        found: dict[frozenset[str], _Group] = {}
        alone: dict[frozenset[str], _Group] = {}
        results = set(self.outputs)
        for node in self.nodes:
            if kind_of(node) is Kind.REDUCTION:
                kept = self.axes(node)
                over = kept | {self.names[axis] for axis in reduced_axes(node, self.domain)}
                group = found.setdefault(kept, _Group(kept))
                self.level[node] = self.after(node, kept)
                group.add(self.level[node], over, node)
                self.place_kept(node, group, self.level[node], over, alone)
            elif node in results and kind_of(node) is Kind.POINTWISE:
                axes = self.axes(node)
                group = self.joined(node, found) or alone.setdefault(axes, _Group(axes))
                level = self.after(node, group.kept)
                group.add(level, axes, node)
                self.place_kept(node, group, level, axes, alone)
        return [*found.values(), *alone.values()]

    def after(self, node: Node, kept: frozenset[str]) -> int:
        """The place among a group's inner loops at which all that a node needs is there."""
        needs = [self.level[each] + 1 for each in self.reductions(node) if self.axes(each) == kept]
        needs += [self.level[each] for each in self.above(node) if each in self.placed]
        return max(needs, default=0)

    def place_kept(
        self,
        root: Node,
        group: _Group,
        level: int,
        over: frozenset[str],
        alone: dict[frozenset[str], _Group],
    ) -> None:
        """Gives kept values that a loop is the first to need a place there, or one of their own."""
        for node in self.above(root):
            if node not in self.kept or node in self.placed or node in self.outputs:
                continue
            axes = self.axes(node)
            self.placed.add(node)
            self.level[node] = level if axes == over else 0
            home = group if axes == over else alone.setdefault(axes, _Group(axes))
            home.add(self.level[node], axes, node)
            self.place_kept(node, home, self.level[node], axes, alone)

    def joined(self, node: Node, found: Mapping[frozenset[str], _Group]) -> _Group | None:
        """The group whose outer loops a pointwise result shares."""
        axes, own = self.axes(node), self.loops(node)
        for reduction in self.reductions(node):
            kept = self.axes(reduction)
            outer = self.loops(reduction)
            if axes == kept or (outer and own[: len(outer)] == outer):
                return found[kept]
        return None

    def loops(self, node: Node) -> list[frozenset[str]]:
        """The axes of each loop over a node's elements, outermost first. Neighbouring dimensions
        are one loop where no tensor that is read tells them apart.
        """
        dims = [
            frozenset(self.names[axis] for axis in self.domain.resolve(dim))
            for dim in self.domain.dims[node]
        ]
        place = self.order.index
        outermost_first = sorted(filter(None, dims), key=lambda dim: min(map(place, dim)))
        tensors = [self.axes(each) for each in self.above(node) if self.is_read(each)]
        loops: list[frozenset[str]] = []
        for dim in outermost_first:
            if loops and all(bool(loops[-1] & axes) == bool(dim & axes) for axes in tensors):
                dim |= loops.pop()
            loops.append(dim)
        return loops

    def is_read(self, node: Node) -> bool:
        """Whether a loop reads a node rather than computes it."""
        return node not in self.inside or node in self.kept or kind_of(node) is Kind.REDUCTION

    def reductions(self, node: Node) -> list[Node]:
        """The reductions whose results a node is computed from, without one in between."""
        found: dict[Node, None] = {}
        for each in self.above(node):
            if each in self.kept:
                found |= dict.fromkeys(self.reductions(each))
            elif kind_of(each) is Kind.REDUCTION:
                found[each] = None
        return list(found)

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

    # ---- what they do

    def work(self) -> Work:
        groups = self.groups()
        counted = _Counted(self, groups)
        functions: dict[str, int] = {}
        for group in groups:
            for loop in group.in_order():
                for name, count in self.functions(loop).items():
                    functions[name] = functions.get(name, 0) + count
        loops = [(group, loop) for group in groups for loop in group.in_order()]
        elements = max((self.elements(loop.axes) for _, loop in loops), default=0)
        threads = self.conditions.threads
        read, written = counted.read, counted.written
        if read + written > threads * self.conditions.private:
            read += written  # a line is read before it is overwritten
        return Work(
            read,
            written,
            counted.passes,
            again=counted.again,
            columns=counted.columns,
            functions=tuple(sorted(functions.items())),
            rows=sum(self.rows(loop) for _, loop in loops),
            launches=len(groups),
            workers=threads if elements // threads >= LEAST_CHUNK else 1,
        )

    def rows(self, loop: _Loop) -> int:
        """How often a loop over neighbours in memory begins, of LANES at a time in columns."""
        return self.elements(loop.axes) // max(1, self.elements(loop.axes & self.neighbours))

    def functions(self, loop: _Loop) -> dict[str, int]:
        """How often each function is computed in a loop."""
        within = dict.fromkeys(
            node
            for root in loop.roots
            for node in (root, *self.above(root))
            if node in loop.roots or node not in self.kept
        )
        made = [x for x in within if x not in self.inside and only_computed_for(x, self.inside)]
        within |= dict.fromkeys(node for x in made for node in sources(x, self.inside).computed)
        count: dict[str, int] = {}
        for node in within:
            for name in self.priced(node, node in loop.roots):
                count[name] = count.get(name, 0) + self.elements(loop.axes)
        return count

    def priced(self, node: Node, is_root: bool) -> list[str]:
        """The functions of a node that cost more than an addition."""
        if kind_of(node) is Kind.REDUCTION:
            fn = REDUCTIONS[node.target]
            if is_root:
                return ["welford"] if fn in WELFORD else []
            return ["div"] if fn in DIVIDED and node in self.inside else []
        return [fn for fn in [function_of(node)] if fn in PRICED]


def function_of(node: Node) -> str:
    """The function that a pointwise node computes, "" for several cheap ones."""
    target: Any = node.target
    if target in COMPOSED and target in (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor):
        names = {0: "", 1: "", 2: "", 3: "", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
        exponent = node.args[1]
        return names.get(exponent, "pow") if isinstance(exponent, int | float) else "pow"
    return FUNCTIONS.get(target, "")


class _Counted:
    """Bytes that the groups read. A tensor comes from memory at first, and afterwards from where
    everything touched fits: in a worker's cache what one turn of the outer loops touches, in the
    last one all.
    """

    def __init__(self, inductor: _Inductor, groups: Sequence[_Group]) -> None:
        self.inductor = inductor
        self.groups = groups
        self.read = self.again = self.columns = 0
        self.written = sum(map(nbytes, inductor.outputs))
        self.sweeps: dict[Node, int] = {}
        tensors = {x for g in groups for loop in g.in_order() for x in self.tensors(loop)}
        everything = sum(map(nbytes, {*tensors, *inductor.outputs}))
        self.all_fits = everything <= inductor.conditions.caches.shared
        for group in groups:
            self.group(group)

    @property
    def passes(self) -> int:
        """Over the largest input."""
        largest = max(map(nbytes, self.sweeps), default=0)
        return max((n for x, n in self.sweeps.items() if nbytes(x) == largest), default=1)

    def group(self, group: _Group) -> None:
        touched: set[Node] = set()
        fits = self.turn_fits(group)
        for loop in group.in_order():
            for tensor in self.tensors(loop):
                size = nbytes(tensor)
                near = (tensor in touched and fits) or (tensor in self.sweeps and self.all_fits)
                if near:
                    self.again += size
                else:
                    self.read += size
                    self.sweeps[tensor] = self.sweeps.get(tensor, 0) + 1
                if self.is_column(group, loop, tensor):
                    self.columns += size
                touched.add(tensor)
            for root in loop.roots:
                if root in self.inductor.kept:
                    touched.add(root)
                    self.store(root, group, fits)

    def store(self, kept: Node, group: _Group, fits: bool) -> None:
        """Counts what is written of a kept value: to cache, if only its own group reads it."""
        if kept in self.inductor.outputs:
            return
        if fits and not self.read_elsewhere(kept, group):
            self.again += nbytes(kept)
        else:
            self.written += nbytes(kept)

    def read_elsewhere(self, kept: Node, group: _Group) -> bool:
        others = (loop for other in self.groups if other is not group for loop in other.in_order())
        return any(kept in self.tensors(loop) for loop in others)

    def tensors(self, loop: _Loop) -> list[Node]:
        """What a loop reads: what others have in memory, or are made of that."""
        inductor = self.inductor
        outside = {
            x: None
            for root in loop.roots
            for x in inductor.above(root)
            if x not in inductor.inside or (x in inductor.kept and x not in loop.roots)
        }
        found: dict[Node, None] = {}
        for x in outside:
            made = x not in inductor.inside and only_computed_for(x, inductor.inside)
            found |= dict.fromkeys(sources(x, inductor.inside).read if made else [x])
        return list(found)

    def turn_fits(self, group: _Group) -> bool:
        """Whether all that one turn of the outer loops touches stays in a worker's cache."""
        inductor = self.inductor
        outputs = {
            root for loop in group.in_order() for root in loop.roots if root in inductor.outputs
        }
        tensors = {x for loop in group.in_order() for x in self.tensors(loop)} | outputs
        turns = inductor.elements(group.kept)
        if inductor.order and inductor.order[-1] in group.kept:
            turns //= min(LANES, inductor.extents[inductor.order[-1]])
        room = inductor.conditions.caches.worker
        return sum(map(nbytes, tensors)) // max(1, turns) <= room

    def is_column(self, group: _Group, loop: _Loop, tensor: Node) -> bool:
        """Whether a loop goes down a tensor's columns."""
        inductor = self.inductor
        if loop.axes == group.kept or tensor not in inductor.domain.dims:
            return False
        axes = inductor.axes(tensor)
        return axes == loop.axes and inductor.order[-1] in group.kept


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
