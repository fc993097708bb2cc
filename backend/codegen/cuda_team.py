"""What a launch's team has, in CUDA C++: elements of a row for each thread, their places on chip,
and a share of the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_names import SHARES, CudaNames
from normpass.backend.codegen.text import TYPES, index_expression
from normpass.passes.region import product

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import sympy

    from normpass.backend.program.tree import Launch, Plan

UNROLL = "#pragma unroll"
# Elements of rows of which 2**31 would take a terabyte.
LONG = 512


class TeamPrinter(CudaNames):
    """Prints what comes before the first row. counters: of the loops over a thread's vectors. slot:
    where a vector lies on chip. is_first: whether a thread does what is done once for a row.
    """

    counters: tuple[str, ...] = ("k",)
    slot, is_first = "k", "row.is_first()"

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan, launch, number)
        self.axis = launch.inner[-1]
        self.share_axes = [plan.axis[name] for name in launch.blocks.shares]
        self.on_chip = (*self.team.staged, *launch.held)  # what has slots
        self.copied = (*self.team.asked, *launch.held)  # of it, what each thread copies for itself
        self.held = {load.access.buffer.name for load in launch.held}
        # There is no memory for so many long rows that their number would not be an int.
        self.kind = "int" if self.axis.hint >= LONG else "int64_t"

    def places(self) -> None:
        """A thread's elements, its slots, and where the team adds up."""
        team = self.team
        self.row_type()
        self.line("ON_CHIP(chip);")
        first = self.adding_up()
        for load in self.on_chip:
            name, stages = load.access.buffer.name, team.stages if load in team.staged else 1
            kind = TYPES[load.access.buffer.dtype].cpp
            self.line(f"const Slots<Row, {kind}, {stages}> slots_{name}(chip + {first});")
            first += team.on_chip(load)
        if team.blocks > 1:
            self.line("device::cluster_barrier();  // all of its blocks are there")

    def adding_up(self) -> int:
        """What sums are added up by. Bytes on chip for that."""
        if self.team.together:
            self.line(f"Exchange<scalar, Row, {self.team.together}> exchange(chip);")
        return self.team.exchange

    def row_type(self) -> None:
        """What says which elements of a row a thread has."""
        team = self.team
        sizes = (team.threads, team.blocks, team.vectors, team.lanes)
        self.row("Row", self.axis.extent, *sizes)

    def row(self, kind: str, count: sympy.Expr, *sizes: object) -> None:
        """count: an extent that may be known at run time only."""
        extent = index_expression(count)
        known = "" if count.is_number else f"({extent})"
        text = ", ".join(map(str, ("0" if known else extent, *sizes)))
        self.line(f"using Row = normpass::{kind}<{text}>;")
        self.line(f"const Row row{known};")

    def share(self) -> None:
        """Which rows a team has."""
        program = "blockIdx.x"
        if self.team.blocks > 1:
            program += f" / {self.team.blocks}"
        if self.tiles:
            self.line(f"const int64_t program = {program};")
            self.line(f"const int64_t share = program % {SHARES};")
            self.tile_indices(f"program / {SHARES}")
        else:
            self.line(f"const int64_t share = {program};")
        count = index_expression(product(axis.extent for axis in self.share_axes))
        self.line(f"const int64_t rows = ({count} + {SHARES} - 1) / {SHARES};")
        self.line(f"const {self.kind} first = share * rows < {count} ? share * rows : {count};")
        self.line(f"const {self.kind} last = first + rows < {count} ? first + rows : {count};")
        self.scalars()

    def tile_indices(self, tile: str) -> None:
        """Those of a team along the axes that rows are not shared out along."""
        self.unravel(self.tiles, tile)

    def indices(self) -> None:
        """Those of a row along each of the axes that rows are shared out along."""
        self.unravel(self.share_axes, "number")

    @property
    def counted(self) -> str:
        """A vector, as an argument."""
        return ", ".join(self.counters)

    @property
    def has(self) -> str:
        """Whether there is such a vector."""
        return f"row.has({self.counted})"

    def vectors(self, unroll: str = UNROLL) -> AbstractContextManager[None]:
        """The loop over those along the axis where neighbours lie."""
        self.line(unroll)
        return self.block("for (int k = 0; k < Row::vectors; ++k)")
