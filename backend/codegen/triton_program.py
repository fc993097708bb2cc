"""The frame of a Triton kernel, as text: a program's elements, loops, masked access."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from normpass.backend.codegen.triton_layout import Layout, divided

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from normpass.backend.codegen.names import Names
    from normpass.backend.program.tree import Launch, LoopAxis, Plan


# The parameter that says of how many iterations a loop's tensors are on chip at once.
STAGES = "STAGES"


class ProgramPrinter(Layout):
    """Collects a kernel's lines. `scope`: the values defined where the text has come to."""

    def __init__(self, plan: Plan, launch: Launch, names: Names) -> None:
        super().__init__(plan, launch, names)
        self.lines: list[str] = []
        self.indent = 1
        self.scope: set[str] = set()

    def line(self, text: str = "") -> None:
        self.lines.append(f"{'    ' * self.indent}{text}" if text else "")

    @contextmanager
    def loop(self, head: str) -> Iterator[None]:
        """A loop of the kernel's text: what is defined within is gone after it."""
        before = set(self.scope)
        self.line(head)
        self.indent += 1
        yield
        self.indent -= 1
        self.scope = before

    def read(self, address: str, dims: Sequence[str], other: str = "0.0") -> str:
        mask = self.mask(dims)
        return f"tl.load({address}, mask={mask}, other={other})" if mask else f"tl.load({address})"

    def write(self, address: str, value: str, dims: Sequence[str]) -> None:
        mask = self.mask(dims)
        self.line(f"tl.store({address}, {value}{f', mask={mask}' if mask else ''})")

    def coordinates(self) -> None:
        """Which tile, or which share of the rows, a program has."""
        if not self.launch.outer:
            return
        long = any(self.wide(axis.name) for axis in self.launch.outer)
        program = f"tl.program_id(0){'.to(tl.int64)' if long else ''}"
        if len(self.tiles) + bool(self.blocks.shares) == 1:
            self.program = program
        else:
            self.line(f"program = {program}")
        for k, axis in enumerate(self.tiles):
            first = k == 0 and not self.blocks.shares
            self.tile_index(axis, self.coordinate(axis, first=first))
        if self.blocks.shares:
            self.line(f"share = {self.program}{divided(self.tiles_text(self.tiles, 'tl.cdiv'))}")

    def tile_index(self, axis: LoopAxis, number: str) -> None:
        index, block = self.names.axis[axis.name], self.blocks.size[axis.name]
        if block == 1:
            self.line(f"{index} = {number}")
            return
        number = f"({number})" if " " in number else number
        first = "" if number == "0" else f"{number} * {block} + "
        self.line(f"{index} = {first}{self.lanes(axis.name)}")
        self.bound(axis)

    def resident_index(self, axis: LoopAxis) -> None:
        """The index along an axis that blocks cover."""
        index, size = self.index(axis.name), self.blocks.size[axis.name]
        if size == 1:
            self.line(f"{index} = 0")
            if axis.most == 1:
                return
        wide = ".to(tl.int64)" if self.wide(axis.name) else ""
        if size > 1:
            first = self.piece.get(axis.name, 0) * size
            self.line(f"{index} = {f'{first} + ' if first else ''}{self.lanes(axis.name)}{wide}")
        self.bound(axis)

    def bound(self, axis: LoopAxis) -> None:
        """The mask of an axis, if its blocks may reach beyond its end."""
        block, extent = self.blocks.size[axis.name], axis.extent
        is_inside = axis.name in self.piece and (self.piece[axis.name] + 1) * block <= extent
        if extent.is_number and extent > 0 and (extent % block == 0 or is_inside):
            return
        suffix = self.suffix([axis.name])
        self.line(f"mask_{axis.name}{suffix} = {self.index(axis.name)} < {self.extent(axis.name)}")
        self.masks[f"{axis.name}{suffix}"] = f"mask_{axis.name}{suffix}"

    def range(self, *bounds: str, staged: bool) -> str:
        """What a loop goes over. staged: what its next iterations read is fetched meanwhile."""
        text = ", ".join(bounds)
        return f"tl.range({text}, num_stages={self.use(STAGES)})" if staged else f"range({text})"

    @contextmanager
    def over(self, axes: Sequence[str], *, staged: bool = False) -> Iterator[None]:
        """Loops over those of some axes that no block covers."""
        if not axes:
            yield
            return
        axis, rest = axes[0], axes[1:]
        if axis in self.blocks.resident:
            with self.over(rest):
                yield
            return
        index, block = self.names.axis[axis], self.blocks.size[axis]
        head, step = (index, []) if block == 1 else (f"{index}_0", [str(block)])
        bounds = self.range("0", self.extent(axis), *step, staged=staged)
        with self.loop(f"for {head} in {bounds}:"):
            if block > 1:
                self.line(f"{index} = {head} + {self.lanes(axis)}")
                self.bound(self.plan.axis[axis])
            with self.over(rest):
                yield

    def unravel(self, row: str) -> None:
        """The index along each of several shared axes."""
        after: list[str] = []
        for k, axis in reversed(list(enumerate(self.blocks.shares))):
            text = row
            if after:
                text += f" // {after[0]}" if len(after) == 1 else f" // ({' * '.join(after)})"
            if k > 0:
                text += f" % {self.extent(axis)}"
            self.line(f"{self.names.axis[axis]} = {text}")
            if k > 0:
                after.insert(0, self.extent(axis))
