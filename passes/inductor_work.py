"""What Inductor would do with a region's nodes on a CPU: how often its loops read what they read,
and what they compute.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from normpass.passes.cost import PRICED, Work
from normpass.passes.inductor_loops import LANES, VARIANCES, InductorLoops, function_of
from normpass.passes.made import is_truth, only_computed_for, only_used_beside, sources
from normpass.passes.sizes import elements, nbytes
from normpass.passes.vocabulary import REDUCTIONS, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from normpass.passes.cost import Conditions
    from normpass.passes.domain import Domain
    from normpass.passes.inductor_loops import Axes, Group, Loop
    from normpass.passes.lower import Lowered

# config.cpp.min_chunk_size: fewer elements are one worker's.
LEAST_CHUNK = 512
# Reductions whose result is divided by a number of elements wherever it is used.
DIVIDED = ("mean", *VARIANCES)


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
    return _Counted(InductorLoops(nodes, domain, lowered, sizes), conditions).work()


class _Counted:
    """Bytes that the loops move, and what they compute.

    A tensor comes from memory at first, and afterwards from where all that is touched in between
    fits: from a worker's cache, where that is what one turn of the outer loops touches, or from the
    last one, where it is everything.
    """

    def __init__(self, loops: InductorLoops, conditions: Conditions) -> None:
        self.loops = loops
        self.conditions = conditions
        self.inside = loops.inside
        self.read = self.again = self.columns = 0
        self.written = sum(nbytes(x) for x in loops.outputs if not only_used_beside(x, self.inside))
        # Masks that a backward needs.
        self.truths = sum(
            elements(x) for x in loops.outputs if is_truth(x) and loops.is_returned(x)
        )
        self.sweeps: Counter[Node] = Counter()
        self.functions: Counter[str] = Counter()
        self.neighbours = self.innermost()
        tensors = {x for group in loops.groups for loop in group.loops for x in self.tensors(loop)}
        everything = sum(map(nbytes, {*tensors, *loops.outputs}))
        self.all_fits = everything <= conditions.caches.shared
        for group in loops.groups:
            self.count(group)

    def work(self) -> Work:
        every = [loop for group in self.loops.groups for loop in group.loops]
        turns = [self.loops.elements(loop.axes) for loop in every]
        rows = [self.loops.elements(loop.axes - self.neighbours) for loop in every]
        threads = self.conditions.threads
        largest = max(map(nbytes, self.sweeps), default=0)
        # Where the workers' own caches do not keep it, a line is read before it is overwritten.
        fills = self.written * (self.read + self.written > threads * self.conditions.private)
        return Work(
            self.read + fills,
            self.written,
            max((n for x, n in self.sweeps.items() if nbytes(x) == largest), default=1),
            again=self.again,
            columns=self.columns,
            truths=self.truths,
            functions=tuple(sorted(self.functions.items())),
            rows=sum(rows),
            launches=sum(group.launches for group in self.loops.groups),
            workers=threads if max(turns, default=0) // threads >= LEAST_CHUNK else 1,
        )

    # ---- what is moved

    def count(self, group: Group) -> None:
        touched: set[Node] = set()
        fits = not group.apart and self.turn_fits(group)
        for loop in group.loops:
            for tensor in self.tensors(loop):
                size = nbytes(tensor)
                if (tensor in touched and fits) or (tensor in self.sweeps and self.all_fits):
                    self.again += size
                else:
                    self.read += size
                    self.sweeps[tensor] += 1
                self.columns += size * self.goes_down_columns(group, loop, tensor)
                touched.add(tensor)
            for root in loop.roots:
                if root in self.loops.stored:
                    touched.add(root)
                    self.store(root, group, fits)
            self.functions.update(self.computed(group, loop))

    def store(self, value: Node, group: Group, fits: bool) -> None:
        """Counts how a stored value is written: to cache, if only its own group reads it."""
        if value in self.loops.outputs:
            return
        others = (other for other in self.loops.groups if other is not group)
        if fits and not any(value in self.tensors(loop) for each in others for loop in each.loops):
            self.again += nbytes(value)
        else:
            self.written += nbytes(value)

    def tensors(self, loop: Loop) -> list[Node]:
        """What a loop reads, but for reductions: what is in memory, or is made of that."""
        found: dict[Node, None] = {}
        for x in (x for root in loop.roots for x in self.loops.above(root)):
            if x not in self.inside:
                made = only_computed_for(x, self.inside)
                found |= dict.fromkeys(sources(x, self.inside).read if made else [x])
            elif x in self.loops.stored and x not in loop.roots:
                found[x] = None
        return list(found)

    def turn_fits(self, group: Group) -> bool:
        """Whether all that one turn of the outer loops touches stays in a worker's cache."""
        touched = {x for loop in group.loops for x in (*loop.roots, *self.tensors(loop))}
        touched = {x for x in touched if kind_of(x) is not Kind.REDUCTION}
        turns = self.loops.elements(group.outer)
        last = self.loops.order[-1]
        if last in group.outer:
            turns //= max(1, min(LANES, self.loops.extents[last]))
        return sum(map(nbytes, touched)) // max(1, turns) <= self.conditions.caches.worker

    def goes_down_columns(self, group: Group, loop: Loop, tensor: Node) -> bool:
        """Whether a loop goes along a tensor by steps, past its neighbours in memory."""
        if loop.axes == group.outer or tensor not in self.loops.domain.dims:
            return False
        return self.loops.axes(tensor) == loop.axes and self.loops.order[-1] in group.outer

    def innermost(self) -> Axes:
        """The last axes in memory, as far as all tensors and reductions have them together."""
        together = {self.loops.axes(node) for node in self.loops.domain.dims}
        *outer, last = self.loops.order
        axes = {last}
        for axis in reversed(outer):
            if any((axis in each) != (last in each) for each in together):
                break
            axes.add(axis)
        return frozenset(axes)

    # ---- what is computed

    def computed(self, group: Group, loop: Loop) -> Counter[str]:
        """How often each function is computed in a loop: once for all its elements, where what it
        is of does not change with them.
        """
        within: dict[Node, None] = dict.fromkeys(loop.roots)
        for node in (node for root in loop.roots for node in self.loops.above(root)):
            if node not in self.inside and only_computed_for(node, self.inside):
                within |= dict.fromkeys(sources(node, self.inside).computed)
            elif node not in self.loops.stored:
                within[node] = None
        found: Counter[str] = Counter()
        for node in within:
            outer = node in self.loops.domain.dims and self.loops.axes(node) <= group.outer
            axes = group.outer if outer and node not in loop.roots else loop.axes
            for name in self.priced(node, node in loop.roots):
                found[name] += self.loops.elements(axes)
        return found

    def priced(self, node: Node, is_root: bool) -> list[str]:
        """The functions of a node that cost more than an addition."""
        if kind_of(node) is not Kind.REDUCTION:
            return [fn for fn in [function_of(node)] if fn in PRICED]
        fn = REDUCTIONS[node.target]
        if is_root:
            return ["welford"] if fn in VARIANCES and not self.loops.in_two_steps(node) else []
        return ["div"] if fn in DIVIDED and node in self.inside else []
