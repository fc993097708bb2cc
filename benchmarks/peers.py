"""`normpass bench --peers`: what other libraries do with derivatives of norms on a CPU.

    capability   which derivatives are right, silently wrong, or an error, in float64
    times        how long they take, of those that are right

of PyTorch in eager mode and by stock Inductor, normpass in both modes, JAX and lightning-thunder.
Those that are not installed, or do not fit this version of PyTorch, are left out and named. Results
are saved; `python -m normpass.benchmarks.peers_page` puts them into docs/comparison.md.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from rich.table import Table

from normpass.benchmarks.machine import installed, machine
from normpass.benchmarks.measure import keep_freed_memory, spread
from normpass.benchmarks.peers_capability import ASKED, outcomes
from normpass.benchmarks.peers_norms import NORMS
from normpass.benchmarks.peers_times import cases, measure
from normpass.benchmarks.peers_ways import WAYS, missing
from normpass.decomps.activation import is_registered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from normpass.benchmarks.peers_times import Result

PARTS = ("capability", "times")
REPEATS = 15
JOBS = 2
FILE = "cpu-peers.json"
# JAX's and normpass's other modes are asked what they can do; what is timed is compiled.
TIMED = ("eager", "Inductor", "normpass", "JAX, jit", "thunder")


def capability_table(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Table:
    """How many of the norms each way has right, and how many silently wrong, by mix."""
    table = Table(title=f"right of {len(NORMS)} norms (silently wrong)")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")
    for mix in ASKED:
        table.add_row(mix, *(counts(by_norm, mix) for by_norm in found.values()))
    return table


def counts(by_norm: Mapping[str, Mapping[str, str]], mix: str) -> str:
    """7, or 4 (3) where three are wrong."""
    said = [outcomes_of[mix] for outcomes_of in by_norm.values()]
    right, wrong = (sum(each.startswith(word) for each in said) for word in ("right", "wrong"))
    return f"{right} ({wrong})" if wrong else str(right)


def times_table(results: Sequence[Result], names: Sequence[str]) -> Table:
    """A row per case."""
    table = Table(title="medians in ms, half the interquartile range; times as fast as the others")
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    others = [name for name in names if name != "normpass"]
    for name in others:
        table.add_column(f"vs {name}", justify="right", no_wrap=True)
    for result in results:
        cells = [spread(result.times[n]) if n in result.times else "wrong" for n in names]
        ratios = [result.ratio(name) for name in others]
        cells += ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        table.add_row(result.case.label, *cells)
    return table


def as_json(result: Result) -> dict[str, Any]:
    """What was measured of one case."""
    return {
        **vars(result.case),
        "seconds": {name: vars(timing) for name, timing in result.times.items()},
        "wrong": result.wrong,
    }


def run(
    console: Console, repeats: int, folder: Path, parts: Sequence[str] = (), steady: bool = True
) -> int:
    """Asks and times what is there, prints and saves it; 1 when normpass is wrong somewhere.

    A part that is not asked for stays in the file as it was.

    Raises:
        RuntimeError: when the rules are registered already.
    """
    if is_registered():
        raise RuntimeError("stock torch cannot be measured while normpass is registered")
    absent = {name: why for name, way in WAYS.items() if (why := missing(way))}
    for name, why in absent.items():
        console.print(f"{name} is left out: {why}", markup=False)
    names = [name for name in WAYS if name not in absent]
    path = folder / FILE
    document = json.loads(path.read_text()) if path.exists() else {}
    wrong = False
    if not parts or "capability" in parts:
        found = outcomes(names, JOBS, console)
        console.print(capability_table(found))
        document["capability"] = {**about(absent), "ways": found}
        wrong |= any(
            said.startswith("wrong")
            for name, by_norm in found.items()
            if WAYS[name].package == "normpass"
            for by_mix in by_norm.values()
            for said in by_mix.values()
        )
    if not parts or "times" in parts:
        kept = steady and keep_freed_memory()
        timed = [name for name in TIMED if name in names]
        results = measured(timed, repeats, console)
        console.print(times_table(results, timed))
        for result in results:
            for name, why in result.wrong.items():
                console.print(f"{result.case.label}: {name} is not timed: {why}", markup=False)
        described = {**about(absent), "repeats": repeats, "freed_memory_kept": kept}
        document["times"] = {**described, "cases": [as_json(result) for result in results]}
        wrong |= any("normpass" in result.wrong for result in results)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"saved {path}")
    return 1 if wrong else 0


def measured(names: Sequence[str], repeats: int, console: Console) -> list[Result]:
    """Every case. The bar is drawn between cases only: drawing would disturb the clock."""
    results, asked = [], list(cases())
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(asked))
        for case in asked:
            progress.update(task, description=case.label, refresh=True)
            results.append(measure(case, names, repeats))
            progress.update(task, advance=1, refresh=True)
    return results


def about(absent: Mapping[str, str]) -> dict[str, Any]:
    """The machine, the versions of all that was asked, and what was not."""
    packages = {way.package for way in WAYS.values()}
    described = machine("cpu")
    versions = {package: installed(package) for package in sorted(packages)}
    described["versions"] = {**versions, **described["versions"]}
    return {"machine": described, "left_out": dict(absent)}
