"""What a kernel does, read off its plan: what it moves through memory, and what it computes. Here a
CPU's; launch_traffic.py has a GPU's.

The rule. A tensor's first sweep comes from memory. A later phase of the same loop body that reads
it again finds it in cache if all that the phases in between touch, with the loops around that body
standing still, fits there; otherwise that is another sweep. In the same way a tensor that does not
vary along a loop (a weight, from row to row) is read anew in each iteration if an iteration
touches more than the cache holds. Writes go to memory once. What is read again from cache counts
as such, and so do arrays of kept values and partial sums, which are written and read there.

So layer norm's backward is one pass over memory as long as a row of all its tensors stays in a
worker's cache, and batch norm's backward over rows in memory order is two, unless the whole tensor
does.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.in_place import overwritable
from normpass.backend.program.launch_traffic import work_of_launches
from normpass.backend.program.machine import ELEMENTS_PER_WORKER, machine_of
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes, symbol
from normpass.backend.program.tree import (
    Access,
    Compute,
    Finish,
    Keep,
    Leaf,
    Load,
    Loop,
    Node,
    Plan,
    Recall,
    Regroup,
    Store,
)
from normpass.passes.cost import PRICED, Work
from normpass.passes.region import REGROUP, product
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.passes.cost import Caches, Conditions


def traffic(text: str, sizes: Sequence[int], device: str, conditions: Conditions) -> Work:
    """What the kernel of a region does.

    text: the region's. sizes: its run-time sizes, in order. device: "cpu" or "cuda". conditions:
    those of this machine if None.
    """
    region = parse(text)
    classes, machine = size_classes(sizes), machine_of(device)
    if machine.tiling:
        machine = gpu_machine(region, classes, conditions.capability)
    plan = make_plan(region, machine, classes)
    extents = region.extents(sizes)
    symbols = {symbol(name): extent for name, extent in extents.items()}
    lengths = {axis.name: int(axis.extent.subs(symbols)) for axis in plan.axes}
    if plan.launches:
        return work_of_launches(plan, lengths, conditions)
    sweeps = _Sweeps(lengths, conditions.caches)
    counts = sweeps.of(plan.body, frozenset())
    loaded = {node.access.buffer.name: node.access for node in _leaves(plan.body, Load)}
    stored = {node.access.buffer.name: node.access for node in _leaves(plan.body, Store)}
    whole = {name: sweeps.bytes(access, frozenset()) for name, access in loaded.items()}
    largest = max(whole.values(), default=0)
    done = _Done(plan, lengths)
    workers = max(1, min(conditions.threads, done.elements // ELEMENTS_PER_WORKER))
    return Work(
        sum(whole[name] * counts[name] for name in loaded),
        sum(sweeps.bytes(access, frozenset()) for access in stored.values()),
        max((counts[name] for name in loaded if whole[name] == largest), default=1),
        again=sum(whole[name] * max(0, done.loads[name] - counts[name]) for name in loaded)
        + done.array_bytes(workers),
        functions=tuple(sorted(done.functions.items())),
        rows=done.rows,
        regrouped=done.regrouped,
        piece=lengths[plan.vector],
        workers=workers,
        over=frozenset().union(*overwritable(plan).values()),
    )


class _Done:
    """What a plan's loops do, counted while they are walked through.

    loads: in how many phases each tensor is read. functions: how often each is computed. rows: how
    often a loop over lanes begins. kept: elements of arrays that are written or read. partial:
    elements of one worker's sums for all. regrouped: elements that are gone through one by one, by
    other axes than the lanes'.
    """

    def __init__(self, plan: Plan, lengths: Mapping[str, int]) -> None:
        self.plan = plan
        self.lengths = lengths
        self.regroups = any(op.fn == REGROUP for op in plan.region.ops)
        self.elements = product(lengths[axis.name] for axis in plan.axes)
        self.loads: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        self.rows = self.kept = self.partial = self.regrouped = 0
        self.walk(plan.body, 1, lanes=False)

    def walk(self, body: Sequence[Node], times: int, *, lanes: bool) -> None:
        for node in body:
            if isinstance(node, Loop):
                along = node.axis.name == self.plan.vector
                self.rows += times * along
                self.walk(node.body, times * self.lengths[node.axis.name], lanes=lanes or along)
            else:
                self.leaf(node, times)
                by_others = isinstance(node, Keep | Regroup) and self.regroups and not lanes
                self.regrouped += times * by_others

    def leaf(self, node: Leaf, times: int) -> None:
        match node:
            case Load(access):
                self.loads[access.buffer.name] += 1
            case Compute(op) if op.fn in PRICED:
                self.functions[op.fn] += times
            case Keep(value) | Recall(value):
                self.kept += min(times, self.size(value))
            case Finish(accumulator) if accumulator.shared:
                self.partial += product(self.lengths[axis] for axis in accumulator.axes)

    def size(self, value: str) -> int:
        """Elements of a value. What is read for each row again stays near."""
        return product(self.lengths[axis] for axis in self.plan.region.varies[value])

    def array_bytes(self, workers: int) -> int:
        """Of kept values, and of every worker's partial sums, which are written and read."""
        itemsize = self.plan.region.compute_dtype.itemsize
        return (self.kept + 2 * workers * self.partial) * itemsize


class _Sweeps:
    """Counts how often each tensor is read from memory."""

    def __init__(self, extents: Mapping[str, int], caches: Caches) -> None:
        self.extents = extents
        self.caches = caches

    def bytes(self, access: Access, still: frozenset[str]) -> int:
        """Bytes of a tensor that are addressed while some loops stand still."""
        moving = product(self.extents[axis] for axis in access.strides if axis not in still)
        return int(moving * access.buffer.dtype.itemsize)

    def fits(self, nodes: Sequence[Node], still: frozenset[str]) -> bool:
        """Whether everything these nodes touch stays in cache."""
        touched = {
            leaf.access.buffer.name: leaf.access
            for leaf in (*_leaves(nodes, Load), *_leaves(nodes, Store))
        }
        room = self.caches.worker if still else self.caches.shared
        return sum(self.bytes(access, still) for access in touched.values()) <= room

    def of(self, body: Sequence[Node], still: frozenset[str]) -> dict[str, int]:
        """Sweeps from memory over the part of each tensor that a body reads, by the tensor's
        name.
        """
        counts: dict[str, int] = {}
        last: dict[str, int] = {}  # the child that touched a tensor last
        for k, child in enumerate(body):
            for name, count in self.child(child, still).items():
                cached = name in last and self.fits(body[last[name] : k], still)
                counts[name] = counts.get(name, 0) + count - cached
                last[name] = k
        return counts

    def child(self, node: Node, still: frozenset[str]) -> dict[str, int]:
        if isinstance(node, Load):
            return {node.access.buffer.name: 1}
        if not isinstance(node, Loop):
            return {}
        inside = still | {node.axis.name}
        counts = self.of(node.body, inside)
        if self.fits(node.body, inside):
            return counts
        varies = {
            leaf.access.buffer.name
            for leaf in _leaves(node.body, Load)
            if node.axis.name in leaf.access.strides
        }
        times = self.extents[node.axis.name]
        return {name: n if name in varies else n * times for name, n in counts.items()}


def _leaves(nodes: Sequence[Node], kind: type[Load | Store]) -> Iterator[Load | Store]:
    for node in nodes:
        if isinstance(node, Loop):
            yield from _leaves(node.body, kind)
        elif isinstance(node, kind):
            yield node
