"""How long a call takes, on a CPU and on a GPU: for reports and for benchmarks."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], object]
    # Seconds of so many calls of a step.
    Clock = Callable[[Step, int], float]

# A sample is as many calls as take about this long: clocks are too coarse for less.
SAMPLE_SECONDS = 2e-3


def calls_per_sample(step: Step, clock: Clock) -> int:
    """Warm up, and find how many calls take about SAMPLE_SECONDS."""
    clock(step, 3)
    return max(1, math.ceil(SAMPLE_SECONDS / max(clock(step, 3) / 3, 1e-9)))


def cpu_seconds(step: Step, calls: int) -> float:
    """Wall time of so many calls."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return time.perf_counter() - start


def cuda_seconds(step: Step, calls: int) -> float:
    """Device time of so many calls, from event to event."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
