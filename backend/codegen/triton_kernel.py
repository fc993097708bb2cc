"""One launch of a plan, printed as a Triton kernel: its parameters, a program's share, its phases.

triton_leaves.py prints what stands in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normpass.backend.codegen.text import TYPES, extent_name
from normpass.backend.codegen.triton_layout import WIDE, divide_up, size_text, times
from normpass.backend.codegen.triton_leaves import LeafPrinter
from normpass.backend.codegen.triton_program import STAGES
from normpass.backend.program.sizes import symbol
from normpass.backend.program.tree import SHARED, Loop, Staged
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.codegen.names import Names
    from normpass.backend.program.tree import Fetch, Launch, LoopAxis, Node, Plan


SHARES = "shares"  # the parameter that says among how many programs rows are shared out


@dataclass(frozen=True)
class Kernel:
    """One `@triton.jit` function.

    arguments: name and Triton type of each, such as "*fp32" and "i32". warps: of a program.
    programs: for each multiprocessor. fetch: what it reads ahead if it has the parameter STAGES.
    """

    name: str
    arguments: tuple[tuple[str, str], ...]
    warps: int
    programs: int = 1
    fetch: Fetch | None = None


class KernelPrinter(LeafPrinter):
    """Prints one launch."""

    def __init__(self, plan: Plan, launch: Launch, number: int, names: Names) -> None:
        super().__init__(plan, launch, number, names)
        self.kernel = Kernel("", (), self.blocks.warps)

    # -- text

    def source(self) -> list[str]:
        """The kernel's lines. Also completes `kernel`."""
        self.coordinates()
        for leaf in self.launch.scalars:
            self.leaf(leaf)
        for axis in self.launch.inner:
            if axis.name in self.blocks.resident:
                for _ in self.each_piece([axis.name]):
                    self.resident_index(axis)
        for load in self.launch.held:
            for _ in self.each_piece(load.access.strides):
                self.leaf(load)
        self.shares()
        head = self.extents()
        arguments = self.arguments()
        name = f"{re.sub(r'[^A-Za-z0-9_]', '_', self.region.name)}_{self.number}"
        fetch = self.launch.fetch if STAGES in self.used else None
        self.kernel = Kernel(name, arguments, self.blocks.warps, self.blocks.programs, fetch)
        sizes = [argument for argument, kind in arguments if not kind.startswith("*")]
        plain = f"(do_not_specialize={sizes!r})".replace("'", '"') if sizes else ""
        stages = [f"{STAGES}: tl.constexpr"] if STAGES in self.used else []
        signature = ", ".join([*(argument for argument, _ in arguments), *stages])
        return [f"@triton.jit{plain}", f"def {name}({signature}):", *head, *self.lines]

    def extents(self) -> list[str]:
        """Definitions of the extents that the text uses and that are not literals."""
        lines = []
        for axis in self.plan.axes:
            name = extent_name(axis, self.region)
            if name in self.used and size_text(axis.extent) != name:
                expression = self.size(axis.extent)
                if axis.extent.is_number:
                    expression = f"tl.full([], {expression}, tl.int64)"
                lines.append(f"    {name} = {expression}")
        used = [size for size in self.region.runtime_sizes if f"n_{size}" in self.used]
        return [*map(self.size_line, used), *lines]

    def size_line(self, size: str) -> str:
        """A run-time size, with what divides it: where rows begin at multiples of a vector, and
        end there, Triton reads vectors.
        """
        number, divisor = f"n_{size}.to(tl.int64)", self.divisor(symbol(size))
        known = f"tl.multiple_of({number}, {divisor})" if divisor > 1 else number
        return f"    n_{size} = {known}"

    def arguments(self) -> tuple[tuple[str, str], ...]:
        """The kernel's parameters: of all there could be, those that its text uses."""
        outputs = [output.buffer for output in self.region.outputs]
        known = [
            (f"p_{b.name}", f"*{TYPES[b.dtype].triton}") for b in (*self.region.inputs, *outputs)
        ]
        work = f"*{self.type.removeprefix('tl.float')}".replace("*", "*fp")
        values = [op.name for op in self.region.ops]
        known += [(f"{kind}_{value}", work) for kind in ("parts", "kept") for value in values]
        known += [(f"n_{name}", "i32") for name in self.region.runtime_sizes]
        known += [(SHARES, "i32")]
        known += [(f"n_parts_{value}", "i32") for value in values]
        return tuple((name, kind) for name, kind in known if name in self.used)

    # -- programs

    def shares(self) -> None:
        """The body: once for a tile, or for all rows of a share, and what is added up in it."""
        axes, block = self.blocks.shares, self.blocks.size.get(SHARED, 1)
        if axes:
            self.share(axes, block)
        for accumulator in self.launch.shared:
            for _ in self.each_piece(accumulator.axes):
                self.begin(accumulator)
        if axes:
            self.rows(axes, block)
        else:
            self.body(self.launch.body)
        for accumulator in self.launch.shared:
            for _ in self.each_piece(accumulator.axes):
                self.leave(accumulator)

    def share(self, axes: Sequence[str], block: int) -> None:
        """From which row to which a program goes."""
        count = " * ".join(self.extent(axis) for axis in axes)
        if not any(self.wide(axis) for axis in axes):
            total = product(int(self.plan.axis[axis].extent) for axis in axes)
            count = str(total) if total < WIDE else f"tl.full([], {total}, tl.int64)"
        blocks = divide_up(count, block, "tl.cdiv")
        self.line(f"rows = {times(f'tl.cdiv({blocks}, {self.use(SHARES)})', str(block))}")
        self.line("first = share * rows")
        self.line(f"last = tl.minimum(first + rows, {count})")

    def rows(self, axes: Sequence[str], block: int) -> None:
        """The body for each block of a program's rows."""
        row = self.names.axis[axes[0]] if len(axes) == 1 else "row"
        head, step = (row, []) if block == 1 else (f"{row}_0", [str(block)])
        bounds = self.range("first", "last", *step, staged=self.launch.fetch.rows)
        with self.loop(f"for {head} in {bounds}:"):
            if block > 1:
                self.line(f"{row} = {head} + {self.lanes(SHARED)}")
                self.line(f"mask_{row} = {row} < last")
                self.masks[SHARED] = f"mask_{row}"
            if len(axes) > 1:
                self.unravel(row)
            self.body(self.launch.body)
        self.masks.pop(SHARED, None)

    # -- bodies

    def body(self, nodes: Sequence[Node]) -> None:
        phases = sum(isinstance(node, Loop) for node in nodes)
        phase = 0
        for node in nodes:
            if not isinstance(node, Loop):
                self.leaf(node)
                continue
            title = f"phase {phase}, over" if phases > 1 else "over"
            phase += 1
            names = [node.axis.name, *(a.name for a in _nest(node))]
            if not any(self.dims_of([a]) == [] and a not in self.blocks.resident for a in names):
                self.line(f"# {title} {', '.join(names)}")
            else:
                self.line(f"# {title} {node.axis.name}")
            before = set(self.scope)
            with self.over([node.axis.name], staged=isinstance(node.kind, Staged)):
                for _ in self.each_piece([node.axis.name]):
                    self.body(node.body)
            if self.blocks.again and node.axis.name in self.blocks.pieces:
                self.scope = before  # what it read is read again


def _nest(loop: Loop) -> list[LoopAxis]:
    """The axes of the loops directly within a loop that has nothing else in it."""
    axes = []
    while len(loop.body) == 1 and isinstance(loop.body[0], Loop):
        loop = loop.body[0]
        axes.append(loop.axis)
    return axes
