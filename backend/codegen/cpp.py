"""CPU C++: prints a plan as one function over at::vec lanes and OpenMP workers.

The text is written for people: names from the region, one comment a phase, and `normpass.h` for
what would only repeat. Two things are this dialect's own. Lanes run along the plan's vector axis: a
loop over it takes a Vec at a time and its remainder through the same body. And `jam` rows go
through a body together, so that what does not depend on the row (weights, the arrays of dgamma and
dbeta) is read and written once for all of them.

This file prints the function and its loops; cpp_leaves.py prints what stands in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen.cpp_leaves import LeafPrinter
from normpass.backend.codegen.cpp_names import COMBINE, TYPES, operand
from normpass.backend.codegen.text import index_expression
from normpass.backend.tree import (
    Accumulate,
    Accumulator,
    Begin,
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
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def generate(plan: Plan) -> str:
    """The C++ source of a plan: `extern "C" void kernel(void* const* tensors, const int64_t* sizes,
    int workers, bool past_caches)`.

    tensors: the region's inputs, then its outputs. sizes: its run-time sizes. past_caches: whether
    all of that is more than caches hold.
    """
    return _Printer(plan).source()


class _Printer(LeafPrinter):
    """Prints the tree of a plan: the function, and the loops around its leaves."""

    def source(self) -> str:
        for text in str(self.region).splitlines():
            self.line(f"// {text}")
        self.line('#include "normpass.h"')
        self.line("using namespace normpass;")
        self.line(f"using scalar = {'double' if self.double else 'float'};")
        self.line("using Vec = Vectorized<scalar>;")
        self.line()
        parameters = "void* const* tensors, const int64_t* sizes, int workers, bool past_caches"
        with self.block(f'extern "C" void kernel({parameters})'):
            self.arguments()
            self.top(self.plan.body)
        return "\n".join(self.lines) + "\n"

    def arguments(self) -> None:
        """Pointers and extents by name."""
        for k, buffer in enumerate(self.buffers):
            const = "const " if k < len(self.region.inputs) else ""
            kind = f"{const}{TYPES[buffer.dtype]}*"
            self.line(f"const auto p_{buffer.name} = static_cast<{kind}>(tensors[{k}]);")
        for k, name in enumerate(self.region.runtime_sizes):
            self.line(f"const int64_t n_{name} = sizes[{k}];")
        for axis in self.plan.axes:
            if axis.extent.is_number:
                self.line(f"constexpr int64_t n_{axis.name} = {axis.extent};")
            elif axis.name not in self.region.runtime_sizes:
                self.line(f"const int64_t n_{axis.name} = {index_expression(axis.extent)};")

    # -- loops

    def top(self, nodes: Sequence[Node]) -> None:
        """The outermost body: what is shared by all workers, and the loops they divide."""
        for node in nodes:
            if isinstance(node, Loop):
                self.shared_loop(node)
            elif isinstance(node, Begin) and node.accumulator.shared:
                self.begin_shared(node.accumulator)
            elif isinstance(node, Finish) and node.accumulator.shared:
                self.finish_shared(node.accumulator)
            elif isinstance(node, Begin) and node.accumulator.axes:
                self.begin_alone(node.accumulator)
            else:
                self.leaf(node)

    def begin_shared(self, accumulator: Accumulator) -> None:
        name = self.array(accumulator.op.name, accumulator.axes)
        kind = f"Partials<scalar, {COMBINE[accumulator.op.fn]}>"
        self.line(f"{kind} parts_{name}(workers, {self.size_of(accumulator)});")

    def begin_alone(self, accumulator: Accumulator) -> None:
        """An array of a nest that does without the loop that workers divide."""
        name = self.array(accumulator.op.name, accumulator.axes)
        self.line(f"Arrays<scalar> parts_{name}(1, {self.size_of(accumulator)});")
        self.line(f"scalar* const {name} = parts_{name}.of(0);")
        self.begin(accumulator)

    def finish_shared(self, accumulator: Accumulator) -> None:
        name = self.array(accumulator.op.name, accumulator.axes)
        self.line(f"const scalar* const {name} = parts_{name}.combine();")
        if not accumulator.axes:
            self.define(accumulator.op.name, f"*{name}")

    def shared_loop(self, node: Loop) -> None:
        """A loop that workers divide, with the arrays that each of them has."""
        inside = list(walk(node))
        kept = {self.array(n.value, n.axes): n for n in inside if isinstance(n, Keep)}
        own = {
            self.array(n.accumulator.op.name, n.accumulator.axes): n.accumulator
            for n in inside
            if isinstance(n, Begin) and n.accumulator.axes
        }
        shared = {
            self.array(n.accumulator.op.name, n.accumulator.axes): n.accumulator
            for n in inside
            if isinstance(n, Accumulate) and n.accumulator.shared
        }
        self.line()
        for name, keep in kept.items():
            size = self.array_size(keep.value, keep.axes)
            private = node.parallel and not keep.shared
            rows = (
                f" * {self.jam_rows}"
                if self.jam in self.varies[keep.value] and self.jam not in keep.axes
                else ""
            )
            self.line(
                f"Arrays<scalar> parts_{name}({'workers' if private else '1'}, {size}{rows});"
            )
            if not private:  # a later loop reads it
                self.line(f"scalar* const {name} = parts_{name}.of(0);")
        self.cascaded = {name for name, each in own.items() if self.is_long_array(each)}
        for name, accumulator in own.items():
            kind = "Partials<scalar, Sum>" if name in self.cascaded else "Arrays<scalar>"
            self.line(f"{kind} parts_{name}(workers, {self.size_of(accumulator)});")
        if node.parallel:
            self.line("#pragma omp parallel num_threads(workers)")
        with self.block(""):
            self.line(f"const int worker = {'omp_get_thread_num()' if node.parallel else '0'};")
            workers = "omp_get_num_threads()" if node.parallel else "1"
            unit = ", Vec::size()" if node.axis.name == self.plan.vector else ""
            self.line(f"const Share mine = share(n_{node.axis.name}, {workers}, worker{unit});")
            private_arrays = [
                name for name, keep in kept.items() if node.parallel and not keep.shared
            ]
            for name in (*private_arrays, *own, *shared):
                self.line(f"scalar* const {name} = parts_{name}.of(worker);")
            totals = [a for a in shared.values() if not a.axes]
            for accumulator in totals:
                self.begin(accumulator)
            self.divided_loop(node, [name for name, total in shared.items() if total.axes])
            self.line("settle();")
            for accumulator in totals:
                total = self.across(accumulator)
                self.line(f"*{self.array(accumulator.op.name, ())} = {total};")

    def divided_loop(self, node: Loop, sums: Sequence[str]) -> None:
        """A worker's share of a loop; `sums` are the arrays that its rows are added to."""
        name = node.axis.name
        if name == self.plan.vector:
            self.vector_loop(node, "mine.begin", "mine.end")
        elif name == self.jam:
            self.jam_loop(node, sums)
        else:
            self.following = name if self.next_row_pays(node) else None
            with self.block(f"for (int64_t {name} = mine.begin; {name} < mine.end; ++{name})"):
                self.cascade(sums, f"{name} - mine.begin")
                self.body(node.body)
                self.added(node)
            self.following = None

    def cascade(self, sums: Sequence[str], rows: str, step: str = "1") -> None:
        """Every so many rows, sums are put on top of those before."""
        if sums:
            dividend = rows if rows.isidentifier() else f"({rows})"
            with self.block(f"if ({dividend} % CASCADE < {step})"):
                for name in sums:
                    self.line(f"parts_{name}.cascade(worker);")

    def long_arrays(self, node: Loop) -> list[str]:
        """The arrays of a worker's own that long sums are added up in, row by row of this loop."""
        found = {
            self.array(leaf.accumulator.op.name, leaf.accumulator.axes): leaf.accumulator.op
            for leaf in walk(node)
            if isinstance(leaf, Accumulate)
        }
        return [
            name
            for name, op in found.items()
            if name in self.cascaded
            and node.axis == [axis for axis in self.plan.axes if axis.name in op.axes][-1]
        ]

    def next_row_pays(self, node: Loop) -> bool:
        """Whether the last pass over a row should prefetch the next one: rows are read in a first
        pass and once more from cache in a last one, which leaves memory idle.
        """
        loops = [child for child in node.body if isinstance(child, Loop)]
        return len(loops) > 1 and all(loop.axis.name == self.plan.vector for loop in loops)

    def vector_loop(self, node: Loop, begin: str, end: str) -> None:
        """A loop a vector at a time; what is left at the end goes through the same body."""
        name = node.axis.name
        reduces = any(
            isinstance(leaf, Accumulate) and self.unrolled(leaf.accumulator) for leaf in walk(node)
        )
        unroll = "UNROLL" if reduces else "1"
        body = f"[&](int64_t {name}, auto lanes, auto slot)"
        tail = ", ".join(["}", *self.long_sums(node)])
        with self.block(f"each_vector<scalar, {unroll}>({begin}, {end}, {body}", f"{tail});"):
            self.body(node.body)

    def jam_loop(self, node: Loop, sums: Sequence[str]) -> None:
        """Several rows at a time, then one at a time, through the same body."""
        name = node.axis.name
        with self.block(f"const auto rows = [&]<int J>(int64_t {name}0)", "};"):
            self.cascade(sums, f"{name}0 - mine.begin", "J")
            self.body(node.body)
            self.added(node, "J")
        self.line(f"int64_t {name}0 = mine.begin;")
        self.line(f"for (; {name}0 + {self.jam_rows} <= mine.end; {name}0 += {self.jam_rows})")
        self.line(f"  rows.template operator()<{self.jam_rows}>({name}0);")
        self.line(f"for (; {name}0 < mine.end; ++{name}0) rows.template operator()<1>({name}0);")

    def body(self, nodes: Sequence[Node]) -> None:
        """A body inside a loop: runs of leaves, and loops between them."""
        loops = [node for node in nodes if isinstance(node, Loop)]
        outlive = bool(loops)
        before = set(self.indexed)
        run: list[Leaf] = []
        for node in nodes:
            if not isinstance(node, Loop):
                run.append(node)
                continue
            self.run(run, outlive=outlive)
            run = []
            self.last_pass = node is loops[-1]
            name = node.axis.name
            if name == self.plan.vector:
                self.vector_loop(node, "0", f"n_{name}")
            else:
                with self.block(f"for (int64_t {name} = 0; {name} < n_{name}; ++{name})"):
                    self.cascade(self.long_arrays(node), name)
                    self.body(node.body)
                    self.added(node)
        self.run(run, outlive=outlive)
        self.indexed = before

    def run(self, nodes: Sequence[Leaf], *, outlive: bool) -> None:
        """Leaves in a row. Those that differ between jammed rows stand in a loop over these; what
        such a loop defines is declared before it if later nodes need it, one for each row.
        """
        rows = [node for node in nodes if self.per_row(node)]
        for node in nodes:
            if node not in rows:
                self.leaf(node)
        if not rows:
            return
        arrays = [n.accumulator for n in rows if isinstance(n, Accumulate) and n.accumulator.axes]
        for accumulator in arrays:
            self.hold(accumulator)
        if outlive:
            for node in rows:
                self.declare(node)
        self.line("#pragma GCC unroll 4")
        with self.block("for (int j = 0; j < J; ++j)"):
            self.line(f"const int64_t {self.jam} = {self.jam}0 + j;")
            for node in rows:
                self.leaf(node)
        for accumulator in arrays:
            self.release(accumulator)

    def per_row(self, node: Leaf) -> bool:
        """Whether a leaf does something else for each of the rows that go together."""
        if self.jam is None:
            return False
        match node:
            case Load(access):
                return self.jam in access.strides
            case Compute(op):
                return self.jam in self.varies[op.name]
            case Begin(accumulator) | Finish(accumulator):
                return self.jam in self.varies[accumulator.op.name]
            case Accumulate(accumulator):
                return self.jam in self.varies[operand(accumulator)]
            case Keep(value, _, _) | Recall(value, _, _):
                return self.jam in self.varies[value]
            case Regroup(op, _):
                return self.jam in self.varies[op.name]
            case Store(_, access):
                return self.jam in access.strides

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
