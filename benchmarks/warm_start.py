"""`normpass bench --warm-start`: from the start of a process to the end of its first training step,
when all that is compiled lies in the caches; normpass against Inductor.

Every measurement is a process of its own, which runs first_step.py. Two before them fill a cache
folder for each backend, and one of Python's bytecode, which an installed package has and a working
tree need not have.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from normpass.benchmarks.machine import machine
from normpass.benchmarks.measure import Timing

if TYPE_CHECKING:
    from rich.console import Console

BACKENDS = ("inductor", "normpass")
REPEATS = 9
SCRIPT = Path(__file__).with_name("first_step.py")
# Not run as a file: Python would search its folder for modules, and so would Inductor's compiler.
RUN = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def seconds(backend: str, folder: str) -> float:
    """Of a new process, its start and end included; its caches lie in the folder.

    Raises:
        RuntimeError: when that process fails; the message holds what it wrote.
    """
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, backend),
        "PYTHONPYCACHEPREFIX": os.path.join(folder, "bytecode"),
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(SCRIPT), backend],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    taken = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"a first step with {backend} failed:\n{done.stderr}")
    return taken


def run(console: Console, repeats: int, folder: Path) -> int:
    """Measure both backends in alternation, print medians and their ratio, save them as JSON."""
    taken: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for backend in BACKENDS:
            for _ in range(2):
                seconds(backend, caches)
        for round_ in range(repeats):
            for backend in BACKENDS if round_ % 2 == 0 else reversed(BACKENDS):
                taken[backend].append(seconds(backend, caches))
    stock, ours = (taken[backend] for backend in BACKENDS)
    ratio = statistics.median(one / other for one, other in zip(ours, stock, strict=True))
    table = Table(title=f"seconds from start to first step, warm caches, median of {repeats}")
    for heading in (*BACKENDS, "ratio"):
        table.add_column(heading, justify="right")
    medians = [f"{statistics.median(taken[backend]):.2f}" for backend in BACKENDS]
    table.add_row(*medians, f"{ratio:.3f}")
    console.print(table)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cpu-warm-start.json"
    document = {
        "machine": machine("cpu"),
        "seconds": {backend: asdict(Timing.of(taken[backend])) for backend in BACKENDS},
        "ratio": ratio,
        "repeats": repeats,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"saved {path}")
    return 0
