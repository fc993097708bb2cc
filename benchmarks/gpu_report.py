"""What is told of measurements on a GPU: the file, the tables and the plot."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.table import Table

from normpass.benchmarks.gpu_measure import COPY
from normpass.benchmarks.gpu_targets import targets, timed_variants
from normpass.benchmarks.gpu_variants import EAGER, OURS, STOCK
from normpass.benchmarks.measure import Timing, number, spread
from normpass.benchmarks.plots import Row, bars
from normpass.benchmarks.steps import CONTROL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    Found = Mapping[str, Any]


def results_path(folder: Path, name: str) -> Path:
    """A new file for a GPU of that name: nvidia-h200-20260131-123000.json."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return folder / f"{slug}-{stamp}.json"


def save(document: Found, path: Path) -> None:
    """Writes what there is; the old file stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    judged = [vars(target) for target in targets(document)]
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**document, "targets": judged}, indent=1) + "\n")
    part.replace(path)


def line_of(found: Found) -> str:
    """A case as it is told while others are measured still."""
    fraction = found["fraction_of_copy"].get(OURS)
    parts = [f"{number(fraction, '{:.0%}')} of a copy"]
    for name in timed_variants([found]):
        if name != OURS and OURS in found["seconds"]:
            times = found["seconds"][name]["median"] / found["seconds"][OURS]["median"]
            parts.append(f"{times:.2f}x {name}")
    parts += [f"{name} is wrong" for name in found["wrong"]]
    parts += [f"{name} failed" for name in found["failed"]]
    return f"{found['label']}: {', '.join(parts)}"


def case_table(cases: Sequence[Found]) -> Table:
    """A row per case: milliseconds of all variants, and normpass's part of a copy's bandwidth."""
    names = timed_variants(cases)
    table = Table(title="medians in ms with half the interquartile range; of a copy: normpass's")
    table.add_column("case", no_wrap=True)
    for heading in (*names, COPY, "copy TB/s", "of a copy", "vs inductor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in cases:
        cells = [timing_cell(found, name) for name in (*names, COPY)]
        ours, stock = (found["seconds"].get(name) for name in (OURS, STOCK))
        ratio = stock["median"] / ours["median"] if ours and stock else None
        fraction = found["fraction_of_copy"].get(OURS)
        cells.append(number(found["copy_bytes_per_second"], "{:.2f}", 1e-12))
        cells += [number(fraction, "{:.0%}"), number(ratio, "{:.2f}x")]
        table.add_row(found["label"], *cells)
    return table


def timing_cell(found: Found, name: str) -> str:
    """A variant's time, or in a word why there is none."""
    if name in found["seconds"]:
        return spread(Timing(**found["seconds"][name]))
    for word in ("wrong", "failed"):
        if name in found.get(word, {}):
            return word
    return "-"


def host_table(host: Sequence[Found]) -> Table:
    """A row per program, in microseconds."""
    names = list(dict.fromkeys(name for each in host for name in each["seconds"]))
    table = Table(title="host time of a call, medians in us")
    table.add_column("program")
    for name in names:
        table.add_column(name, justify="right")
    for each in host:
        medians = [each["seconds"].get(name, {}).get("median") for name in names]
        table.add_row(each["program"], *(number(value, "{:.1f}", 1e6) for value in medians))
    return table


def model_table(models: Sequence[Found]) -> Table:
    """A row per model: milliseconds of a step and megabytes at its peak."""
    names = list(dict.fromkeys(name for each in models for name in each["seconds"]))
    variants = [name for name in names if name != CONTROL]
    table = Table(title="training steps, medians in ms with half the interquartile range")
    table.add_column("model", no_wrap=True)
    for name in (*names, "vs inductor", "vs eager", *(f"{name} MB" for name in variants)):
        table.add_column(name, justify="right", no_wrap=True)
    for each in models:
        cells = [timing_cell(each, name) for name in names]
        cells += [number(each.get(f"speedup_over_{n}"), "{:.2f}x") for n in (STOCK, EAGER)]
        cells += [number(each["peak_bytes"].get(name), "{:.0f}", 1e-6) for name in variants]
        table.add_row(each["model"], *cells)
    return table


def target_table(document: Found) -> Table:
    """A row per target."""
    table = Table(title="targets")
    table.add_column("target")
    for heading in ("found", ""):
        table.add_column(heading, no_wrap=True)
    for target in targets(document):
        table.add_row(target.name, target.found, target.verdict)
    return table


def complaints(document: Found) -> Iterator[str]:
    """A line for what is missing, failed, was wrong or was left to Inductor."""
    for name, status in document["peers"].items():
        if status["missing"]:
            yield f"{name} is not installed: {status['missing']}"
    for each in (*document["cases"], *document["models"], *document["host"]):
        label = each.get("label") or each.get("model") or each.get("program")
        for name, reason in each.get("wrong", {}).items():
            yield f"{label}: {name} is wrong and not timed: {reason}"
        for name, reason in each["failed"].items():
            yield f"{label}: {name} failed: {reason}"
        for name, reasons in each.get("refused", {}).items():
            yield from (f"{label}: {name} left to Inductor: {reason}" for reason in reasons)
    if not document["complete"]:
        yield f"stopped after {document['elapsed_seconds']:.0f} s: some cases are not there"


def tell(document: Found, console: Console) -> None:
    """Prints all tables and what has to be said beside them."""
    if document["cases"]:
        console.print(case_table(document["cases"]))
    if document["host"]:
        console.print(host_table(document["host"]))
    if document["models"]:
        console.print(model_table(document["models"]))
    for line in complaints(document):
        console.print(line, markup=False, highlight=False)
    console.print(target_table(document))


def plot(document: Found, path: Path) -> bool:
    """Bars of the part of a copy's bandwidth, a panel per phase and dtype; False without
    matplotlib, and where nothing was timed.
    """
    cases = [each for each in document["cases"] if each["seconds"]]
    names = timed_variants(cases)
    panels: dict[str, list[Row]] = {}
    for each in cases:
        title = f"{each['case']['phase']}, {each['case']['dtype']}: part of a copy's bandwidth"
        lengths = [each["fraction_of_copy"].get(name) or 0.0 for name in names]
        panels.setdefault(title, []).append((each["label"], lengths))
    return bars(panels, names, path) if names else False
