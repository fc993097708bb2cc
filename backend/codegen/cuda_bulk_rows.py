"""A launch over rows in CUDA C++, of which one thread asks for all that its block has of a row: by
bulk copies, which GPUs have from capability 9.0 on. A barrier on chip counts the bytes that come.

A thread reads what another has asked for, so that the next row may be asked for in its place only
where all of them have read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_rows import RowsPrinter
from normpass.backend.program.team import shared_bytes

if TYPE_CHECKING:
    from normpass.backend.program.tree import Launch, Plan


class BulkRowsPrinter(RowsPrinter):
    """Prints one launch over rows that come by bulk copies, or some of their tensors do."""

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan, launch, number)
        if not self.team.asked:
            self.copied = ()  # what is held is waited for once

    def places(self) -> None:
        super().places()
        first = shared_bytes(self.launch) - self.team.arrivals
        self.line(f"const Arrivals<{self.team.stages}> arrivals(chip + {first});")

    def asking(self) -> None:
        super().asking()
        bulk = self.team.bulk
        with self.block(f"const auto ask_rows = [&]({self.kind} number, int stage)", "};"):
            self.indices()
            bytes = sum(int(load.access.buffer.dtype.itemsize) for load in bulk)
            self.line(f"arrivals.expect(stage, {bytes} * row.count());")
            for load in bulk:
                where = f"{self.address(load.access, [self.axis.name])} + row.begin()"
                name = load.access.buffer.name
                self.line(f"slots_{name}.ask_row({where}, stage, row.count(), arrivals);")
        with self.block("if (threadIdx.x == 0)"):
            self.line(f"for (int stage = 0; stage < {self.team.stages}; ++stage)")
            self.line("  if (first + stage < last) ask_rows(first + stage, stage);")
        if self.launch.held and not self.copied:
            self.line("device::group();")
            self.line("device::wait<0>();")
        self.line("int parity = 0;")

    def row_begins(self) -> None:
        self.line("arrivals.wait(stage, parity);")

    def row_ends(self) -> None:
        stages = self.team.stages
        self.line("device::block_barrier();  // all have read it")
        ahead = f"number + {stages}"
        self.line(f"if (threadIdx.x == 0 && {ahead} < last) ask_rows({ahead}, stage);")
        self.line(f"if (stage + 1 == {stages}) parity ^= 1;" if stages > 1 else "parity ^= 1;")
