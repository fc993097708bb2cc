"""What a program has to know of the machine it is for."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Below this many elements a second worker of a CPU costs more than it brings.
ELEMENTS_PER_WORKER = 16 * 1024


@dataclass(frozen=True)
class Machine:
    """What a plan has to know of the machine it is for.

    workers: fewer independent pieces of work than this do not fill it.
    kept: kept rows beyond this many elements would push the row itself out of cache. regroups:
    whether its kernels can look at an array by other axes. partial: where more sums than this are
    added up side by side, each worker has some of them whole rather than a part of all.
    has_vectors: whether loops go a vector of a register's lanes at a time.
    """

    workers: int
    kept: int
    partial: float = math.inf
    regroups: bool = False
    has_vectors: bool = False


CPU = Machine(workers=8, kept=64 * 1024, partial=16 * 1024, regroups=True, has_vectors=True)
# Memory between phases is dearer than any function there; what fits in registers is not computed
# twice anyway.
GPU = Machine(workers=256, kept=0)
