"""The report of `normpass.explain`: what it holds, and as a table."""

from __future__ import annotations

import io
import os
import random
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from normpass.backend.traffic import traffic
from normpass.passes.sizes import human

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.backend.record import Passed
    from normpass.passes.pipeline import Fused

# Importing rich draws from the user's random numbers.
_STATE = random.getstate()
try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(_STATE)

TARGETS = {"cpu": "cpp", "cuda": "triton"}
# Without a terminal there is no width to keep to, but a table should stay one a person can read.
WIDEST = 160


@dataclass
class FusedNorm:
    """A norm that became one kernel.

    name: the region's. module: its modules' dotted paths, or file:line; "" is the model itself.
    phase: "forward" or "backward". bytes_least: every input read once and every output written
    once. bytes_moved, passes: what its plan moves through memory on this machine, and how often it
    goes over its largest input (backend/traffic.py has the rule). target: "cpp" or "triton". text:
    the region.
    """

    name: str
    module: str
    phase: str
    bytes_moved: int
    bytes_least: int
    passes: int
    target: str
    text: str
    fused: Fused = field(repr=False)
    print_kernel: Callable[[Fused], str] = field(repr=False)

    @classmethod
    def of(cls, fused: Fused, print_kernel: Callable[[Fused], str]) -> FusedNorm:
        """print_kernel: what prints the kernel when it is asked for."""
        moved = traffic(fused.text, fused.sizes, fused.device)
        return cls(
            name=fused.name,
            module=fused.module,
            phase=fused.phase,
            bytes_moved=moved.moved,
            bytes_least=fused.estimate.least,
            passes=moved.passes,
            target=TARGETS.get(fused.device, fused.device),
            text=fused.text,
            fused=fused,
            print_kernel=print_kernel,
        )

    @cached_property
    def source(self) -> str:
        """The kernel."""
        return self.print_kernel(self.fused)


@dataclass(frozen=True)
class RefusedNorm:
    """A norm that no kernel of ours computes, and why; else as FusedNorm."""

    name: str
    module: str
    phase: str
    reason: str


@dataclass
class Report:
    """What `normpass.explain` found.

    title: what was explained. regions, refused: norms. graphs: those that went through the pass,
    before and after. `print(report)` is a table, `report.save("report.html")` a page.
    """

    title: str
    regions: list[FusedNorm]
    refused: list[RefusedNorm]
    graphs: list[Passed] = field(repr=False)

    def __str__(self) -> str:
        terminal = sys.stdout.isatty()
        out = io.StringIO()
        console = Console(
            file=out,
            force_terminal=terminal,
            color_system="auto" if terminal else None,
            width=None if terminal else WIDEST,
            legacy_windows=False,
        )
        for table in (self._fused(terminal), self._refused(terminal)):
            if table.row_count:
                console.print(table)
        console.print(Text(self.summary()))
        # Plain tables are padded to their width, which nobody wants to see.
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def summary(self) -> str:
        """One sentence: how much was fused, and the bytes."""
        total = len(self.regions) + len(self.refused)
        if not total:
            return f"{self.title}: no norms found."
        text = f"{self.title}: {len(self.regions)} fused, {len(self.refused)} not."
        if self.regions:
            moved = sum(region.bytes_moved for region in self.regions)
            least = sum(region.bytes_least for region in self.regions)
            text += (
                f" The fused ones move {human(moved)}; the least possible is {human(least)}"
                f" ({times(moved, least)})."
            )
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a page that needs nothing else: the table, regions, kernels, and the graphs
        before and after.
        """
        from normpass.backend.page import page

        Path(path).write_text(page(self), encoding="utf-8")

    def _fused(self, terminal: bool) -> Table:
        table = _table("fused", terminal)
        for heading in ("norm", "phase", "module"):
            table.add_column(heading, overflow="fold")
        for heading in ("moved", "least", "ratio", "passes"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("target")
        for region in self.regions:
            table.add_row(
                *map(Text, (short(region.name), region.phase, place(region.module))),
                human(region.bytes_moved),
                human(region.bytes_least),
                times(region.bytes_moved, region.bytes_least),
                str(region.passes),
                region.target,
            )
        if len(self.regions) > 1:
            moved = sum(region.bytes_moved for region in self.regions)
            least = sum(region.bytes_least for region in self.regions)
            table.add_section()
            table.add_row("total", "", "", human(moved), human(least), times(moved, least), "", "")
        return table

    def _refused(self, terminal: bool) -> Table:
        table = _table("not fused", terminal)
        for heading in ("norm", "phase", "module", "reason"):
            table.add_column(heading, overflow="fold")
        for cells in refusals(self.refused):
            table.add_row(*map(Text, cells))
        return table


def _table(title: str, terminal: bool) -> Table:
    # Text, here and in the rows, because paths hold brackets, which rich would take for its markup.
    look = box.SIMPLE_HEAD if terminal else box.ASCII2
    return Table(title=Text(title), title_justify="left", title_style="bold", box=look)


def refusals(refused: Sequence[RefusedNorm]) -> list[tuple[str, str, str, str]]:
    """Name, phases, module, reason: one row where both phases are refused for the same reason."""
    phases: dict[tuple[str, str, str], list[str]] = {}
    for norm in refused:
        phases.setdefault((short(norm.name), place(norm.module), norm.reason), []).append(
            norm.phase
        )
    return [
        (name, ", ".join(dict.fromkeys(where)), module, reason)
        for (name, module, reason), where in phases.items()
    ]


def short(name: str) -> str:
    """The phase has a column of its own."""
    return name.removesuffix("_backward")


def place(module: str) -> str:
    """A module as readers see it: the model itself has an empty path, and files need not be named
    from the root.
    """
    if os.sep not in module:
        return module or "(the model itself)"
    path = Path(module)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(Path("...", *path.parts[-2:]))


def times(moved: int, least: int) -> str:
    return f"{moved / least:.2f}x" if least else "-"
