"""`normpass bench --compile-time`: compile time of the demo's models, against stock Inductor.

With `--registered` both are compiled by backend="normpass", one of them after normpass.register():
what the rules for every other backend add to our own. The act of registering is not counted.

Every measurement is a process of its own with an empty cache folder. What is measured is the
first training step (forward and backward compiled on the way) less a later step; imports and the
precompiled C++ headers, which a trivial compilation brings in beforehand, are not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from rich.table import Table

import normpass
from normpass.benchmarks.cases import geometric_mean
from normpass.benchmarks.demo import BATCH, compiled, synchronize, train_step, warm_up_compiler
from normpass.benchmarks.machine import machine
from normpass.benchmarks.models import CLASSES, MODELS, build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

# What is compared, stock first: a backend, and whether the rules are registered before.
WITH_RULES = "+registered"
BACKENDS = ("inductor", "normpass")
REGISTERED = ("normpass", f"normpass{WITH_RULES}")
REPEATS = 3


def compile_seconds(name: str, variant: str, device: str) -> float:
    """First step less a later one, in this process: nothing may be compiled or cached before."""
    with normpass.registered() if variant.endswith(WITH_RULES) else nullcontext():
        return first_step_less_later(name, variant.removesuffix(WITH_RULES), device)


def first_step_less_later(name: str, backend: str, device: str) -> float:
    """`compile_seconds` under what is registered now."""
    where = torch.device(device)
    model = build(name, device)
    warm_up_compiler(where)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.rand(BATCH, 1, 8, 8, device=where)
    labels = torch.randint(CLASSES, (BATCH,), device=where)
    forward = compiled(model, backend)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        train_step(forward, optimizer, images, labels)
        synchronize(where)
        times.append(time.perf_counter() - start)
    return times[0] - min(times[1:])


def in_fresh_process(name: str, variant: str, device: str) -> float:
    """`compile_seconds` in a new process with an empty cache folder.

    Raises:
        RuntimeError: when that process fails; the message holds what it wrote.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "normpass.benchmarks.compile_time", name, variant, device],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"compiling {name} with {variant} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def run(
    console: Console,
    device: str,
    repeats: int,
    folder: Path,
    variants: Sequence[str] = BACKENDS,
) -> int:
    """Measure all the models in alternation, print medians and ratios, save them as JSON."""
    stock, ours = variants
    table = Table(title=f"seconds to compile a training step, median of {repeats}")
    for heading in ("model", *variants, "ratio"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    medians: dict[str, dict[str, float]] = {}
    for name in MODELS:
        taken: dict[str, list[float]] = {variant: [] for variant in variants}
        for round_ in range(repeats):
            for variant in variants if round_ % 2 == 0 else reversed(variants):
                taken[variant].append(in_fresh_process(name, variant, device))
        medians[name] = {variant: statistics.median(taken[variant]) for variant in variants}
        figures = [f"{medians[name][variant]:.2f}" for variant in variants]
        table.add_row(name, *figures, f"{medians[name][ours] / medians[name][stock]:.2f}")
    mean = geometric_mean([row[ours] / row[stock] for row in medians.values()])
    table.add_row("geometric mean", "", "", f"{mean:.2f}")
    console.print(table)
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "-registered" if ours.endswith(WITH_RULES) else ""
    path = folder / f"{torch.device(device).type}-compile-time{suffix}.json"
    document = {
        "machine": machine(device),
        "seconds": medians,
        "ratio": mean,
        "repeats": repeats,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"saved {path}")
    return 0


if __name__ == "__main__":
    print(json.dumps(compile_seconds(*sys.argv[1:4])))
