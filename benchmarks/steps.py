"""One training step of a model, eager, compiled by Inductor and by normpass, in one process.

All variants share one module, so one set of weights.

What is measured, in this order:

    compile time   the first step less a later one, each from an empty cache
    right or wrong the loss and every gradient against float64; what is wrong is not timed
    peak memory    bytes in tensors that one step allocates
    step time      in alternation, Inductor's twice: its ratio to itself shows the noise

This module is a program too: `in_fresh_process` runs it for one case, so that neither memory nor
compiled code of one case reaches the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from normpass.backend import inductor_mistakes
from normpass.backend.explain import record
from normpass.benchmarks.cases import DTYPES
from normpass.benchmarks.demo import private_cache, synchronize, warm_up_compiler
from normpass.benchmarks.exact import without_dropout
from normpass.benchmarks.gradients import (
    draws_numbers,
    gradients,
    judge,
    oracle,
    relative_errors,
    rounding_errors,
    step_of,
    worst,
)
from normpass.benchmarks.measure import interleave, keep_freed_memory, peak_bytes
from normpass.benchmarks.zoo import Case, Made, zoo
from normpass.passes import faults
from normpass.passes.pipeline import Decision, Fused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from normpass.benchmarks.gradients import Step
    from normpass.benchmarks.zoo import Loss

BACKENDS: Mapping[str, Any] = {"inductor": "inductor", "normpass": "normpass"}
STOCK, OURS = BACKENDS
CONTROL = "inductor again"
# A case takes some minutes where the processor knows its dtype. What hangs ends after this.
LONGEST_SECONDS = 3600
# No compiled code is found in a cache, in whatever thread it is asked for.
NO_CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}


@dataclass(frozen=True)
class Job:
    """A case, and how it is measured.

    Attributes:
        stock_first: whether Inductor is compiled before normpass: what comes second finds Python
            warmer.
        steady: whether malloc is to keep freed memory.
        tiny: the sizes of tests; normpass then fuses whatever the size.
    """

    case: Case
    device: str
    repeats: int
    stock_first: bool = True
    steady: bool = True
    tiny: bool = False

    @property
    def loss(self) -> Loss:
        """The model's."""
        return zoo()[self.case.model].loss

    def step(self, made: Made, backend: Any) -> Step:
        """One under a backend."""
        options = {"least_bytes": 0} if backend == OURS and self.tiny else None
        return step_of(self.loss, made, backend, options)


class Compiled(NamedTuple):
    """A step whose code is there, and what it took to make it."""

    step: Step
    seconds: float
    decisions: list[Decision]


