"""The loops inside of what workers divide among them, in C++: over lanes, over rows one by one and
over rows that go together.

cpp_leaves.py prints what stands in them, cpp.py what surrounds them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from normpass.backend.codegen.cpp_leaves import LeafPrinter
from normpass.backend.program.reductions import REDUCTIONS
from normpass.backend.program.tree import (
    Abreast,
    Accumulate,
    Begin,
    Compute,
    Finish,
    Jam,
    Keep,
    Lanes,
    Leaf,
    Load,
    Loop,
    Node,
    Recall,
    Regroup,
    Store,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# Rows that are left of many that go together, at a time.
FEWER = 4


class LoopPrinter(LeafPrinter):
    """Prints loops, with all that is in them."""

    def loop(self, node: Loop, begin: str, end: str, sums: Sequence[str] = ()) -> None:
        """A loop from one place to another; `sums` are the arrays that its rows are added to."""
        name = node.axis.name
        match node.kind:
            case Lanes() as lanes:
                self.vector_loop(node, lanes, begin, end)
            case Jam(rows):
                self.jam_loop(node, rows, begin, end, sums)
            case Abreast():
                self.abreast_loop(node, begin, end, sums)
            case None:
                with self.block(f"for (int64_t {name} = {begin}; {name} < {end}; ++{name})"):
                    self.cascade(sums, name, begin)
                    self.body(node.body)
                    self.added(node)

    def cascade(self, sums: Sequence[str], place: str, begin: str, step: str = "1") -> None:
        """Every so many rows, sums are put on top of those before."""
        if not sums:
            return
        if begin == "run.begin":  # one of many short loops: rows are counted
            self.line(f"fresh += {step};")
            condition = "fresh > CASCADE"
        else:
            before = place if begin == "0" else f"({place} - {begin})"
            condition = f"{before} % CASCADE < {step}"
        with self.block(f"if ({condition})"):
            for name in sums:
                self.line(f"parts_{name}.cascade(worker);")
            if begin == "run.begin":
                self.line(f"fresh = {step};")

    def long_arrays(self, node: Loop) -> list[str]:
        """The arrays of a worker's own that long sums are added up in, row by row of this loop."""
        found = {
            self.array(leaf.accumulator.op.name, leaf.accumulator.axes): leaf.accumulator
            for leaf in walk(node)
            if isinstance(leaf, Accumulate)
        }
        return [
            name
            for name, each in found.items()
            if each.long
            and each.axes
            and node.axis == [axis for axis in self.plan.axes if axis.name in each.op.axes][-1]
        ]

    def vector_loop(self, node: Loop, kind: Lanes, begin: str, end: str) -> None:
        """A loop a vector at a time; what is left at the end goes through the same body."""
        name = node.axis.name
        body = f"[&](int64_t {name}, auto lanes, auto slot)"
        tail = ", ".join(["}", *self.long_sums(node)])
        head = f"each_vector<scalar, {'UNROLL' if kind.unrolled else '1'}>({begin}, {end}"
        if kind.aligned:
            row = self.address(kind.aligned, without=self.plan.vector)
            head = f"each_aligned<scalar>({row}, {end}, past_caches"
        with self.block(f"{head}, {body}", f"{tail});"):
            self.body(node.body)

    def body(self, nodes: Sequence[Node]) -> None:
        """A body inside a loop: runs of leaves, and loops between them."""
        outlive = any(isinstance(node, Loop) for node in nodes)
        before = set(self.indexed)
        run: list[Leaf] = []
        for node in nodes:
            if not isinstance(node, Loop):
                run.append(node)
                continue
            self.run(run, outlive=outlive)
            run = []
            self.inner_loop(node)
        self.run(run, outlive=outlive)
        self.indexed = before

    def inner_loop(self, node: Loop) -> None:
        """One of the loops in a body, all of it."""
        sums = [] if isinstance(node.kind, Lanes) else self.long_arrays(node)
        self.loop(node, "0", self.extent(node.axis), sums)

    def run(self, nodes: Sequence[Leaf], *, outlive: bool) -> None:
        """Leaves in a row. Those that differ between rows that go together stand in a loop over
        these; what such a loop defines is declared before it if later nodes need it, one for each
        row.
        """
        rows = [node for node in nodes if self.per_row(node)]
        self.leaves([node for node in nodes if node not in rows])
        if not rows:
            return
        held = [
            node.accumulator
            for node in rows
            if isinstance(node, Accumulate)
            if node.accumulator.axes and self.jam not in node.accumulator.axes
        ]
        crossed = [n for n in rows if isinstance(n, Load | Store) and self.is_crossed(n.access)]
        rows = [node for node in rows if not (isinstance(node, Load) and node in crossed)]
        for accumulator in held:
            self.hold(accumulator)
        for each in crossed:
            self.begin_crossed(each)
        for node in rows if outlive else ():
            self.declare(node)
        self.rows(rows, crossed)
        for each in crossed:
            self.end_crossed(each)
        for accumulator in held:
            self.release(accumulator)

    def rows(self, nodes: Sequence[Leaf], crossed: Sequence[Leaf]) -> None:
        """A loop over the rows that go together, for leaves that differ between them."""
        if not self.abreast:
            self.line("#pragma GCC unroll 4")
        with self.each_row(*(("first", "last") if self.abreast else ("0", "J"))):
            self.leaves(nodes, crossed)

    @contextmanager
    def each_row(self, first: str, last: str) -> Iterator[None]:
        """A loop over some of the rows that go together."""
        with self.block(f"for (int j = {first}; j < {last}; ++j)"):
            self.line(f"const int64_t {self.jam} = {self.jam}0 + j;")
            yield

    def per_row(self, node: Leaf) -> bool:
        """Whether a leaf does something else for each of the rows that go together."""
        if not self.together_now:
            return False
        match node:
            case Load(access) | Store(_, access):
                return self.jam in access.strides
            case Compute(op) | Regroup(op, _):
                return self.jam in self.varies[op.name]
            case Begin(accumulator) | Finish(accumulator):
                return self.jam in self.varies[accumulator.op.name]
            case Accumulate(accumulator):
                return self.jam in self.varies[accumulator.operand]
            case Keep(value, _, _) | Recall(value, _, _):
                return self.jam in self.varies[value]
        return False

    def declare(self, node: Leaf) -> None:
        """Declares what a leaf defines, once for each jammed row."""
        match node:
            case Load(access):
                name, kind = access.buffer.name, self.type_of(access.buffer.name)
            case Compute(op):
                name, kind = op.name, self.type_of(op.name)
            case Begin(accumulator):
                name, kind = f"acc_{accumulator.op.name}", self.accumulator_type(accumulator)
            case Finish(accumulator):
                name, kind = accumulator.op.name, self.type_of(accumulator.op.name)
            case Recall(value, _, _):
                name, kind = value, self.type_of(value)
            case _:
                return
        self.indexed.add(name)
        self.line(f"{kind} {name}[J];")

    # -- rows that go together

    def jam_loop(self, node: Loop, count: int, begin: str, end: str, sums: Sequence[str]) -> None:
        """Several rows at a time, then fewer, then one at a time, through the same body."""
        name = node.axis.name
        self.together_now = True
        with self.block(f"const auto rows = [&]<int J>(int64_t {name}0)", "};"):
            self.cascade(sums, f"{name}0", begin, "J")
            self.body(node.body)
            self.added(node, "J")
        self.together_now = False
        self.line(f"int64_t {name}0 = {begin};")
        for some in (count, FEWER) if count > FEWER else (count,):
            self.line(f"for (; {name}0 + {some} <= {end}; {name}0 += {some})")
            self.line(f"  rows.template operator()<{some}>({name}0);")
        self.line(f"for (; {name}0 < {end}; ++{name}0) rows.template operator()<1>({name}0);")

    def abreast_loop(self, node: Loop, begin: str, end: str, sums: Sequence[str]) -> None:
        """As many rows at a time as there are lanes, or what is left of them. Lanes run along each
        row in loops over its elements, and along the rows in what stands between these.
        """
        name = node.axis.name
        known = set(self.each)
        head = f"for (int64_t {name}0 = {begin}; {name}0 < {end}; {name}0 += Vec::size())"
        with self.block(head):
            self.line(f"const int rows = std::min<int64_t>(Vec::size(), {end} - {name}0);")
            self.cascade(sums, f"{name}0", begin, "rows")
            for child in node.body:
                if not isinstance(child, Loop):
                    self.leaf_of_rows(child)
                    continue
                self.one_by_one(child)
                self.elements(child)
        self.each = known

    def leaf_of_rows(self, leaf: Leaf) -> None:
        """What stands between the loops over rows' elements, in lanes along the rows."""
        match leaf:
            case Begin(accumulator):
                self.line(f"Vec rows_{accumulator.op.name}[Vec::size()];")
            case Finish(accumulator):
                name, fn = accumulator.op.name, REDUCTIONS[accumulator.op.fn].cpp
                self.line(f"const Vec {name} = across_rows<{fn}>(rows_{name});")
            case _:
                self.along, self.lanes, self.first = str(self.jam), "rows", self.jam
                self.leaf(leaf)
                self.along, self.lanes, self.first = self.plan.vector, "lanes", None

    def one_by_one(self, node: Loop) -> None:
        """Makes the numbers that each row has one of readable for a loop over rows' elements."""
        used: set[str] = set()
        for leaf in node.body:
            match leaf:
                case Compute(op):
                    used.update(arg for arg in op.args if isinstance(arg, str))
                case Store(output, _):
                    used.add(output.value)
        for value, axes in self.varies.items():
            one_a_row = self.jam in axes and self.plan.vector not in axes
            if value in used and one_a_row and value not in self.each:
                self.line(f"const Each<scalar> each_{value}({value});")
                self.each.add(value)

    def elements(self, node: Loop) -> None:
        """A loop over rows' elements: one row after another where each has sums in registers, else
        all rows' at a time.
        """
        sums = [
            leaf.accumulator
            for leaf in node.body
            if isinstance(leaf, Accumulate) and leaf.accumulator.unrolled
        ]
        if not sums:
            with self.block("for (int first = 0; first < rows; first += GROUP)"):
                self.line("const int last = std::min(first + GROUP, rows);")
                self.together_now = True
                self.inner_loop(node)
                self.together_now = False
            return
        with self.each_row("0", "rows"):
            for accumulator in sums:
                self.begin(accumulator)
            self.inner_loop(node)
            for accumulator in sums:
                name, fn = accumulator.op.name, REDUCTIONS[accumulator.op.fn].cpp
                self.line(f"rows_{name}[j] = together<{fn}>(acc_{name});")
