"""`normpass bench --models`: training steps of whole models, and what is told about them.

Each case is measured in a process of its own (steps.py). One that fails is a row that says so; the
file of results is written after every case.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress
from rich.table import Table

from normpass.backend.table import source_digest
from normpass.benchmarks.cases import DTYPES, geometric_mean
from normpass.benchmarks.machine import installed, machine
from normpass.benchmarks.measure import Timing, number, spread
from normpass.benchmarks.plots import Row, bars
from normpass.benchmarks.steps import BACKENDS, CONTROL, OURS, STOCK, Job, in_fresh_process
from normpass.benchmarks.zoo import EXTRA, FORMATS, Case, left_out, select, zoo

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    Found = dict[str, Any]

REPEATS = 15
TIMED = ("eager", *BACKENDS)
# What differs from run to run of one machine.
VARYING = ("date", "load")


def add_options(parser: argparse.ArgumentParser, group: Any) -> None:
    """The options of its own: one of the measurements that exclude each other, and its choices."""
    group.add_argument(
        "--models",
        nargs="*",
        choices=list(zoo()),
        metavar="NAME",
        help=f"training steps of whole models instead: all, or some of {', '.join(zoo())}",
    )
    parser.add_argument(
        "--format",
        choices=list(FORMATS),
        action="append",
        default=[],
        help="with --models: memory format of images; repeatable",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="with --models: the sizes of tests, to see that all runs; times mean nothing",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="with --models: other cases that the file of results has stay in it, if they are of "
        "the same processor and versions",
    )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """What was asked for."""
    return select(args.models, args.dtype or known_dtypes(args.device), args.format)


def known_dtypes(device: str | None) -> list[str]:
    """All dtypes; on a CPU those that it has instructions to multiply matrices of."""
    plain_loops = device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [name for name in DTYPES if name != "bfloat16" or not plain_loops]


# ---- measuring


def run(
    args: argparse.Namespace,
    console: Console,
    measure: Callable[[Job], Found] = in_fresh_process,
) -> int:
    """Measure every case; 1 when one failed, was wrong, or met a fault of ours, 0 otherwise."""
    cases = cases_of(args)
    if not args.dtype and len(known_dtypes(args.device)) < len(DTYPES):
        console.print(
            "bfloat16 is left out: this processor multiplies its matrices in plain loops, which "
            "would be most of what is timed (--dtype bfloat16 measures it all the same)"
        )
    for package, names in left_out(cases).items():
        console.print(
            f"{package} is not installed, left out: {', '.join(names)} (pip install '{EXTRA}')",
            markup=False,
        )
        cases = [case for case in cases if case.model not in names]
    path = args.out / f"{torch.device(args.device).type}-models.json"
    before = kept(args, cases, path, console) if args.keep else []
    results: list[Found] = []
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(cases))
        for place, case in enumerate(cases):
            progress.update(task, description=case.label, refresh=True)
            results.append({**measure(job_of(args, case, place)), "sources": source_digest()})
            save(in_order([*before, *results]), args, path)
            progress.advance(task)
        progress.update(task, description="measured", refresh=True)
    if not results:
        return 0
    results = in_order([*before, *results])
    console.print(result_table(results))
    for line in complaints(results):
        console.print(line, markup=False)
    console.print(means_table(means(results)))
    console.print(f"saved {path}")
    if plot(results, path.with_suffix(".png")):
        console.print(f"saved {path.with_suffix('.png')}")
    else:
        console.print("no plot: nothing was timed, or matplotlib is not there (the extra `bench`)")
    return 1 if any(complaints(results)) else 0


def job_of(args: argparse.Namespace, case: Case, place: int) -> Job:
    """A case, and how it is measured.

    Which backend is compiled first follows the sequence of Thue and Morse: each comes first as
    often as the other, whatever runs of neighbours (a dtype, a format) are looked at.
    """
    return Job(
        case,
        args.device,
        args.repeats or REPEATS,
        stock_first=place.bit_count() % 2 == 0,
        steady=not args.system_allocator,
        tiny=args.tiny,
    )


def kept(
    args: argparse.Namespace, cases: Sequence[Case], path: Path, console: Console
) -> list[Found]:
    """What the file of results has of other cases; nothing if it is of another machine."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    here, there = (
        {**m, **dict.fromkeys(VARYING)} for m in (machine(args.device), document["machine"])
    )
    how = args.repeats or REPEATS, args.tiny
    if here != there or (document["repeats"], document["tiny"]) != how:
        console.print(
            f"{path} is of another machine, other versions, repeats or sizes: nothing is kept"
        )
        return []
    asked = {case.label for case in cases}
    return [found for found in document["cases"] if label_of(found) not in asked]


def in_order(results: Sequence[Found]) -> list[Found]:
    """Sorted as the models are."""
    order = {case.label: place for place, case in enumerate(select())}
    return sorted(results, key=lambda found: order[label_of(found)])


