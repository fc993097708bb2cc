"""`normpass bench --second-order`: programs that take derivatives of compiled code, of examples/.

Each is set up with eager modules, with modules compiled by stock Inductor where it can do it at
all, and by normpass, from the same seed. The numbers of the first steps are compared, what differs
is not timed, and the rest is timed in alternation in one process.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from normpass.benchmarks.cases import geometric_mean
from normpass.benchmarks.machine import machine
from normpass.benchmarks.measure import Timing, interleave, keep_freed_memory, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console
    from torch import Tensor

    Step = Callable[[], Tensor]

REPEATS = 15
STEPS_COMPARED = 3
# Of float32 numbers after three steps of training, relative to the largest.
NEAR = 2e-3


@dataclass(frozen=True)
class Program:
    """A function of a module of examples/ that sets up a step; options: more of its arguments."""

    module: str
    function: str = "training"
    options: Mapping[str, Any] = field(default_factory=dict)

    def step(self, compile: Callable[[Any], Any]) -> Step:
        """Raises ImportError where a package is missing."""
        module = importlib.import_module(f"normpass.examples.{self.module}")
        made: Step = getattr(module, self.function)(compile, **self.options)
        return made


PROGRAMS = {
    "wgan-gp, GroupNorm": Program("wgan_gp", options={"norm": "group"}),
    "wgan-gp, LayerNorm": Program("wgan_gp", options={"norm": "layer"}),
    "wgan-gp, GroupNorm, whole": Program("wgan_gp", options={"norm": "group", "whole": True}),
    "wgan-gp, LayerNorm, whole": Program("wgan_gp", options={"norm": "layer", "whole": True}),
    "pinn": Program("burgers_pinn"),
    "pinn, whole": Program("burgers_pinn", options={"whole": True}),
    "maml": Program("maml"),
    "maml, whole": Program("maml", options={"whole": True}),
    "matgl forces": Program("matgl_forces"),
    "matgl forces, whole": Program("matgl_forces", options={"whole": True}),
    "matgl Hessian": Program("matgl_forces", "hessian"),
    "gpt2 Hessian-vector": Program("gpt2_curvature", "hessian_vector"),
    "gpt2 Hessian-vector, whole": Program("gpt2_curvature", "forward_over_reverse"),
    "gpt2 Gauss-Newton-vector": Program("gpt2_curvature", "gauss_newton_vector"),
    "per-sample gradients": Program("per_sample_gradients"),
}
COMPILERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "inductor": partial(torch.compile, backend="inductor"),
    "normpass": partial(torch.compile, backend="normpass"),
}


@dataclass
class Result:
    """times: of a step, by compiler. failed: why there are none."""

    times: dict[str, Timing] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def speedup(self, against: str) -> float | None:
        if against not in self.times or "normpass" not in self.times:
            return None
        return self.times[against].median / self.times["normpass"].median


def measure(program: Program, repeats: int, compilers: Sequence[str] = tuple(COMPILERS)) -> Result:
    """Raises ImportError where a package of the program's is missing."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=bool(program.options.get("whole"))):
        return _measure(program, repeats, compilers)


def _measure(program: Program, repeats: int, compilers: Sequence[str]) -> Result:
    result = Result()
    steps: dict[str, Step] = {}
    right: list[Tensor] = []
    for name in compilers:
        try:
            step = program.step(COMPILERS[name])
            found = [step().detach().clone() for _ in range(STEPS_COMPARED)]
        except ImportError:
            raise
        except Exception as error:  # stock's are of many types
            result.failed[name] = str(error).strip().partition("\n")[0]
            continue
        right = right or found
        if reason := _difference(found, right):
            result.failed[name] = reason
        else:
            steps[name] = step
    result.times = interleave(steps, repeats, "cpu", calls_each=1)
    return result


def _difference(found: Sequence[Tensor], right: Sequence[Tensor]) -> str | None:
    for k, (have, want) in enumerate(zip(found, right, strict=True)):
        error = (have - want).abs().max() / want.abs().max().clamp_min(1e-30)
        if not error <= NEAR:
            return f"step {k} is {error:.1e} away from eager's, at most {NEAR:.0e} is right"
    return None


def result_table(results: Mapping[str, Result]) -> Table:
    """A row per program."""
    table = Table(title="a step, medians in ms, half the interquartile range")
    table.add_column("program", no_wrap=True)
    for heading in (*COMPILERS, "vs eager", "vs inductor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, result in results.items():
        cells = [
            spread(result.times[name]) if name in result.times else "cannot" for name in COMPILERS
        ]
        ratios = [result.speedup(against) for against in ("eager", "inductor")]
        table.add_row(label, *cells, *("-" if r is None else f"{r:.2f}x" for r in ratios))
    return table


def run(
    console: Console, repeats: int, folder: Path, names: Sequence[str] = (), steady: bool = True
) -> int:
    """Measures the programs, prints medians and ratios, saves them as JSON; 1 when ours is wrong
    or fails.
    """
    steady = steady and keep_freed_memory()
    results: dict[str, Result] = {}
    for label in names or PROGRAMS:
        try:
            results[label] = measure(PROGRAMS[label], repeats)
        except ImportError as error:
            console.print(f"{label} is left out: {error} (pip install 'normpass[examples]')")
            continue
        for name, reason in results[label].failed.items():
            console.print(f"{label}: {name} cannot: {reason}", markup=False)
    console.print(result_table(results))
    speedups = [s for r in results.values() if (s := r.speedup("eager")) is not None]
    if speedups:
        console.print(f"geometric mean over eager: {geometric_mean(speedups):.2f}x")
    document = {
        "machine": {**machine("cpu"), "freed_memory_kept": steady},
        "repeats": repeats,
        "programs": {
            label: {
                "seconds": {name: vars(timing) for name, timing in result.times.items()},
                "cannot": result.failed,
                "speedup_over_eager": result.speedup("eager"),
            }
            for label, result in results.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cpu-second-order.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"saved {path}")
    return 1 if any("normpass" in result.failed for result in results.values()) else 0
