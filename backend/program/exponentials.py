"""Sums of exponentials in one sweep of memory, where what they are of has left the caches before
its maximum is known.

    m   = max(x)                            over blocks b of elements p
    sum = sum(exp(x - m))

takes two sweeps. Of a block that is in first-level cache both cost one:

    m_b = max[p](x)     s_b = sum[p](exp(x - m_b))

and then, of few numbers:

    max(x)           = max[b](m_b)
    sum(exp(x - m))  = sum[b](s_b exp(m_b - m))         for any m that all x share

This is the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018) with all blocks at once, so that no running sum is scaled anew. Where m_b is infinite, x - m_b
is not a number for elements that are infinite too, and s_b is taken without it: of a block of -inf
it is zero, as what it is scaled by.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from normpass.backend.program.chain import Chain
from normpass.passes.region import Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.passes.region import Region

# What the values are called after the sum that they make up.
OF_BLOCKS = ["top", "size", "unbounded", "least", "less", "exp", "part"]
COMBINED = ["apart", "scale", "times"]


class Exponentials(Chain):
    """second = sum[axes](exp(x - m)), where first = amax[axes](x) is on the way to m."""

    def in_blocks(
        self, near: tuple[str, ...], far: tuple[str, ...], count: int
    ) -> Mapping[str, Sequence[Op]]:
        del count
        name = self.second.name
        top, size, unbounded, least, less, exp, part = (f"{name}_{each}" for each in OF_BLOCKS)
        apart, scale, times = (f"{name}_{each}" for each in COMBINED)
        of_blocks = [
            Op(top, "amax", (self.x,), near),
            Op(size, "abs", (top,)),
            Op(unbounded, "eq", (size, math.inf)),
            Op(least, "where", (unbounded, 0.0, top)),
            Op(less, "sub", (self.x, least)),
            Op(exp, "exp", (less,)),
            Op(part, "sum", (exp,), near),
            Op(self.first.name, "amax", (top,), far),
        ]
        combined = [
            Op(apart, "sub", (top, self.m)),
            Op(scale, "exp", (apart,)),
            Op(times, "mul", (part, scale)),
            Op(name, "sum", (times,), far),
        ]
        return {self.first.name: of_blocks, name: combined}


def exponentials(region: Region) -> Iterator[Chain]:
    """Those of a region."""
    for op in region.ops:
        exp = region.producer.get(str(op.args[0])) if op.fn == "sum" else None
        difference = region.producer.get(str(exp.args[0])) if exp and exp.fn == "exp" else None
        if difference is None or difference.fn != "sub":
            continue
        if chain := Exponentials.found(region, "amax", difference, op):
            yield chain
