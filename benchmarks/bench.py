"""`normpass bench`: norms under eager, stock Inductor and normpass, side by side in one process.

Every variant is first compared with a float64 reference, and what is wrong is not timed. The
rest is timed in alternation; medians are printed with the ratio to eager and to Inductor, the
bandwidth achieved on the least traffic, and the time in units of `torch.add(x, dy)`, which reads
two tensors of the size and writes a fresh one. Results go to a JSON file and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from normpass.benchmarks import (
    calibrate,
    compile_time,
    ensembles,
    model_steps,
    peers,
    processes,
    roofline,
    second_order,
    vmap,
    warm_start,
)
from normpass.benchmarks.cases import (
    DTYPES,
    PHASES,
    Case,
    geometric_mean,
    parse_shape,
    select,
    spell,
)
from normpass.benchmarks.gpu_cases import listed
from normpass.benchmarks.machine import machine
from normpass.benchmarks.measure import (
    VARIANTS,
    Result,
    keep_freed_memory,
    measure,
    number,
    spread,
)
from normpass.benchmarks.norms import NORMS
from normpass.benchmarks.plots import Row, bars

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from normpass.benchmarks.norms import Shape

RESULTS = Path("benchmarks/results")
REPEATS = 50


def means(results: Sequence[Result], variants: Sequence[str]) -> list[dict[str, Any]]:
    """Geometric means per norm, phase and dtype, over the shapes that every variant got right."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        if all(variant in result.timings for variant in variants):
            groups.setdefault((result.norm, result.phase, result.dtype), []).append(result)
    rows = []
    for (norm, phase, dtype), members in groups.items():
        row: dict[str, Any] = {"norm": norm, "phase": phase, "dtype": dtype}
        row["shapes"] = [spell(member.shape) for member in members]
        for variant in variants:
            row[f"{variant}_over_add"] = geometric_mean(present(members, "over_add", variant))
        for against in variants[:-1]:
            ratios = present(members, "ratio", variants[-1], against)
            row[f"speedup_over_{against}"] = geometric_mean(ratios)
        rows.append(row)
    return rows


def present(members: Sequence[Result], figure: str, *args: str) -> list[float]:
    """A figure of every result; all of them were timed."""
    return [value for member in members if (value := getattr(member, figure)(*args)) is not None]


