"""The leaves of a plan's tree in C++: loads, stores, operations, reductions, arrays of workers.

cpp.py prints the loops around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.backend.codegen.cpp_names import Names
from normpass.backend.codegen.text import factor, index_expression
from normpass.backend.program.reductions import REDUCTIONS
from normpass.backend.program.tree import (
    Access,
    Accumulate,
    Accumulator,
    Ahead,
    Begin,
    Compute,
    Finish,
    Keep,
    Leaf,
    Load,
    Loop,
    Recall,
    Regroup,
    Store,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.passes.region import Op


class LeafPrinter(Names):
    """Prints leaves, one at a time."""

    def leaf(self, node: Leaf) -> None:
        match node:
            case Load(access, ahead):
                self.load(access, ahead)
            case Compute(op):
                self.compute(op)
            case Begin(accumulator):
                self.begin(accumulator)
            case Accumulate(accumulator):
                self.accumulate(accumulator)
            case Finish(accumulator):
                self.finish(accumulator)
            case Keep(value, axes, _):
                self.keep(value, axes)
            case Recall(value, axes, _):
                self.recall(value, axes)
            case Regroup(op, array):
                self.regroup(op, array)
            case Store():
                self.store(node)

    def load(self, access: Access, ahead: Ahead | None = None) -> None:
        buffer = access.buffer
        address = self.address(access)
        stride = access.strides.get(self.along)
        if stride is None:
            text = f"get<scalar>({address})"
        elif stride == 1:
            text = f"load<scalar>({address}, {self.lanes})"
        elif stride == 2:
            text = f"load_every_second<scalar>({address}, {self.lanes})"
        else:
            text = f"gather<scalar>({address}, {index_expression(stride)}, {self.lanes})"
        if buffer.dtype is torch.bool:
            text = f"mask({text})" if stride is not None else f"mask_of({text})"
        self.define(buffer.name, text)
        if ahead:
            self.prefetch(access, ahead)

    def address(self, access: Access, without: str = "") -> str:
        """Where a tensor's element is, or the first one along an axis."""
        strides = {axis: step for axis, step in access.strides.items() if axis != without}
        return f"p_{access.buffer.name} + {self.offset(strides)}"

    def prefetch(self, access: Access, ahead: Ahead) -> None:
        """Asks for what a later row has in this place."""
        step = index_expression(ahead.elements)
        step = f"Vec::size() * {factor(step)}" if ahead.lanes else step
        self.line(f"prefetch({self.address(access)} + {step});")

    def store(self, node: Store) -> None:
        value, access = node.output.value, node.access
        address = self.address(access)
        stride = access.strides.get(self.along)
        if stride is None:
            self.line(f"put({address}, {self.as_number(value)});")
            return
        text = self.lanes_of(value)
        if stride == 1:
            write = "write_apart" if node.apart else "write"
            self.line(f"{write}({address}, {text}, {self.lanes}, past_caches);")
        else:
            self.line(f"scatter({address}, {index_expression(stride)}, {text}, {self.lanes});")

    # -- outputs that take turns in memory

    def in_turn(self, nodes: Sequence[Leaf]) -> list[tuple[Store, Store]]:
        """Of these leaves the pairs of stores whose lanes take turns: each is a neighbour of one of
        the other. Two may also take turns along another axis than the lanes.
        """
        stores = {
            node.access.buffer.name: node
            for node in nodes
            if isinstance(node, Store) and node.access.strides.get(self.along) == 2
        }
        found: list[tuple[Store, Store]] = []
        for join in self.plan.region.joins:
            pair = [stores[name] for name in join.outputs if name in stores]
            strides = [store.access.buffer.strides for store in pair]
            if join.in_turn and [each and each[join.dim] for each in strides] == [2, 2]:
                found.append((pair[0], pair[1]))
        return found

    def leaves(self, nodes: Sequence[Leaf], crossed: Sequence[Leaf] = ()) -> None:
        """Leaves one after the other; of two stores that take turns the second writes both.

        crossed: what rows that go together write side by side.
        """
        pairs = self.in_turn([node for node in nodes if node not in crossed])
        for node in nodes:
            pair = next((pair for pair in pairs if node in pair), None)
            if isinstance(node, Store) and node in crossed:
                self.take_crossed(node)
            elif pair is None:
                self.leaf(node)
            elif node == pair[1]:
                self.store_in_turn(*pair)

    def store_in_turn(self, *stores: Store) -> None:
        """Writes what takes turns."""
        values = [self.lanes_of(store.output.value) for store in stores]
        address = self.address(stores[0].access)
        self.line(f"write_in_turn({address}, {', '.join(values)}, {self.lanes}, past_caches);")

    # -- rows that go together and are neighbours in memory, where lanes are far apart

    def is_crossed(self, access: Access) -> bool:
        """Whether a tensor has the rows that go together side by side, and its lanes far apart."""
        return (
            not self.abreast
            and access.strides.get(str(self.jam)) == 1
            and access.strides.get(self.along, 1) != 1
            and access.buffer.dtype is not torch.bool
        )

    def begin_crossed(self, node: Load | Store) -> None:
        """Reads a tensor's lanes for all rows at once, or declares what is written so."""
        name = node.access.buffer.name
        if isinstance(node, Store):
            self.line(f"Vec rows_{name}[J];")
            return
        self.indexed.add(name)
        self.line(f"Vec {name}[J];")
        self.line(f"load_rows<scalar>({name}, {self.crossed(node.access)}, lanes);")

    def take_crossed(self, node: Store) -> None:
        """What one of the rows writes."""
        text = self.lanes_of(node.output.value)
        self.line(f"rows_{node.access.buffer.name}[j] = {text};")

    def lanes_of(self, value: str) -> str:
        """A value as the lanes of a vector."""
        text = self.as_number(value)
        return text if self.is_vector(value) else f"Vec({text})"

    def end_crossed(self, node: Load | Store) -> None:
        """Writes a tensor's lanes for all rows at once."""
        if isinstance(node, Store):
            name = node.access.buffer.name
            self.line(f"store_rows({self.crossed(node.access)}, rows_{name}, lanes);")

    def crossed(self, access: Access) -> str:
        """Where the first row's lanes begin, and how far they are apart."""
        self.first = self.jam
        address = self.address(access)
        self.first = None
        return f"{address}, {index_expression(access.strides[self.along])}"

    # -- accumulators

    def accumulator_type(self, accumulator: Accumulator) -> str:
        kind = "Vec" if self.is_vector(accumulator.operand) else "scalar"
        if not accumulator.long:
            return kind
        return f"LongSum<{kind}{', UNROLL' if accumulator.unrolled else ''}>"

    def long_sums(self, node: Loop) -> list[str]:
        """The long sums that a loop's body itself adds to, not a loop inside of it."""
        return [
            f"acc_{leaf.accumulator.op.name}"
            for leaf in node.body
            if isinstance(leaf, Accumulate) and leaf.accumulator.long and not leaf.accumulator.axes
        ]

    def added(self, node: Loop, times: str = "1") -> None:
        """Tells the long sums how often something was added to them."""
        for name in self.long_sums(node):
            self.line(f"added({times}, {name});")

    def begin(self, accumulator: Accumulator) -> None:
        name, fn = accumulator.op.name, REDUCTIONS[accumulator.op.fn].cpp
        if accumulator.axes:
            size = self.size_of(accumulator)
            array = self.array(name, accumulator.axes)
            if accumulator.long:
                self.line(f"parts_{array}.begin(worker);")
                return
            self.line(f"std::fill_n({array}, {size}, {fn}::neutral<scalar>());")
            return
        kind = self.accumulator_type(accumulator)
        if accumulator.long:
            rows = f"acc_{name}" in self.indexed
            self.line(f"acc_{name}[j] = {kind}();" if rows else f"{kind} acc_{name};")
        elif accumulator.unrolled:
            self.line(f"Vec acc_{name}[UNROLL];")
            self.line(f"for (Vec& acc : acc_{name}) acc = Vec({fn}::neutral<scalar>());")
        elif f"acc_{name}" in self.indexed:
            self.line(f"acc_{name}[j] = {kind}({fn}::neutral<scalar>());")
        else:
            self.line(f"{kind} acc_{name}({fn}::neutral<scalar>());")

    def accumulate(self, accumulator: Accumulator) -> None:
        op, value = accumulator.op, accumulator.operand
        fn = REDUCTIONS[op.fn].cpp
        text, lanes = self.as_number(value), "lanes" if self.is_vector(value) else "0"
        if not accumulator.axes:
            target, unrolled = self.name(f"acc_{op.name}"), accumulator.unrolled
            if accumulator.long:
                target += ".part[slot]" if unrolled else ".part[0]"
            elif unrolled:
                target += "[slot]"
            self.line(f"accumulate<{fn}>({target}, {text}, {lanes});")
            return
        if self.is_vector(value) and not self.is_vector(op.name):
            text, lanes = f"across<{fn}>({text}, lanes)", "0"
        if op.name in self.held:
            self.line(f"accumulate<{fn}>(held_{op.name}, {text}, {lanes});")
        elif self.is_vector(op.name):
            self.line(f"add_to<{fn}>({self.element(op.name, accumulator.axes)}, {text}, lanes);")
        else:
            self.line(f"accumulate<{fn}>(*({self.element(op.name, accumulator.axes)}), {text}, 0);")

    def across(self, accumulator: Accumulator) -> str:
        """An accumulator's content: lanes combined where the lanes were reduced."""
        name = self.name(f"acc_{accumulator.op.name}")
        if accumulator.long:
            name += ".total()"
        reduced = self.plan.vector in accumulator.op.axes
        return f"across<{REDUCTIONS[accumulator.op.fn].cpp}>({name})" if reduced else name

    def finish(self, accumulator: Accumulator) -> None:
        array = self.array(accumulator.op.name, accumulator.axes)
        if not accumulator.axes:
            self.define(accumulator.op.name, self.across(accumulator))
        elif accumulator.long:
            self.line(f"parts_{array}.close(worker);")

    # -- arrays

    def keep(self, value: str, axes: tuple[str, ...]) -> None:
        write = "store({}, {}, lanes);" if self.is_vector(value) else "*({}) = {};"
        self.line(write.format(self.element(value, axes), self.as_number(value)))

    def recall(self, value: str, axes: tuple[str, ...]) -> None:
        text = self.read(value, self.element(value, axes))
        if value in self.truth:  # kept as a number
            text = f"mask({text})" if self.is_vector(value) else f"mask_of({text})"
        self.define(value, text)

    def regroup(self, op: Op, array: Recall) -> None:
        mine = set(array.axes) ^ set(op.axes)
        axes = [axis.name for axis in self.plan.axes if axis.name in mine]
        offset = self.offset(self.plan.array_strides(axes))
        self.define(
            op.name, self.read(op.name, f"{self.array(array.value, array.axes)} + {offset}")
        )

    def read(self, value: str, address: str) -> str:
        """A value's number, or its lanes, in an array."""
        return f"load<scalar>({address}, lanes)" if self.is_vector(value) else f"*({address})"

    def hold(self, accumulator: Accumulator) -> None:
        """Reads an array's element once for all rows of a jam."""
        name, element = accumulator.op.name, self.element(accumulator.op.name, accumulator.axes)
        vector = self.plan.vector in accumulator.axes
        read = f"load<scalar>({element}, lanes)" if vector else f"*({element})"
        self.line(f"{'Vec' if vector else 'scalar'} held_{name} = {read};")
        self.held.add(name)

    def release(self, accumulator: Accumulator) -> None:
        name, element = accumulator.op.name, self.element(accumulator.op.name, accumulator.axes)
        vector = self.plan.vector in accumulator.axes
        self.line(
            f"store({element}, held_{name}, lanes);" if vector else f"*({element}) = held_{name};"
        )
        self.held.discard(name)
