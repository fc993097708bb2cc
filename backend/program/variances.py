"""Variances in one sweep of memory, where what they are of has left the caches before the mean is
known.

    mean = sum(x) / n                       over blocks b of elements p
    var  = sum((x - mean)^2) / n

takes two sweeps. Of a block that is in first-level cache all sums cost one:

    s_b = sum[p](x)     m_b = s_b / n_b     c_b = sum[p](x - m_b)     q_b = sum[p]((x - m_b)^2)

and then, of few numbers, as exactly as in two sweeps:

    sum(x)          = sum[b](s_b)
    sum((x - m)^2)  = sum[b](q_b + (m_b - m) (n_b (m_b - m) + 2 c_b))   for any m that all x share

This is how Chan, Golub and LeVeque combine variances ("Algorithms for Computing the Sample
Variance", 1983), with all blocks at once, so that no running mean is divided for; c_b, zero but for
the rounding of m_b, is what their corrected two-pass algorithm subtracts. Without it digits are
lost where the mean is many deviations from zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.program.chain import Chain
from normpass.passes.region import Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.passes.region import Region


# What the values are called after the sum of squares that they make up.
OF_BLOCKS = ["part", "mean", "centred", "square", "lost", "within"]
COMBINED = ["apart", "more", "twice", "of_apart", "times", "between", "rest"]


class Variance(Chain):
    """second = sum[axes]((x - m)^2), where first = sum[axes](x) is on the way to m."""

    def in_blocks(
        self, near: tuple[str, ...], far: tuple[str, ...], count: int
    ) -> Mapping[str, Sequence[Op]]:
        name, many = self.second.name, float(count)
        part, mean, centred, square, lost, within = (f"{name}_{each}" for each in OF_BLOCKS)
        apart, more, twice, of_apart, times, between, rest = (f"{name}_{each}" for each in COMBINED)
        of_blocks = [
            Op(part, "sum", (self.x,), near),
            Op(mean, "div", (part, many)),
            Op(centred, "sub", (self.x, mean)),
            Op(square, "mul", (centred, centred)),
            Op(lost, "sum", (centred,), near),
            Op(within, "sum", (square,), near),
            Op(self.first.name, "sum", (part,), far),
        ]
        combined = [
            Op(apart, "sub", (mean, self.m)),
            Op(more, "mul", (apart, many)),
            Op(twice, "mul", (lost, 2.0)),
            Op(of_apart, "add", (more, twice)),
            Op(times, "mul", (apart, of_apart)),
            Op(between, "sum", (times,), far),
            Op(rest, "sum", (within,), far),
            Op(name, "add", (rest, between)),
        ]
        return {self.first.name: of_blocks, name: combined}


def variances(region: Region) -> Iterator[Chain]:
    """Those of a region."""
    for op in region.ops:
        square = region.producer.get(str(op.args[0])) if op.fn == "sum" else None
        if square is None or square.fn != "mul" or square.args[0] != square.args[1]:
            continue
        difference = region.producer.get(str(square.args[0]))
        if difference is None or difference.fn != "sub":
            continue
        if chain := Variance.found(region, "sum", difference, op):
            yield chain
