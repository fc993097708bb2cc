"""The sizes of this machine's caches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from normpass.passes.cost import Caches

# Where nobody tells: a second-level cache of a core, a last-level cache, a multiprocessor's memory.
USUAL_PRIVATE = 1024 * 1024
USUAL_LAST = 32 * 1024 * 1024
MULTIPROCESSOR = 228 * 1024


@cache
def caches_of(device: str) -> Caches:
    """What this machine has: on a CPU the larger of a core's second level and its share of the
    last one.
    """
    if device == "cuda":
        card = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
        shared = getattr(card, "L2_cache_size", USUAL_LAST)
        return Caches(
            max(MULTIPROCESSOR, shared // getattr(card, "multi_processor_count", 1 << 30)), shared
        )
    last = _level(3, USUAL_LAST)
    return Caches(max(private_cache(), last // torch.get_num_threads()), last)


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
