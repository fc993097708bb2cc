"""Measuring one case on a GPU: check every variant, then time those that are right, side by side
with a copy of as many bytes.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters

from normpass.backend.explain import record
from normpass.benchmarks.gpu_check import errors_of, poison, reference, wrong
from normpass.benchmarks.gpu_clock import MOST_CALLS, Rotation
from normpass.benchmarks.gpu_variants import EAGER, NORMPASS
from normpass.benchmarks.measure import Timing, interleave, kept_buffers
from normpass.benchmarks.steps import stock_as_it_is
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from normpass.benchmarks.gpu_cases import GpuCase
    from normpass.benchmarks.gpu_clock import Place
    from normpass.benchmarks.gpu_variants import Bind, Variant
    from normpass.passes.pipeline import Decision

COPY = "copy"
REPEATS = 20


@dataclass
class CaseResult:
    """What was measured for one case.

    Attributes:
        case: the case.
        sets: how many sets of buffers rotated.
        seconds: by variant, and of the copy.
        errors: of each output, by variant.
        wrong, failed: why a variant was not timed.
        fused, refused: normpass's decisions, by its variants.
    """

    case: GpuCase
    sets: int
    seconds: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    fused: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)

    @property
    def copy_bandwidth(self) -> float | None:
        """Bytes per second that the copy reads and writes, together."""
        timing = self.seconds.get(COPY)
        return copied_bytes(self.case) / timing.median if timing else None

    def fraction(self, variant: str) -> float | None:
        """Of the copy's bandwidth, on the least traffic."""
        timing, roof = self.seconds.get(variant), self.copy_bandwidth
        return self.case.least_bytes() / timing.median / roof if timing and roof else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all fields and what follows from them."""
        least = self.case.least_bytes()
        return {
            **asdict(self),
            "label": self.case.label,
            "least_bytes": least,
            "copied_bytes": copied_bytes(self.case),
            "copy_bytes_per_second": self.copy_bandwidth,
            "bytes_per_second": {n: least / t.median for n, t in self.seconds.items() if n != COPY},
            "fraction_of_copy": {n: self.fraction(n) for n in self.seconds if n != COPY},
        }


def copied_bytes(case: GpuCase) -> int:
    """What the copy reads and writes: as much as the case's least traffic, to a byte."""
    return case.least_bytes() // 2 * 2


def measure(
    case: GpuCase, place: Place, variants: Sequence[Variant], repeats: int = REPEATS
) -> CaseResult:
    """Check and time one case; variants that raise are recorded with what they said."""
    torch._dynamo.reset()
    counters["normpass"].clear()
    result = CaseResult(case, place.sets(case.least_bytes()))
    tensors = case.tensors(place.device)
    with kept_buffers(case.phase == "backward"), no_graph_caches():
        binds = checked(result, tensors, [each for each in variants if each.takes(case)])
        others = [case.tensors(place.device, seed) for seed in range(1, result.sets)]
        steps = bound(result, binds, [tensors, *others])
    copy = copies(case, place.device, result.sets)
    entries = {**steps, COPY: copy} if steps else {}
    if entries:
        result.seconds = interleave(
            entries, repeats, place.device, clock=place.clock, most_calls=MOST_CALLS
        )
    return result


@contextmanager
def no_graph_caches() -> Iterator[None]:
    """What is compiled in the block is compiled, so that normpass's decisions are heard."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    graphs = inductor_config.patch(fx_graph_cache=False)
    with graphs, functorch_config.patch(enable_autograd_cache=False):
        yield


def checked(
    result: CaseResult, tensors: Mapping[str, Tensor], variants: Sequence[Variant]
) -> dict[str, Bind]:
    """The variants that are right, compiled; adds to the result why others are not among them."""
    right = reference(result.case, tensors)
    binds: dict[str, Bind] = {}
    for variant in variants:
        try:
            with stock_as_it_is(variant.name), record.listen() as heard:
                bind = variant.prepare(result.case)
                step = bind(tensors)
                poison(tensors["x"])
                errors = errors_of(result.case, step(), right)
        except Exception as error:  # of any type: the others are measured still
            result.failed[variant.name] = said(error)
            continue
        result.errors[variant.name] = errors
        if variant.name in NORMPASS:
            note(result, variant.name, heard)
        reason = wrong(result.case, errors, result.errors.get(EAGER), right)
        if reason:
            result.wrong[variant.name] = reason
        else:
            binds[variant.name] = bind
    return binds


def note(result: CaseResult, name: str, decisions: Sequence[Decision]) -> None:
    """What normpass fused, and what it left to Inductor and why."""
    result.fused[name] = [each.name for each in decisions if isinstance(each, Fused)]
    result.refused[name] = [
        f"{each.name}: {each.reason}" for each in decisions if not isinstance(each, Fused)
    ]


def bound(
    result: CaseResult, binds: Mapping[str, Bind], sets: Sequence[Mapping[str, Tensor]]
) -> dict[str, Rotation]:
    """A step of every variant over all sets of tensors."""
    steps = {}
    for name, bind in binds.items():
        try:
            steps[name] = Rotation([bind(tensors) for tensors in sets])
        except Exception as error:  # the sets may be too many for the memory
            result.failed[name] = said(error)
    return steps


def copies(case: GpuCase, device: str, sets: int) -> Rotation:
    """The roof: copies between buffers of half of the least traffic each, which rotate too."""

    def buffer() -> Tensor:
        return torch.ones(case.least_bytes() // 2, dtype=torch.uint8, device=device)

    pairs = [(buffer(), buffer()) for _ in range(sets)]
    return Rotation([partial(to.copy_, of) for to, of in pairs])


def said(error: Exception) -> str:
    """What an exception says, on one line of a few words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
