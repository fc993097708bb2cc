"""What Inductor would do with a region's nodes on a CPU: its loops, and what they read and compute.

Reductions and what has to be in memory get loops, and whatever pointwise leads to them is computed
in each loop that needs it. A reduction's loops are over what it keeps, and inside over what it
reduces; those that keep the same axes share the outer loops (a group). So does a pointwise result
made of theirs, where the loops over its own dimensions, outermost first, begin with the axes that
the reductions keep: layer norm's forward is one group, and what it reads once more comes from
cache. Batch norm's result is a group of its own, and so are sums over the outer axes (dgamma): they
read their inputs again, and compute again what they are made of.

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
    from collections.abc import Iterator, Mapping, Sequence

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
                before = [r for r in self.reductions(node) if self.axes(r) == kept]
                self.level[node] = 1 + max((self.level[r] for r in before), default=-1)
                found.setdefault(kept, _Group(kept)).add(self.level[node], over, node)
            elif node in results and kind_of(node) is Kind.POINTWISE:
                axes = self.axes(node)
                group = self.joined(node, found) or alone.setdefault(axes, _Group(axes))
                level = max((self.level[r] for r in self.reductions(node)), default=-1)
                group.add(level + 1 if group.kept != axes else level, axes, node)
        return [*found.values(), *alone.values()]

    def joined(self, node: Node, found: Mapping[frozenset[str], _Group]) -> _Group | None:
        """The group whose outer loops a pointwise result shares."""
        axes = self.axes(node)
        for kept in {self.axes(r): None for r in self.reductions(node)}:
            if axes == kept or (kept and kept in self.outer_loops(node)):
                return found[kept]
        return None

    def outer_loops(self, node: Node) -> Iterator[frozenset[str]]:
        """The axes of the outermost dimensions of a node, one dimension after the other."""
        dims = [
            frozenset(self.names[axis] for axis in self.domain.resolve(dim))
            for dim in self.domain.dims[node]
        ]
        outermost = sorted(
            filter(None, dims), key=lambda dim: min(self.order.index(axis) for axis in dim)
        )
        for k in range(len(outermost)):
            yield frozenset().union(*outermost[: k + 1])

    def reductions(self, node: Node) -> list[Node]:
        """The reductions whose results a node is computed from, without one in between."""
        return [each for each in self.above(node) if kind_of(each) is Kind.REDUCTION]

    def above(self, node: Node) -> list[Node]:
        """What a node is computed from in its own loop: up to reductions and tensors of others."""
        found: dict[Node, None] = {}
        waiting = list(node.all_input_nodes)
        while waiting:
            each = waiting.pop()
            if each in found or not isinstance(each.meta.get("val"), torch.Tensor | tuple | list):
                continue
            found[each] = None
            if each in self.inside and kind_of(each) is not Kind.REDUCTION:
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
        written = sum(nbytes(node) for node in self.outputs)
        read, again, columns, passes = counted.read, counted.again, counted.columns, counted.passes
        if read + written > threads * self.conditions.private:
            read += written  # a line is read before it is overwritten
        return Work(
            read,
            written,
            passes,
            again=again,
            columns=columns,
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
        within = dict.fromkeys(node for root in loop.roots for node in (root, *self.above(root)))
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
        self.read = self.again = self.columns = 0
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

    def tensors(self, loop: _Loop) -> list[Node]:
        """What a loop reads: what others have in memory, or are made of that."""
        inductor = self.inductor
        outside = {
            x: None
            for root in loop.roots
            for x in inductor.above(root)
            if x not in inductor.inside and isinstance(x.meta["val"], torch.Tensor)
        }
        found: dict[Node, None] = {}
        for x in outside:
            made = only_computed_for(x, inductor.inside)
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
