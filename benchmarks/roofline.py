"""`python -m normpass.benchmarks.roofline`: what normpass's kernels move on an H200, computed from
their plans with no GPU, against the least that there is to move.

Nothing here is measured. A case's least traffic reads every distinct input once and writes every
output once. What its kernels move follows from their plans and the second-level cache
(backend/program/launch_traffic.py); the time is that of the bytes at the bandwidth of the
datasheet.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes, symbol
from normpass.backend.program.traffic import traffic
from normpass.backend.program.tree import SHARED, Load, Store, walk
from normpass.backend.run.op import region_op
from normpass.benchmarks.cases import parse_shape, spell
from normpass.benchmarks.gpu_cases import DTYPES, FUNCTIONS, PHASES, listed
from normpass.benchmarks.gpu_graphs import bytes_of, fused_graphs, least_bytes_of
from normpass.benchmarks.measure import number
from normpass.passes.cost import Caches, Conditions
from normpass.passes.pipeline import Fused
from normpass.passes.region import product
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.fx import Graph, Node

    from normpass.backend.program.tree import Access, Launch, Plan
    from normpass.benchmarks.gpu_cases import GpuCase

COMPUTED = "computed, not measured"
# NVIDIA H200: multiprocessors, bytes of the second-level cache, bytes per second of its memory.
PROCESSORS = 132
CACHE = 50 * 2**20
BANDWIDTH = 4.8e12
H200 = Conditions(Caches(CACHE // PROCESSORS, CACHE), CACHE // PROCESSORS, PROCESSORS, None, 90)
# Bytes that memory hands out at a time.
SECTOR = 32
# From here on it is told: a ratio to the least traffic, a part that is moved in parts of sectors,
# and up to here how much of the time programs are busy.
MUCH = 1.1
MUCH_PARTIAL = 0.05
BUSY = 0.9


@dataclass(frozen=True)
class LaunchFigures:
    """One launch: its grid of programs, those on a multiprocessor at once and their warps together,
    how much of the time they are busy where the last of them ends last, and what becomes of its
    rows: held, read again from the cache, or streamed.
    """

    programs: int
    on_each: float
    warps: float
    busy: float
    rows: str


@dataclass(frozen=True)
class RegionFigures:
    """One region. Bytes: moved to and from memory; again, from the second-level cache; partial, of
    what is moved in runs shorter than a sector.
    """

    name: str
    moved: int
    again: int
    partial: int
    launches: tuple[LaunchFigures, ...]
    main: int

    @property
    def main_launch(self) -> LaunchFigures:
        """The one that goes over the most elements."""
        return self.launches[self.main]


@dataclass(frozen=True)
class Roofline:
    """A case's figures. least, moved: bytes. beside: bytes of what stays with Inductor, which are
    part of moved. refused: why a norm was not fused.
    """

    case: GpuCase
    least: int
    moved: int
    beside: int
    regions: tuple[RegionFigures, ...]
    refused: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Of what is moved to the least; None where that is for Inductor to decide."""
        return self.moved / self.least if self.regions else None

    @property
    def seconds(self) -> float | None:
        """At the bandwidth of the datasheet."""
        return self.moved / BANDWIDTH if self.regions else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all fields and what follows from them."""
        derived = {"ratio": self.ratio, "seconds": self.seconds, "what": COMPUTED}
        return {**asdict(self), "label": self.case.label, **derived}


def roofline(case: GpuCase) -> Roofline:
    """The figures of a case on an H200."""
    least = beside = 0
    regions: list[RegionFigures] = []
    refused: list[str] = []
    for graph, decisions in fused_graphs(case, H200):
        least += least_bytes_of(graph)
        beside += bytes_beside(graph)
        for each in decisions:
            if isinstance(each, Fused):
                regions.append(region_figures(each))
            else:
                refused.append(f"{each.name}: {each.reason}")
    moved = beside + sum(region.moved for region in regions)
    return Roofline(case, least, moved, beside, tuple(regions), tuple(refused))


def bytes_beside(graph: Graph) -> int:
    """Of what stays beside the regions, as if it were one kernel: what it reads of others and what
    others read of it. Views are free.
    """
    left = {node for node in graph.nodes if node.op == "call_function" and not _is_free(node)}

    def source(node: Node) -> Node:
        while node.op == "call_function" and _is_view(node):
            node = node.all_input_nodes[0]
        return node

    read = {source(given) for node in left for given in node.all_input_nodes} - left
    ends = {source(user) for node in graph.nodes if node not in left for user in _reads(node)}
    return sum(map(bytes_of, read)) + sum(map(bytes_of, left & ends))


def _reads(node: Node) -> Sequence[Node]:
    return () if _is_view(node) else node.all_input_nodes


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _is_free(node: Node) -> bool:
    return node.target is region_op or _is_view(node) or "getitem" in str(node.target)


def region_figures(found: Fused) -> RegionFigures:
    """What the kernel of a region does."""
    work = traffic(found.text, found.sizes, "cuda", H200)
    region = parse(found.text)
    classes = size_classes(found.sizes)
    plan = make_plan(region, gpu_machine(region, classes, H200.capability), classes)
    extents = {symbol(name): n for name, n in region.extents(found.sizes).items()}
    lengths = {axis.name: int(axis.extent.subs(extents)) for axis in plan.axes}
    launches = tuple(launch_figures(launch, lengths) for launch in plan.launches)
    elements = [
        product(lengths[axis.name] for axis in (*launch.outer, *launch.inner))
        for launch in plan.launches
    ]
    main = elements.index(max(elements))
    partial = partial_bytes(plan, plan.launches[main], lengths)
    return RegionFigures(found.name, work.moved, work.again, partial, launches, main)


def launch_figures(launch: Launch, lengths: Mapping[str, int]) -> LaunchFigures:
    """lengths: of the plan's axes."""
    blocks = launch.blocks
    outer = [axis.name for axis in launch.outer]
    tiles = product(-(-lengths[a] // blocks.size[a]) for a in outer if a not in blocks.shares)
    programs = pieces = tiles
    apart = launch.team.blocks if launch.team else 1  # multiprocessors of a program
    at_once = PROCESSORS // apart * blocks.programs
    if blocks.shares:
        rows = -(-product(lengths[axis] for axis in blocks.shares) // blocks.size[SHARED])
        room = -(-at_once // tiles)
        programs, pieces = tiles * min(room, rows), tiles * rows
    on_each = min(programs * apart / PROCESSORS, blocks.programs)
    turns = pieces / min(programs, at_once)
    busy = turns / math.ceil(turns - 1e-9)
    warps = on_each * blocks.warps / apart
    return LaunchFigures(programs, on_each, warps, busy, rows_of(launch))


def rows_of(launch: Launch) -> str:
    """What becomes of a launch's rows."""
    if launch.blocks.again:
        return "again"
    if not launch.inner:
        return "once"
    inner = {axis.name for axis in launch.inner}
    return "held" if inner <= launch.blocks.resident else "streamed"


def partial_bytes(plan: Plan, launch: Launch, lengths: Mapping[str, int]) -> int:
    """Bytes of tensors whose neighbours in memory a program meets in runs shorter than a sector."""
    found: dict[str, int] = {}
    for node in walk(*launch.body):
        if isinstance(node, Load | Store) and (access := node.access).strides:
            item = access.buffer.dtype.itemsize
            elements = product(lengths[axis] for axis in access.strides)
            if 0 < run_of(plan, launch, access, lengths) * item < SECTOR < elements * item:
                found[access.buffer.name] = elements * item
    return sum(found.values())


def run_of(plan: Plan, launch: Launch, access: Access, lengths: Mapping[str, int]) -> int:
    """Elements beside one another in memory that a block covers; 0 where there are none."""
    innermost = next((axis for axis in access.strides if access.step(axis) == 1), None)
    if innermost is None:
        return 1 if any(access.step(axis) > 1 for axis in access.strides) else 0
    if innermost in launch.blocks.shares:
        return launch.blocks.size[SHARED]
    inner = {axis.name for axis in launch.inner}
    if innermost == plan.vector and innermost in inner:
        return lengths[innermost]
    return min(lengths[innermost], launch.blocks.covered(innermost))


# ---- what is told


def figures_of(found: Roofline) -> Iterator[str]:
    """The cells of a row, after the case's own."""
    yield f"{found.least / 1e6:.1f}"
    if not found.regions:
        yield from ("-",) * (len(COLUMNS) - 3)
        yield from ("Inductor's", "-")
        return
    yield f"{found.moved / 1e6:.1f}"
    yield number(found.ratio, "{:.2f}")
    yield f"{sum(region.again for region in found.regions) / 1e6:.1f}"
    yield " + ".join(str(len(region.launches)) for region in found.regions)
    mains = [region.main_launch for region in found.regions]
    yield " + ".join(f"{main.on_each:.1f}" for main in mains)
    yield " + ".join(f"{main.warps:.0f}" for main in mains)
    yield " + ".join(f"{main.busy:.0%}" for main in mains)
    yield " + ".join(main.rows for main in mains)
    yield number(found.seconds, "{:.1f}", 1e6)


COLUMNS = (
    "least MB",
    "moved MB",
    "ratio",
    "L2 MB",
    "launches",
    "programs/SM",
    "warps/SM",
    "busy",
    "rows",
    "us at 4.8 TB/s",
)


def result_table(results: Sequence[Roofline]) -> Table:
    """A row per case."""
    table = Table(title=f"least and moved traffic on an H200: {COMPUTED}")
    table.add_column("case", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for found in results:
        table.add_row(found.case.label, *figures_of(found))
    return table


def markdown(results: Sequence[Roofline]) -> str:
    """A row per norm, shape and format: by phase the ratio of what is moved to the least and, in
    brackets, microseconds at the bandwidth of the datasheet.
    """
    phases = [phase for phase in PHASES if any(r.case.phase == phase for r in results)]
    rows: dict[str, dict[str, str]] = {}
    for found in results:
        case = found.case
        layout = ", channels_last" if case.channels_last else ""
        label = f"{case.norm} {spell(case.shape)}{layout}, {case.dtype}"
        cell = "Inductor's"
        if found.regions:
            cell = f"{number(found.ratio, '{:.2f}')} ({number(found.seconds, '{:.0f}', 1e6)})"
        rows.setdefault(label, {})[case.phase] = cell
    lines = [
        f"Bytes moved over the least, and us at 4.8 TB/s on an H200: {COMPUTED}.",
        "",
        f"| norm | {' | '.join(phases)} |",
        f"|---|{'---|' * len(phases)}",
    ]
    for label, cells in rows.items():
        lines.append(f"| {label} | {' | '.join(cells.get(p, '') for p in phases)} |")
    return "\n".join(lines)


def remarks(results: Sequence[Roofline]) -> Iterator[str]:
    """A line for each case that moves much more than the least, in part sectors, or is not ours."""
    for found in results:
        label = found.case.label
        if found.ratio and found.ratio > MUCH:
            yield f"{label}: moves {found.ratio:.2f}x the least"
        for region in found.regions:
            part = region.partial / region.moved
            if part > MUCH_PARTIAL:
                yield f"{label}: {part:.0%} of what {region.name} moves is in parts of sectors"
            if region.main_launch.busy < BUSY:
                yield f"{label}: programs of {region.name} are busy {region.main_launch.busy:.0%}"
        for reason in found.refused:
            yield f"{label}: {reason}"


def document(results: Sequence[Roofline]) -> dict[str, Any]:
    """All figures, for JSON."""
    gpu = {"name": "NVIDIA H200", "multiprocessors": PROCESSORS, "cache_bytes": CACHE}
    return {
        "what": COMPUTED,
        "gpu": {**gpu, "bytes_per_second": BANDWIDTH},
        "cases": [found.as_dict() for found in results],
    }


@dataclass
class _Options:
    norm: list[str] = field(default_factory=list)
    shape: list[tuple[int, ...]] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    phase: list[str] = field(default_factory=list)
    json: Path | None = None
    markdown: bool = False
    list: bool = False


def parse_options(argv: Sequence[str] | None) -> _Options:
    """The options of the command."""
    parser = argparse.ArgumentParser("normpass.benchmarks.roofline", description=__doc__)
    more: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--norm", choices=list(FUNCTIONS), help="repeatable", **more)
    parser.add_argument("--shape", type=parse_shape, help="such as 4096x1024; repeatable", **more)
    parser.add_argument("--dtype", choices=list(DTYPES), help="bfloat16; repeatable", **more)
    parser.add_argument("--phase", choices=PHASES, help="repeatable", **more)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    return parser.parse_args(argv, namespace=_Options())


def run(
    console: Console, cases: Sequence[GpuCase], path: Path | None, *, as_markdown: bool = False
) -> int:
    """Compute and print the table; path: of a file for all figures."""
    results = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for case in progress.track(cases):
            results.append(roofline(case))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document(results), indent=1) + "\n")
    if as_markdown:
        print(markdown(results))
        return 0
    console.print(result_table(results))
    for line in remarks(results):
        console.print(line, markup=False, highlight=False)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse_options(argv)
    cases = listed(options.norm, options.shape, options.dtype, options.phase)
    if options.list:
        print("\n".join(case.label for case in cases))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    return run(console, cases, options.json, as_markdown=options.markdown)


if __name__ == "__main__":
    raise SystemExit(main())
