"""The report of `normpass.explain`: what it holds, and as a table."""

from __future__ import annotations

import io
import random
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normpass.backend.explain import stock
from normpass.backend.explain.messages import message_of
from normpass.backend.explain.page import page
from normpass.backend.explain.timing import Times, timed
from normpass.backend.explain.words import memory_lines, place, refusals, short, time_cells, times
from normpass.backend.program.traffic import traffic
from normpass.backend.run.calibration import conditions_of
from normpass.passes.pipeline import Fused
from normpass.passes.sizes import human

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from normpass.backend.explain.cut_out import CutOut
    from normpass.backend.explain.memory import Memory
    from normpass.backend.explain.record import Passed

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
    goes over its largest input (the rule is in backend/program/traffic.py). target: "cpp" or
    "triton". text: the region. times: what its kernel takes and what Inductor's for the same nodes
    take, where that was measured; a str says why it could not be.
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
    cut: CutOut | str = field(repr=False)
    print_kernel: Callable[[Fused], str] = field(repr=False)
    times: Times | str | None = None

    @classmethod
    def of(cls, fused: Fused, cut: CutOut | str, print_kernel: Callable[[Fused], str]) -> FusedNorm:
        """cut: its nodes as a graph of their own, or why there is none. print_kernel: what prints
        the kernel when it is asked for.
        """
        here = conditions_of(fused.device)
        moved = traffic(fused.text, fused.sizes, fused.device, here)
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
            cut=cut,
            print_kernel=print_kernel,
        )

    @cached_property
    def source(self) -> str:
        """The kernel."""
        return self.print_kernel(self.fused)

    @cached_property
    def bytes_stock(self) -> int | None:
        """What Inductor's kernels for the same nodes would move, as estimated; None where that is
        not known (on GPUs).
        """
        return stock.bytes_moved(self.cut, self.fused.device)


def fused_norms(graph: Passed, print_kernel: Callable[[Fused], str]) -> list[FusedNorm]:
    """The norms that were fused in a graph, in order."""
    made = [decision for decision in graph.decisions if isinstance(decision, Fused)]
    return [FusedNorm.of(fused, graph.cuts[fused.call], print_kernel) for fused in made]


def time_regions(regions: Sequence[FusedNorm], settings: Mapping[str, Any]) -> None:
    """Times regions, equal ones once. settings: of torch._inductor.config."""
    known: dict[tuple[str, tuple[int, ...]], Times | str] = {}
    for region in regions:
        key = region.text, region.fused.sizes
        if key not in known:
            known[key] = timed(region.fused, region.cut, settings)
        region.times = known[key]


@dataclass(frozen=True)
class RefusedNorm:
    """A norm that no kernel of ours computes, and why; else as FusedNorm."""

    name: str
    module: str
    phase: str
    reason: str

    @property
    def why(self) -> str:
        """The name by which `normpass why` says what the reason means; "" for one it has not."""
        message = message_of(self.reason)
        return message.name if message else ""


@dataclass
class Report:
    """What `normpass.explain` found.

    title: what was explained. regions, refused: norms. graphs: those that went through the pass,
    before and after. memory: of a step, where that was measured; a str says why it could not be.
    `print(report)` is a table, `report.save("report.html")` a page.
    """

    title: str
    regions: list[FusedNorm]
    refused: list[RefusedNorm]
    graphs: list[Passed] = field(repr=False)
    memory: Memory | str | None = None

    def __str__(self) -> str:
        terminal = sys.stdout.isatty()
        out = io.StringIO()
        console = Console(
            file=out,
            force_terminal=terminal,
            force_jupyter=False,  # else a notebook is shown the tables, and the text is empty
            color_system="auto" if terminal else None,
            width=None if terminal else WIDEST,
            legacy_windows=False,
        )
        for table in (self._fused(terminal), self._refused(terminal)):
            if table.row_count:
                console.print(table)
        lines = (*self._why(), *self._not_timed(), *memory_lines(self.memory), self.summary())
        for line in lines:
            console.print(Text(line))
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
        Path(path).write_text(page(self), encoding="utf-8")

    def _fused(self, terminal: bool) -> Table:
        table = _table("fused", terminal)
        for heading in ("norm", "phase", "module"):
            table.add_column(heading, overflow="fold")
        for heading in ("moved", "least", "ratio", "passes"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("target")
        is_timed = any(region.times for region in self.regions)
        for heading in ("time", "Inductor", "faster") if is_timed else ():
            table.add_column(heading, justify="right", no_wrap=True)
        for region in self.regions:
            table.add_row(
                *map(Text, (short(region.name), region.phase, place(region.module))),
                human(region.bytes_moved),
                human(region.bytes_least),
                times(region.bytes_moved, region.bytes_least),
                str(region.passes),
                region.target,
                *(time_cells(region.times) if is_timed else ()),
            )
        if len(self.regions) > 1:
            moved = sum(region.bytes_moved for region in self.regions)
            least = sum(region.bytes_least for region in self.regions)
            table.add_section()
            table.add_row("total", "", "", human(moved), human(least), times(moved, least), "", "")
        return table

    def _why(self) -> list[str]:
        """The command that says what the reasons mean."""
        names = dict.fromkeys(norm.why for norm in self.refused if norm.why)
        return [f"What the reasons mean: normpass why {' '.join(names)}"] if names else []

    def _not_timed(self) -> list[str]:
        """Why regions have no times, a line each."""
        return [
            f"not timed: {short(region.name)} {region.phase} of {place(region.module)}: "
            f"{region.times}"
            for region in self.regions
            if isinstance(region.times, str)
        ]

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
