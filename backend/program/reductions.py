"""One table: each reduction of a region, and how every dialect says it.

passes/region.py has their names. C++'s are classes of normpass.h, Triton's take a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Reduction:
    """neutral: what adds nothing. cpp: the class. triton: of a block. combine: of two partial
    results, an expression in Triton.
    """

    neutral: float
    cpp: str
    triton: str
    combine: str


REDUCTIONS = {
    "sum": Reduction(0.0, "Sum", "tl.sum", "{0} + {1}"),
    "prod": Reduction(1.0, "Prod", "lib.prod", "{0} * {1}"),
    "amax": Reduction(-math.inf, "Amax", "lib.amax", "lib.maximum({0}, {1})"),
    "amin": Reduction(math.inf, "Amin", "lib.amin", "lib.minimum({0}, {1})"),
}
