"""Where it is measured and by which clock: a GPU by its own events, a CPU, for tests, by Python's.

A kernel is timed over buffers that rotate: each call reads another set, and together they exceed
the cache, so what a call reads has left it. The host runs ahead of the device, so that what is
timed is the device's work and not how fast Python asks for it; what asking costs is timed apart.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.run.clocks import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.backend.run.clocks import Clock

    Step = Callable[[], object]

# Bytes of rotating buffers at least, and how many times the cache; sets at most.
LEAST_BUFFERS = 256 * 10**6
TIMES_CACHE = 3
MOST_SETS = 128
# Of one sample. A queue takes about 1000 launches before its host waits, and a call has up to five.
MOST_CALLS = 100


@dataclass(frozen=True)
class Place:
    """A device. cache: bytes of its last level. buffers: bytes of rotating buffers, together."""

    device: str
    cache: int
    buffers: int

    @classmethod
    def of(cls, device: str) -> Place:
        """What torch tells of a device; nothing rotates on a CPU."""
        if torch.device(device).type != "cuda":
            return cls(device, 0, 0)
        cache = cache_bytes(torch.cuda.get_device_properties(device))
        return cls(device, cache, max(LEAST_BUFFERS, TIMES_CACHE * cache))

    @property
    def is_gpu(self) -> bool:
        """Whether it has a queue."""
        return torch.device(self.device).type == "cuda"

    @property
    def clock(self) -> Clock:
        """Seconds that the device works."""
        return DeviceClock() if self.is_gpu else cpu_seconds

    @property
    def host_clock(self) -> Clock:
        """Seconds until the calls return, the queue empty at first."""
        return host_seconds if self.is_gpu else cpu_seconds

    def sets(self, size: int) -> int:
        """How many sets of buffers rotate, of so many bytes each: two at least."""
        return max(2, min(MOST_SETS, math.ceil(self.buffers / max(size, 1))))

    def free(self) -> None:
        """Gives back what torch keeps of the memory of a case."""
        if self.is_gpu:
            torch.cuda.empty_cache()


class DeviceClock:
    """Seconds of a GPU from event to event while its host is ahead: first the device waits.

    ahead: cycles that it waits for, doubled whenever the host was too late.
    """

    MOST_AHEAD = 1 << 28

    def __init__(self) -> None:
        self.ahead = 1 << 20

    def __call__(self, step: Step, calls: int) -> float:
        """Of so many calls together."""
        while True:
            seconds, late = self._sample(step, calls)
            if not late or self.ahead >= self.MOST_AHEAD:
                return seconds
            self.ahead *= 2

    def _sample(self, step: Step, calls: int) -> tuple[float, bool]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # Private, and in torch since 1.0: read in 2.13.
        torch.cuda._sleep(self.ahead)
        start.record()
        for _ in range(calls):
            step()
        end.record()
        late = bool(start.query())
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, late


def host_seconds(step: Step, calls: int) -> float:
    """Wall time of the host for so many calls, whose work is not waited for."""
    torch.cuda.synchronize()
    return cpu_seconds(step, calls)


class Rotation:
    """Several steps as one: every call runs the next."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = itertools.cycle(steps)

    def __call__(self) -> object:
        return next(self.steps)()


class Budget:
    """Seconds that may pass; None for as many as it takes."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.now, self.start = seconds, now, now()

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self.now() - self.start

    def is_spent(self, part: float = 1.0) -> bool:
        """Whether a part of it is gone."""
        return self.seconds is not None and self.spent >= part * self.seconds


def gpu(device: str) -> dict[str, Any]:
    """What is known of a GPU, to be saved beside numbers; of a CPU, that it is one."""
    if torch.device(device).type != "cuda":
        return {"name": torch.device(device).type, "driver": None}
    told = torch.cuda.get_device_properties(device)
    return {
        "name": told.name,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "capability": f"{told.major}.{told.minor}",
        "multiprocessors": told.multi_processor_count,
        "cache_bytes": cache_bytes(told),
        "memory_bytes": told.total_memory,
    }


def cache_bytes(told: Any) -> int:
    """Of a GPU's last level; as many as the largest have where torch does not tell."""
    return int(getattr(told, "L2_cache_size", 0)) or LEAST_BUFFERS // TIMES_CACHE


def is_lost(device: str) -> bool:
    """Whether a GPU does nothing any more in this process, after a kernel that went astray."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def driver() -> str | None:
    """The driver's version, as NVIDIA's tool tells it; None where it does not."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)