def save(results: Sequence[Found], args: argparse.Namespace, path: Path) -> None:
    """Write everything measured so far; the old file stays until the new one is whole."""
    packages = sorted({model.package for model in zoo().values() if model.package})
    document = {
        "machine": machine(args.device),
        "packages": {name: installed(name) for name in packages},
        "repeats": args.repeats or REPEATS,
        "tiny": args.tiny,
        "cases": results,
        "geometric_means": means(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def complaints(results: Sequence[Found]) -> Iterator[str]:
    """A line for all that failed, was wrong, or was survived."""
    for found in results:
        label = label_of(found)
        for name, reason in found["failed"].items():
            yield f"{label}: {name} failed: {reason}"
        for name, reason in found.get("wrong", {}).items():
            yield f"{label}: {name} is wrong and not timed: {reason}"
        for fault in found.get("faults", []):
            yield f"{label}: a fault of normpass's was survived: {' '.join(fault)}"


# ---- figures


def ratios(found: Found) -> dict[str, float] | None:
    """What one case says of normpass; None where not everything was timed.

    Of times how often faster normpass is, and how often Inductor is faster than itself; of memory
    and compile time the part of Inductor's that normpass takes.
    """
    seconds = {name: timing["median"] for name, timing in found.get("seconds", {}).items()}
    if not {*TIMED, CONTROL} <= seconds.keys():
        return None
    ours, stock = seconds[OURS], seconds[STOCK]
    return {
        "speedup_over_eager": seconds["eager"] / ours,
        "speedup_over_inductor": stock / ours,
        "speedup_over_better": min(stock, seconds["eager"]) / ours,
        "inductor_over_itself": seconds[CONTROL] / stock,
        "memory_ratio": found["peak_bytes"][OURS] / found["peak_bytes"][STOCK],
        "compile_ratio": found["compile_seconds"][OURS] / found["compile_seconds"][STOCK],
    }


def means(results: Sequence[Found]) -> dict[str, dict[str, float]]:
    """Geometric means of `ratios` by dtype and over all, and of how many cases they are."""
    groups: dict[str, list[dict[str, float]]] = {}
    for found in results:
        figures = ratios(found)
        if figures is not None:
            groups.setdefault(found["dtype"], []).append(figures)
            groups.setdefault("all", []).append(figures)
    last = {"all": groups.pop("all")} if groups else {}
    return {
        name: {
            "cases": len(members),
            **{key: geometric_mean([each[key] for each in members]) for key in members[0]},
        }
        for name, members in {**groups, **last}.items()
    }


def result_table(results: Sequence[Found]) -> Table:
    """A row per case."""
    table = Table(
        title="training steps: medians in ms, half the interquartile range; speedups are "
        "normpass's, peak memory and compile time inductor -> normpass"
    )
    table.add_column("model", no_wrap=True)
    for heading in (*TIMED, "vs eager", "vs inductor", "inductor vs itself"):
        table.add_column(heading, justify="right")
    for heading in ("peak MB", "ratio", "compile s", "ratio", "fused", "refused"):
        table.add_column(heading, justify="right")
    for found in results:
        table.add_row(label_of(found), *cells(found))
    return table


def label_of(found: Found) -> str:
    """For people: `resnet bfloat16 channels_last`."""
    return Case(found["model"], found["dtype"], found["format"]).label


def cells(found: Found) -> Iterator[str]:
    """The cells of one row, after the label."""
    for name in TIMED:
        timing = found.get("seconds", {}).get(name)
        missing = "wrong" if name in found.get("wrong", {}) else "failed"
        yield spread(Timing(**timing)) if timing else missing
    figures = ratios(found) or {}
    for key in ("speedup_over_eager", "speedup_over_inductor", "inductor_over_itself"):
        yield number(figures.get(key), "{:.2f}x")
    yield both(found.get("peak_bytes", {}), "{:.1f}", 1e-6)
    yield number(figures.get("memory_ratio"), "{:.2f}")
    yield both(found.get("compile_seconds", {}), "{:.1f}")
    yield number(figures.get("compile_ratio"), "{:.2f}")
    for key in ("fused", "refused"):
        yield str(len(found[key])) if key in found else "-"


def both(values: dict[str, float], form: str, scale: float = 1) -> str:
    """Inductor's figure and ours: `812 -> 640`."""
    return " -> ".join(number(values.get(name), form, scale) for name in BACKENDS)


def means_table(rows: dict[str, dict[str, float]]) -> Table:
    """The geometric means."""
    table = Table(title="geometric means")
    headings = {
        "speedup_over_eager": "vs eager",
        "speedup_over_inductor": "vs inductor",
        "speedup_over_better": "vs the better of both",
        "inductor_over_itself": "inductor vs itself",
        "memory_ratio": "peak memory, of inductor's",
        "compile_ratio": "compile time, of inductor's",
    }
    table.add_column("dtype")
    for heading in ("cases", *headings.values()):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(name, str(row["cases"]), *(f"{row[key]:.3f}" for key in headings))
    return table


def plot(results: Sequence[Found], path: Path) -> bool:
    """Bars of time in units of Inductor's, a panel per dtype; False without matplotlib."""
    panels: dict[str, list[Row]] = {}
    variants = ("eager", OURS, CONTROL)
    for found in results:
        if ratios(found):
            title = f"{found['dtype']}: time of a training step in units of Inductor's"
            median = {name: each["median"] for name, each in found["seconds"].items()}
            row = label_of(found), [median[name] / median[STOCK] for name in variants]
            panels.setdefault(title, []).append(row)
    return bars(panels, variants, path)