def in_fresh_process(job: Job) -> dict[str, Any]:
    """`measure` in a new process with an empty cache folder; `failed` says why there is nothing."""
    # Its temporary folder is not private: Inductor's precompiled headers lie there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "normpass.benchmarks.steps", json.dumps(asdict(job))],
                env={**os.environ, **NO_CACHES, "TORCHINDUCTOR_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                check=False,
                timeout=LONGEST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return failed(job, f"took more than {LONGEST_SECONDS} seconds")
    if done.returncode:
        return failed(job, end_of(done.returncode, done.stderr))
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def failed(job: Job, reason: str) -> dict[str, Any]:
    """What stands in the results for a case of which nothing was measured."""
    return {**asdict(job.case), "failed": {"case": reason}}


def end_of(returncode: int, stderr: str) -> str:
    """How a process ended: by which signal, and the last that it wrote."""
    how = f"exit status {returncode}"
    if returncode < 0:
        how = f"killed by {signal.Signals(-returncode).name}"
    said = [line for line in stderr.splitlines() if line.strip()]
    return "\n".join([how, *said[-15:]])


def measure(job: Job, backends: Mapping[str, Any] = BACKENDS) -> dict[str, Any]:
    """Compile, check and time one case, in this process.

    backends: what stands for Inductor and for normpass, by their names.
    """
    made = job.case.build(job.device, tiny=job.tiny)
    order = (STOCK, OURS) if job.stock_first else (OURS, STOCK)
    found: dict[str, Any] = {**asdict(job.case), "compiled_first": order[0]}
    found |= {"failed": {}, "wrong": {}, "errors": {}}
    compiled: dict[str, Compiled] = {}
    warm_up_compiler(torch.device(job.device))
    for name in order:
        with told(found, name):
            compiled[name] = compile_step(job, made, backends, name)
    found["compile_seconds"] = {name: each.seconds for name, each in compiled.items()}
    if OURS in compiled:
        found |= what_became(compiled[OURS].decisions)
    steps = {"eager": step_of(job.loss, made)}
    steps |= {name: compiled[name].step for name in BACKENDS if name in compiled}
    check(found, job, made, steps, backends)
    bad = {*found["failed"], *found["wrong"]}
    found |= timed(job, {name: step for name, step in steps.items() if name not in bad})
    found["faults"] = list(map(list, faults.reported()))
    return found


@contextmanager
def told(found: dict[str, Any], name: str) -> Iterator[None]:
    """Whatever is raised in the block is a result: the other variants are measured still."""
    try:
        yield
    except Exception as error:
        found["failed"][name] = f"{type(error).__name__}: {error}"


# ---- the steps


def compile_step(job: Job, made: Made, backends: Mapping[str, Any], name: str) -> Compiled:
    """First step less a later one, nothing compiled before is found: neither on a disk nor in
    memory, where Inductor keeps libraries by their source.
    """
    from torch._inductor.utils import clear_caches

    clear_caches()
    step = job.step(made, backends[name])
    device = torch.device(job.device)
    seconds = []
    with stock_as_it_is(name), private_cache(), record.listen() as heard:
        for _ in range(3):
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
    return Compiled(step, seconds[0] - min(seconds[1:]), heard)


@contextmanager
def stock_as_it_is(name: str) -> Iterator[None]:
    """Stock Inductor has its mistakes: those that normpass mends are put back for its compiling."""
    if name == STOCK:
        inductor_mistakes.uninstall()
    yield


def what_became(decisions: list[Decision]) -> dict[str, Any]:
    """The regions that were fused, and the others with their reasons."""
    fused, refused = [], []
    for decision in decisions:
        # What stands in a function has its file and line for a module: the folder says nothing.
        places = (place.rpartition(os.sep)[2] for place in decision.module.split(", "))
        row = {"norm": decision.name, "module": ", ".join(places), "phase": decision.phase}
        if isinstance(decision, Fused):
            fused.append(row)
        else:
            refused.append({**row, "reason": decision.reason})
    return {"fused": fused, "refused": refused}


# ---- right or wrong


def check(
    found: dict[str, Any],
    job: Job,
    made: Made,
    steps: Mapping[str, Step],
    backends: Mapping[str, Any],
) -> None:
    """Adds how far each variant is from float64, and which are wrong.

    A model that draws random numbers is compared without: its steps are compiled once more, with
    no dropout. Those that are timed must have a finite loss.
    """
    found["random"] = draws_numbers(steps["eager"], job.device)
    with without_dropout(made.module) if found["random"] else nullcontext():
        exact = oracle(job.loss, made)
        eager = rounding_errors(job.loss, made, exact)
        for name, step in steps.items():
            with told(found, name), stock_as_it_is(name):
                if found["random"] and name in backends:
                    step = job.step(made, backends[name])
                errors = relative_errors(gradients(made, step), exact)
                found["errors"][name] = worst(errors)
                wrong = judge(errors, eager, exact, DTYPES[job.case.dtype])
                if wrong:
                    found["wrong"][name] = wrong
    for name, step in steps.items():
        with told(found, name):
            if name not in found["wrong"] and not step()[0].isfinite():
                found["wrong"][name] = "the loss is not finite"


# ---- the clock


def timed(job: Job, steps: Mapping[str, Step]) -> dict[str, Any]:
    """Peak memory and times of those that are right; Inductor's is timed a second time."""
    peaks = {name: peak_bytes(step, job.device) for name, step in steps.items()}
    kept = job.steady and keep_freed_memory()
    entries = dict(steps)
    if STOCK in steps:
        entries[CONTROL] = steps[STOCK]
    for _ in range(2):
        for step in entries.values():
            step()
    seconds = {}
    if entries:
        times = interleave(entries, job.repeats, job.device, calls_each=1)
        seconds = {name: asdict(timing) for name, timing in times.items()}
    return {"peak_bytes": peaks, "seconds": seconds, "freed_memory_kept": kept}


def main(text: str) -> None:
    """Measure the job that is spelled as JSON; the last line printed is the result."""
    fields = json.loads(text)
    job = Job(**{**fields, "case": Case(**fields["case"])})
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    main(sys.argv[1])
