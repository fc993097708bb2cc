"""What is asked of this machine: the sizes of its caches, and which GPU it has."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from normpass.backend.run import nvrtc
from normpass.passes.cost import Caches

# Where nobody tells: a second-level cache of a core, a last-level cache, multiprocessors of a GPU.
USUAL_PRIVATE = 1024 * 1024
USUAL_LAST = 32 * 1024 * 1024
USUAL_MULTIPROCESSORS = 108


@cache
def caches_of(device: str) -> Caches:
    """What this machine has: on a CPU the larger of a core's second level and its share of the
    last one, on a GPU the last one and what a multiprocessor may take of it.
    """
    if device == "cuda":
        shared = getattr(_card(), "L2_cache_size", USUAL_LAST)
        return Caches(shared // multiprocessors(), shared)
    last = _level(3, USUAL_LAST)
    return Caches(max(private_cache(), last // torch.get_num_threads()), last)


def multiprocessors() -> int:
    """Of this machine's GPU."""
    return int(getattr(_card(), "multi_processor_count", USUAL_MULTIPROCESSORS))


@cache
def capability(index: int | None = None) -> int:
    """Of a GPU for which CUDA C++ can be compiled here, 90 for 9.0; 0 where there is none.

    index: which one; None for the current one.
    """
    if torch.version.hip or not torch.cuda.is_available() or nvrtc.version() is None:
        return 0
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def _card() -> Any:
    return torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None


@cache
def private_cache() -> int:
    """Bytes of a core's own second-level cache."""
    return _level(2, USUAL_PRIVATE)


def _level(level: int, usual: int) -> int:
    """A cache's size in bytes, as Linux tells it."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return usual