def result_table(results: Sequence[Result], variants: Sequence[str]) -> Table:
    """A row per case: times with quartiles, ratios, bandwidth."""
    ours = variants[-1]
    table = Table(
        title=f"medians in ms, half the interquartile range; speedups and bandwidth are {ours}'s"
    )
    table.add_column("case", no_wrap=True)
    for heading in (*variants, "add"):
        table.add_column(heading, justify="right", no_wrap=True)
    for against in variants[:-1]:
        table.add_column(f"vs {against}", justify="right", no_wrap=True)
    for heading in ("GB/s", "add GB/s", "x add"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(result.label, *cells(result, variants))
    return table


def cells(result: Result, variants: Sequence[str]) -> Iterator[str]:
    """The cells of one row, after the label."""
    ours = variants[-1]
    times = {**result.timings, **({"add": result.add} if result.add else {})}
    for variant in (*variants, "add"):
        timing = times.get(variant)
        yield "wrong" if timing is None else spread(timing)
    for against in variants[:-1]:
        yield number(result.ratio(ours, against), "{:.2f}x")
    yield number(result.bandwidth(ours), "{:.1f}", 1e-9)
    yield number(result.add_bytes / result.add.median if result.add else None, "{:.1f}", 1e-9)
    yield number(result.over_add(ours), "{:.2f}")


def means_table(rows: Sequence[dict[str, Any]], variants: Sequence[str]) -> Table:
    """The geometric means."""
    table = Table(title="geometric means over the shapes")
    for heading in ("norm", "phase", "dtype"):
        table.add_column(heading, no_wrap=True)
    for against in variants[:-1]:
        table.add_column(f"{variants[-1]} vs {against}", justify="right")
    for variant in variants:
        table.add_column(f"{variant} x add", justify="right")
    for row in rows:
        table.add_row(
            row["norm"],
            row["phase"],
            row["dtype"],
            *(f"{row[f'speedup_over_{against}']:.2f}x" for against in variants[:-1]),
            *(f"{row[f'{variant}_over_add']:.2f}" for variant in variants),
        )
    return table


def save(
    results: Sequence[Result], variants: Sequence[str], device: str, folder: Path, steady: bool
) -> Path:
    """Write everything measured as JSON; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {**machine(device), "freed_memory_kept": steady}
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    path = folder / f"{torch.device(device).type}-{stamp}.json"
    document = {
        "machine": about,
        "variants": list(variants),
        "results": [result.as_dict() for result in results],
        "geometric_means": means(results, variants),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def plot(results: Sequence[Result], variants: Sequence[str], path: Path) -> bool:
    """Bars of time in units of `add`, a panel per phase and dtype; False without matplotlib."""
    panels: dict[str, list[Row]] = {}
    for result in results:
        title = f"{result.phase}, {result.dtype}: time in units of torch.add(x, dy)"
        lengths = [result.over_add(variant) or 0.0 for variant in variants]
        row = f"{result.norm} {spell(result.shape)}", lengths
        panels.setdefault(title, []).append(row)
    return bars(panels, variants, path)


def run(
    cases: Sequence[Case],
    device: str,
    repeats: int,
    console: Console,
    variants: Sequence[str] = VARIANTS,
) -> list[Result]:
    """Measure every case. The bar is drawn between cases only: drawing would disturb the clock."""
    results = []
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.label, refresh=True)
            results.append(measure(case, device, repeats, variants))
            progress.advance(task)
        progress.update(task, description="measured", refresh=True)
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of `normpass bench`."""

    def shape(text: str) -> tuple[int, ...]:
        try:
            return parse_shape(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = argparse.ArgumentParser("normpass bench", description=__doc__.split("\n")[0])
    more: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--norm", choices=list(NORMS), help="only this norm; repeatable", **more)
    parser.add_argument("--shape", type=shape, help="such as 4096x1024; repeatable", **more)
    parser.add_argument("--dtype", choices=list(DTYPES), help="repeatable", **more)
    parser.add_argument("--phase", choices=PHASES, help="repeatable", **more)
    counts = f"{REPEATS}; {vmap.REPEATS} with --vmap, {compile_time.REPEATS} with --compile-time, "
    counts += f"{model_steps.REPEATS} with --models, {second_order.REPEATS} with --second-order"
    parser.add_argument("--repeats", type=int, help=f"samples of each variant: {counts}")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU is used when there is one")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder, {RESULTS}")
    parser.add_argument(
        "--system-allocator",
        action="store_true",
        help="leave malloc alone: times then include page faults that depend on its history",
    )
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--compile-time",
        action="store_true",
        help="compile times of the demo's models instead, normpass against Inductor",
    )
    group.add_argument(
        "--vmap",
        action="store_true",
        help="vmap(grad(batch_norm)) under Inductor instead, time and memory with normpass's rules "
        f"registered against without; --shape is VxNxCxHxW, {spell(vmap.SHAPE)}",
    )
    group.add_argument(
        "--second-order",
        nargs="*",
        choices=second_order.PROGRAMS,
        metavar="PROGRAM",
        help="programs that take derivatives of compiled code instead, against eager and Inductor: "
        f"{'; '.join(second_order.PROGRAMS)}",
    )
    group.add_argument(
        "--ensembles",
        nargs="*",
        choices=ensembles.PROGRAMS,
        metavar="PROGRAM",
        help="gradients of many models, or for each example, instead, against eager and Inductor: "
        f"{'; '.join(ensembles.PROGRAMS)}",
    )
    group.add_argument(
        "--peers",
        nargs="*",
        choices=peers.PARTS,
        metavar="PART",
        help="what other libraries have right of norms' derivatives, and how long they take, "
        f"instead: {'; '.join(peers.PARTS)}",
    )
    group.add_argument(
        "--processes",
        action="store_true",
        help="training steps over two processes instead, by DistributedDataParallel and FSDP2, "
        "normpass against Inductor",
    )
    group.add_argument(
        "--warm-start",
        action="store_true",
        help="from the start of a process to its first step with filled caches instead, normpass "
        "against Inductor",
    )
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="what work costs on this machine instead: decides which norms are fused from now on",
    )
    group.add_argument(
        "--roofline",
        action="store_true",
        help="bytes that kernels move on an H200 instead, computed from their plans with no GPU",
    )
    parser.add_argument(
        "--registered",
        action="store_true",
        help='with --compile-time: backend="normpass" with its rules registered against without',
    )
    model_steps.add_options(parser, group)
    args = parser.parse_args(argv)
    wrong = complaint(args)
    if wrong:
        parser.error(wrong)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return args


# What is measured instead of single norms, and which choices each has.
INSTEAD: dict[str, tuple[str, ...]] = {
    "compile_time": (),
    "calibrate": (),
    "vmap": ("shape",),
    "second_order": (),
    "ensembles": (),
    "peers": (),
    "processes": (),
    "warm_start": (),
    "roofline": (),
    "models": ("dtype", "format", "tiny"),
}


def instead_of_norms(args: argparse.Namespace) -> str | None:
    """Which of INSTEAD was asked for; None for single norms. --models alone is an empty list."""
    return next((name for name in INSTEAD if getattr(args, name) not in (None, False)), None)


