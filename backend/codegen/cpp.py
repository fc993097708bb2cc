"""CPU C++: prints a plan as one function over at::vec lanes and OpenMP workers.

The text is written for people: names from the region, one comment a phase, and `normpass.h` for
what would only repeat. Two things are this dialect's own. Lanes run along the plan's vector axis: a
loop over it takes a Vec at a time and its remainder through the same body. And rows may go through
a body together (cpp_rows.py), so that what does not depend on the row (weights, the arrays of
dgamma and dbeta) is read and written once for all of them.

This file prints the function and what workers share; cpp_loops.py prints the loops in their shares,
cpp_leaves.py what stands in these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen.cpp_loops import LoopPrinter
from normpass.backend.codegen.text import TYPES, index_expression
from normpass.backend.program.reductions import REDUCTIONS
from normpass.backend.program.tree import (
    Accumulator,
    Allocate,
    Begin,
    Finish,
    Lanes,
    Loop,
    Node,
    Plan,
    Workspace,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def generate(plan: Plan) -> str:
    """The C++ source of a plan: `extern "C" void kernel(void* const* tensors, const int64_t* sizes,
    int workers, bool past_caches)`.

    tensors: the region's inputs, then its outputs. sizes: its run-time sizes. past_caches: whether
    all of that is more than caches hold.
    """
    return _Printer(plan).source(
        '#include "normpass.h"\nusing namespace normpass;', 'extern "C" void'
    )


def generate_within(plan: Plan) -> str:
    """The same function without the header, `static void kernel(...)`: what stands in a namespace
    of a larger file, itself in `normpass`.
    """
    return _Printer(plan).source("", "static void")


class _Printer(LoopPrinter):
    """Prints the tree of a plan: the function, and the loops around its leaves."""

    def source(self, head: str, kind: str) -> str:
        for text in str(self.region).splitlines():
            self.line(f"// {text}")
        for text in head.splitlines():
            self.line(text)
        self.line(f"using scalar = {'double' if self.double else 'float'};")
        self.line("using Vec = Vectorized<scalar>;")
        self.line()
        parameters = "void* const* tensors, const int64_t* sizes, int workers, bool past_caches"
        with self.block(f"{kind} kernel({parameters})"):
            self.arguments()
            self.top(self.plan.body)
        return "\n".join(self.lines) + "\n"

    def arguments(self) -> None:
        """Pointers and extents by name."""
        for k, buffer in enumerate(self.buffers):
            const = "const " if k < len(self.region.inputs) else ""
            kind = f"{const}{TYPES[buffer.dtype].cpp}*"
            self.line(f"const auto p_{buffer.name} = static_cast<{kind}>(tensors[{k}]);")
        for k, name in enumerate(self.region.runtime_sizes):
            self.line(f"const int64_t n_{name} = sizes[{k}];")
        for axis in self.plan.axes:
            if axis.extent.is_number:
                self.line(f"constexpr int64_t {self.extent(axis)} = {axis.extent};")
            elif axis.name not in self.region.runtime_sizes:
                self.line(f"const int64_t n_{axis.name} = {index_expression(axis.extent)};")

    # -- loops

    def top(self, nodes: Sequence[Node]) -> None:
        """The outermost body: arrays, and the loops that workers divide."""
        before: Node | None = None
        for node in nodes:
            if self.begins_part(node) and not isinstance(before, Allocate):
                self.line()
            before = node
            match node:
                case Loop():
                    self.shared_loop(node)
                case Allocate(space):
                    self.allocate(space)
                case Finish(accumulator) if accumulator.shared:
                    self.finish_shared(accumulator)
                case Begin(accumulator) if accumulator.shared:
                    pass  # each worker begins
                case _:
                    self.leaf(node)

    def begins_part(self, node: Node) -> bool:
        """Whether a loop begins here, or the arrays that it is the first to need."""
        match node:
            case Allocate(space):
                return not space.is_shared_sum
            case Loop():
                return True
        return False

    def allocate(self, space: Workspace) -> None:
        name, size = self.array(space.value, space.axes), self.array_size(space.value, space.axes)
        workers = "workers" if space.each else "1"
        rows = f" * {self.rows_together()}" if space.rows else ""
        kind = "Arrays<scalar>"
        if space.sums and (space.sums.shared or space.sums.long):
            kind = f"Partials<scalar, {REDUCTIONS[space.sums.op.fn].cpp}>"
        self.line(f"{kind} parts_{name}({workers}, {size}{rows});")
        if not space.each:  # a later loop reads it
            self.line(f"scalar* const {name} = parts_{name}.of(0);")

    def finish_shared(self, accumulator: Accumulator) -> None:
        name = self.array(accumulator.op.name, accumulator.axes)
        self.line(f"const scalar* const {name} = parts_{name}.combine();")
        if not accumulator.axes:
            self.define(accumulator.op.name, f"*{name}")

    def shared_loop(self, node: Loop) -> None:
        """A loop that workers divide, with the arrays that each of them has."""
        if node.parallel:
            self.line("#pragma omp parallel num_threads(workers)")
        with self.block(""):
            self.line(f"const int worker = {'omp_get_thread_num()' if node.parallel else '0'};")
            workers = "omp_get_num_threads()" if node.parallel else "1"
            unit = ", Vec::size()" if isinstance(node.kind, Lanes) else ""
            nest = self.divided(node)
            size = " * ".join(self.extent(loop.axis) for loop in nest)
            self.line(f"const Share mine = share({size}, {workers}, worker{unit});")
            for name in (self.array(space.value, space.axes) for space in node.own):
                self.line(f"scalar* const {name} = parts_{name}.of(worker);")
            shared = [space for space in node.own if space.is_shared_sum]
            for space in shared:
                self.line(f"parts_{self.array(space.value, space.axes)}.begin(worker);")
            totals = [space.sums for space in shared if space.sums and not space.axes]
            for accumulator in totals:
                self.begin(accumulator)
            arrays = [self.array(space.value, space.axes) for space in shared if space.axes]
            self.divided_loop(nest, arrays)
            self.line("settle();")
            for accumulator in totals:
                total = self.across(accumulator)
                self.line(f"*{self.array(accumulator.op.name, ())} = {total};")

    def divided(self, node: Loop) -> list[Loop]:
        """The loops that workers divide as if they were one."""
        inner = [child for child in node.body if isinstance(child, Loop) and child.parallel]
        return [node, *(each for loop in inner for each in self.divided(loop))]

    def divided_loop(self, nest: Sequence[Loop], sums: Sequence[str]) -> None:
        """A worker's share of loops; `sums` are the arrays that their rows are added to."""
        *outer, innermost = nest
        if not outer:
            self.loop(innermost, "mine.begin", "mine.end", sums)
            return
        if sums:
            self.line("int64_t fresh = 0;")
        extents = ", ".join(self.extent(loop.axis) for loop in nest)
        with self.block(f"for (Runs<{len(nest)}> run({{{extents}}}, mine); run; run.next())"):
            for k, loop in enumerate(outer):
                self.line(f"const int64_t {loop.axis.name} = run.at[{k}];")
                values = [child for child in loop.body if not isinstance(child, Loop)]
                self.run(values, outlive=True)
            self.loop(innermost, "run.begin", "run.end", sums)
