"""Measuring one case: compile every variant, check it against float64, time all in alternation."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import statistics
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.run.clocks import calls_per_sample, cpu_seconds, cuda_seconds
from normpass.benchmarks.cases import spell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from normpass.backend.run.clocks import Clock
    from normpass.benchmarks.cases import Case

VARIANTS = ("eager", "inductor", "normpass")
# How far PyTorch's own eager result may be from float64, relative to the largest value: beyond
# this the oracle or the machine is broken, and there is nothing to compare with.
EAGER_LIMIT = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 2.5e-1}


@dataclass
class Timing:
    """Seconds per call: the median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of at least two samples."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass
class Result:
    """What was measured for one case; variants that were wrong have no timing but a reason."""

    norm: str
    shape: tuple[int, ...]
    dtype: str
    phase: str
    bytes_least: int
    add_bytes: int
    timings: dict[str, Timing] = field(default_factory=dict)
    add: Timing | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For people: `layer_norm 4096x1024 float32 backward`."""
        return f"{self.norm} {spell(self.shape)} {self.dtype} {self.phase}"

    def ratio(self, variant: str, against: str) -> float | None:
        """How many times faster than another variant; None where one of them was not timed."""
        if variant not in self.timings or against not in self.timings:
            return None
        return self.timings[against].median / self.timings[variant].median

    def over_add(self, variant: str) -> float | None:
        """Time in units of `torch.add(x, dy)`; None where the variant was not timed."""
        if variant not in self.timings or self.add is None:
            return None
        return self.timings[variant].median / self.add.median

    def bandwidth(self, variant: str) -> float | None:
        """Achieved bytes per second, counting only the least traffic."""
        if variant not in self.timings:
            return None
        return self.bytes_least / self.timings[variant].median

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all fields, and the derived figures of every variant."""
        derived = {
            variant: {
                "over_add": self.over_add(variant),
                "bytes_per_second": self.bandwidth(variant),
                "speedup_over_eager": self.ratio(variant, "eager"),
                "speedup_over_inductor": self.ratio(variant, "inductor"),
            }
            for variant in self.timings
        }
        return {**asdict(self), "derived": derived}


class Variant:
    """One case under one backend: its outputs for the check and its step for the clock."""

    def __init__(self, case: Case, backend: str, device: str) -> None:
        self.module, self.x, self.dy = case.build(device)
        self.names = ["x", *(name for name, _ in self.module.named_parameters())]
        self.inputs = [self.x, *self.module.parameters()]
        self.forward: Any = self.module
        if backend != "eager":
            self.forward = torch.compile(self.module, backend=backend)
        self.backward_alone = case.phase == "backward"
        self.y: Tensor | None = None

    def outputs(self) -> dict[str, Tensor]:
        """y and the gradients, by name; compiles what has to be compiled."""
        y = self.forward(self.x)
        grads = torch.autograd.grad(y, self.inputs, self.dy, retain_graph=self.backward_alone)
        if self.backward_alone:
            self.y = y
        named = {f"d{name}": grad for name, grad in zip(self.names, grads, strict=True)}
        return {"y": y.detach(), **named}

    def step(self) -> object:
        """What is timed: one backward of a kept graph, or one forward and backward."""
        if self.backward_alone:
            assert self.y is not None, "outputs() comes before step()"
            return torch.autograd.grad(self.y, self.inputs, self.dy, retain_graph=True)
        return torch.autograd.grad(self.forward(self.x), self.inputs, self.dy)


