"""A launch without loops in CUDA C++: a thread for each element of its axes. Where teams have left
parts of sums, a warp for 32 neighbours and as many more as share out the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_names import CudaNames
from normpass.backend.codegen.text import index_expression
from normpass.backend.program.reductions import REDUCTIONS
from normpass.backend.program.team import WARP
from normpass.backend.program.tree import Compute, Keep, Load, Recall, Store
from normpass.passes.region import product

if TYPE_CHECKING:
    from normpass.backend.program.tree import Accumulator, Leaf, Node


class ElementsPrinter(CudaNames):
    """Prints one launch without loops."""

    def source(self) -> list[str]:
        self.indent = 1
        launch, threads = self.launch, self.team.threads
        combined = {each.op.name: each for each in launch.combined}
        count = index_expression(product(axis.extent for axis in launch.outer))
        if combined:
            self.line("ON_CHIP(chip);")
            lanes = f"blockIdx.x * int64_t({WARP}) + threadIdx.x % {WARP}"
        else:
            lanes = f"blockIdx.x * int64_t({threads}) + threadIdx.x"
        self.line(f"const int64_t element = {lanes};")
        self.line(f"const bool there = element < {count};")
        self.unravel(launch.outer, "element")
        self.scalars()
        rest: list[Node] = []
        for node in launch.body:
            if isinstance(node, Recall) and node.value in combined:
                self.combine(combined[node.value])
            else:
                rest.append(node)
        first = f"threadIdx.x < {WARP} && " if combined else ""
        with self.block(f"if ({first}there)"):
            for node in rest:
                self.leaf(node)
        return [*self.head(), *self.lines, "}"]

    def combine(self, accumulator: Accumulator) -> None:
        """One element's parts of all teams."""
        fn, name = REDUCTIONS[accumulator.op.fn].cpp, accumulator.op.name
        offset = self.offset(self.plan.array_strides(accumulator.axes))
        apart = index_expression(product(self.plan.axis[a].extent for a in accumulator.axes))
        address = f"parts_{name} + {offset}".removesuffix(" + 0")
        on_chip = "reinterpret_cast<scalar*>(chip)"
        self.define(
            name,
            f"combine<{fn}, {self.team.threads}>({address}, n_parts_{name}, {apart}, there, "
            f"{on_chip})",
        )

    def leaf(self, node: Node | Leaf) -> None:
        match node:
            case Load(access):
                name = access.buffer.name
                self.define(name, self.number_at(name, self.address(access)))
            case Compute(op):
                self.compute(op)
            case Recall(value, axes, _):
                self.recall(value, axes)
            case Keep(value, _, _):
                self.line(f"*({self.kept(value)}) = {self.as_number(value)};")
            case Store(output, access):
                self.line(f"put({self.address(access)}, {self.as_number(output.value)});")
            case _:
                raise AssertionError(f"expected a value of one element, found {node}")