def complaint(args: argparse.Namespace) -> str | None:
    """What does not go together in the options; None when all is well."""
    if args.repeats is not None and args.repeats < 2:
        return f"--repeats must be at least 2, got {args.repeats}"
    if args.registered and not args.compile_time:
        return "--registered needs --compile-time"
    measured = instead_of_norms(args)
    if measured:
        return choice_complaint(args, measured)
    alone = [name for name in ("format", "tiny") if getattr(args, name)]
    if alone:
        return f"--{alone[0]} needs --models"
    if args.shape and len(args.norm) != 1:
        return "--shape needs exactly one --norm, because norms differ in the axes they take"
    return None


def choice_complaint(args: argparse.Namespace, measured: str) -> str | None:
    """What a measurement other than that of single norms has no use for."""
    command = f"--{measured.replace('_', '-')}"
    choices = ("norm", "dtype", "phase", "format", "tiny", "shape")
    idle = [name for name in choices if getattr(args, name) and name not in INSTEAD[measured]]
    if idle == ["shape"]:
        return f"{command} takes no --shape"
    if idle:
        return f"{command} has nothing to choose by {', '.join(f'--{name}' for name in idle)}"
    if measured == "vmap":
        return shape_complaint(args.shape)
    if measured == "models" and not model_steps.cases_of(args):
        return f"of {', '.join(args.models)} none has the format {', '.join(args.format)}"
    return None


def shape_complaint(shapes: Sequence[Shape]) -> str | None:
    """--vmap takes one shape, of five sizes."""
    if shapes and (len(shapes) > 1 or len(shapes[0]) != len(vmap.SHAPE)):
        given = ", ".join(map(spell, shapes))
        return f"--vmap takes one --shape of five sizes, such as {spell(vmap.SHAPE)}, got {given}"
    return None


def instead(args: argparse.Namespace, console: Console) -> int:
    """The measurements that are not of single norms."""
    if args.models is not None:
        return model_steps.run(args, console)
    if args.calibrate:
        return calibrate.run(console)
    if args.vmap:
        shape = args.shape[0] if args.shape else vmap.SHAPE
        repeats = args.repeats or vmap.REPEATS
        return vmap.run(console, args.device, repeats, args.out, shape, args.system_allocator)
    if args.second_order is not None:
        repeats, steady = args.repeats or second_order.REPEATS, not args.system_allocator
        return second_order.run(console, repeats, args.out, args.second_order, steady)
    if args.ensembles is not None:
        repeats, steady = args.repeats or ensembles.REPEATS, not args.system_allocator
        return ensembles.run(console, repeats, args.out, args.ensembles, steady)
    if args.peers is not None:
        repeats, steady = args.repeats or peers.REPEATS, not args.system_allocator
        return peers.run(console, repeats, args.out, args.peers, steady)
    if args.processes:
        return processes.run(console, args.repeats or processes.REPEATS, args.out)
    if args.warm_start:
        return warm_start.run(console, args.repeats or warm_start.REPEATS, args.out)
    if args.roofline:
        return roofline.run(console, listed(), args.out / "h200-roofline.json")
    variants = compile_time.REGISTERED if args.registered else compile_time.BACKENDS
    repeats = args.repeats or compile_time.REPEATS
    return compile_time.run(console, args.device, repeats, args.out, variants)


def main(argv: Sequence[str] | None = None, variants: Sequence[str] = VARIANTS) -> int:
    """Run the benchmark; 1 when a variant was wrong, 0 otherwise."""
    args = parse(argv)
    cases = select(args.norm, args.shape, args.dtype, args.phase)
    if args.list:
        listed = cases if args.models is None else model_steps.cases_of(args)
        print("\n".join(case.label for case in listed))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    if instead_of_norms(args):
        return instead(args, console)
    steady = not args.system_allocator and keep_freed_memory()
    if os.getloadavg()[0] > 0.5:
        console.print(
            f"Note: something else is running here (load {os.getloadavg()[0]:.1f}); times of "
            "kernels that use every core suffer from that more than their ratios show."
        )
    results = run(cases, args.device, args.repeats or REPEATS, console, variants)
    console.print(result_table(results, variants))
    for result in results:
        for variant, reason in result.wrong.items():
            console.print(f"{result.label}: {variant} is wrong and not timed: {reason}")
    console.print(means_table(means(results, variants), variants))
    path = save(results, variants, args.device, args.out, steady)
    console.print(f"saved {path}")
    picture = path.with_suffix(".png")
    if plot(results, variants, picture):
        console.print(f"saved {picture}")
    else:
        console.print(
            "no plot: matplotlib is not installed (pip install 'normpass[bench]')", markup=False
        )
    return 1 if any(result.wrong for result in results) else 0