def oracle(case: Case, device: str) -> dict[str, Tensor]:
    """y and the gradients in float64, from the reference that is written in primitives."""
    module, x, dy = case.build(device)
    names = ["x", *(name for name, _ in module.named_parameters())]
    inputs = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    y = case.norm.reference(*inputs)
    grads = torch.autograd.grad(y, inputs, dy.double())
    named = {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    return {"y": y.detach(), **named}


def relative_errors(got: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """max |got - right| / max |right|, by name; infinite where got is not finite or misshapen."""
    errors = {}
    for name, want in right.items():
        have = got[name]
        if have.shape != want.shape or not have.isfinite().all():
            errors[name] = math.inf
            continue
        scale = want.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        errors[name] = ((have.double() - want).abs().max() / scale).item()
    return errors


def verdict(
    errors: Mapping[str, float],
    eager: Mapping[str, float],
    right: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> str | None:
    """Why a result is wrong, None when it is right.

    Right is: no further from float64 than four times eager's error, or than rounding explains
    where eager happened to be closer: two units in the last place of the dtype, and for a value
    that sums n others in float32 one by one (stock Inductor's dweight), sqrt(n) units of float32.
    """
    for name, error in errors.items():
        if not eager[name] <= EAGER_LIMIT[dtype]:
            return f"eager's own {name} is {eager[name]:.1e} away from float64"
        summed = right["y"].numel() / right[name].numel()
        rounding = 2 * torch.finfo(dtype).eps + math.sqrt(summed) * torch.finfo(torch.float32).eps
        limit = max(4 * eager[name], rounding)
        if not error <= limit:
            return f"{name} is {error:.1e} away from float64, at most {limit:.1e} is right"
    return None


def measure(case: Case, device: str, repeats: int, variants: Sequence[str] = VARIANTS) -> Result:
    """Check and time one case; `variants` starts with eager, by whose error others are judged."""
    from torch._dynamo.utils import counters

    if not variants or variants[0] != "eager":
        raise ValueError(f"expected variants that start with 'eager', got {list(variants)}")
    result = Result(
        norm=case.norm.name,
        shape=case.shape,
        dtype=case.dtype,
        phase=case.phase,
        bytes_least=case.bytes_least(),
        add_bytes=case.add_bytes(),
    )
    # One reset per case, not per variant: a reset would drop the variants compiled before, and
    # all of them have to stay alive to be timed in alternation.
    torch._dynamo.reset()
    counters["normpass"].clear()
    right = oracle(case, device)
    steps: dict[str, Callable[[], object]] = {}
    with kept_buffers(case.phase == "backward"):
        for name in variants:
            variant = Variant(case, name, device)
            result.errors[name] = relative_errors(variant.outputs(), right)
            dtype = variant.x.dtype
            wrong = verdict(result.errors[name], result.errors["eager"], right, dtype)
            if wrong:
                result.wrong[name] = wrong
            else:
                steps[name] = variant.step
    result.counters = dict(counters["normpass"])
    # In the place of dy, which may have another shape or format than x.
    x, other = variant.x.detach(), torch.randn_like(variant.x)
    times = interleave({**steps, "add": lambda: torch.add(x, other)}, repeats, device)
    result.add = times.pop("add")
    result.timings = times
    return result


@contextmanager
def kept_buffers(keep: bool) -> Iterator[None]:
    """Compile so that a graph can be run backward twice.

    Inductor otherwise reuses the saved tensors' memory in the backward ("donates" it) and then
    refuses retain_graph=True, by which the backward alone is timed.
    """
    import torch._functorch.config as functorch_config

    with ExitStack() as stack:
        if keep:
            stack.enter_context(functorch_config.patch(donated_buffer=False))
        yield


def keep_freed_memory() -> bool:
    """Have glibc keep and reuse what is freed, for the rest of the process; False elsewhere.

    By default malloc asks the system for large blocks or gives them back, depending on what was
    freed before, and the page faults of fresh memory can cost ten times a kernel: the same
    `torch.add` was seen to take 0.4 ms or 7 ms. Kept memory is what GPUs always have, and what a
    training loop in its steady state mostly has.
    """
    top_pad, trim_threshold, mmap_max = -2, -1, -4  # malloc.h: M_TOP_PAD and so on
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    never = 2**31 - 1
    settings = ((mmap_max, 0), (trim_threshold, never), (top_pad, 64 << 20))
    return all(mallopt(name, value) == 1 for name, value in settings)


def interleave(
    steps: Mapping[str, Callable[[], object]],
    repeats: int,
    device: str,
    calls_each: int | None = None,
    clock: Clock | None = None,
    most_calls: int | None = None,
) -> dict[str, Timing]:
    """Time every step `repeats` times in alternation, each round starting with another one.

    calls_each: of a step in each sample, for steps that are warm; None: as many as the clock needs,
    and no more than most_calls. clock: seconds of so many calls; None for the device's own.
    """
    if repeats < 2:
        raise ValueError(f"expected at least 2 repeats for quartiles, got {repeats}")
    clock = clock or (cuda_seconds if torch.device(device).type == "cuda" else cpu_seconds)
    calls = {name: calls_each or calls_per_sample(step, clock) for name, step in steps.items()}
    if most_calls:
        calls = {name: min(count, most_calls) for name, count in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = itertools.cycle(steps)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            for name in itertools.islice(names, len(steps)):
                samples[name].append(clock(steps[name], calls[name]) / calls[name])
            next(names)
    finally:
        if collecting:
            gc.enable()
    return {name: Timing.of(taken) for name, taken in samples.items()}


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """The most bytes that tensors allocated during the step hold at one time."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        step()
    # Under this name in torch 2.11 to 2.15; the public tables hold sums by operator, not the order.
    results = profile.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in changes), initial=0))


def spread(timing: Timing) -> str:
    """The median in milliseconds with half the interquartile range: `1.492 ±5%`."""
    half = (timing.high - timing.low) / 2 / timing.median
    return f"{timing.median * 1e3:.3f} ±{half:.0%}"


def number(value: float | None, form: str, scale: float = 1) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else form.format(value * scale)
