"""Regions, and what Inductor would do with them, for the tests of that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch._inductor import config
from torch.nn import functional as F
from tracing import trace

from normpass.passes.cost import Caches, Conditions, Work
from normpass.passes.inductor_loops import InductorLoops
from normpass.passes.inductor_work import theirs
from normpass.passes.lower import lower
from normpass.passes.profit import estimate
from normpass.passes.regions import Grower, seeds

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
R, C = 32, 2048  # of fewer numbers a variance is found in two steps
WHOLE, ROW, COLUMN = 4 * R * C, 4 * C, 4 * R  # bytes of x, of a weight, of a statistic
X, G, W, B = torch.randn(R, C), torch.randn(R, C), torch.randn(C), torch.randn(C)
MEAN, RSTD = torch.randn(R, 1), torch.rand(R, 1)
LARGE = Conditions(Caches(1 << 20, 1 << 25), private=1 << 20, threads=2, calibration=None)
# A row fits, and all of it does not.
ROWS_FIT = replace(LARGE, caches=Caches(worker=4 * ROW, shared=WHOLE))
NOTHING_FITS = replace(LARGE, caches=Caches(worker=ROW, shared=WHOLE))


def grown(function: Callable[..., object], *inputs: Tensor, dynamic: bool = False) -> tuple:  # type: ignore[type-arg]
    graph = trace(function, *inputs, dynamic=dynamic).graph
    region = Grower(graph).grow(seeds(graph)[0])
    assert region is not None
    lowered = lower("region", region.nodes, region.domain)
    return region.nodes, region.domain, lowered, estimate(lowered, region.nodes).sizes


def work(
    function: Callable[..., object],
    *inputs: Tensor,
    conditions: Conditions = LARGE,
    dynamic: bool = False,
) -> Work:
    return theirs(*grown(function, *inputs, dynamic=dynamic), conditions)


def outer_loops(function: Callable[..., object], *inputs: Tensor) -> list[int]:
    """Over how many elements the outer loops of each group run, in order."""
    loops = InductorLoops(*grown(function, *inputs))
    return [loops.elements(group.outer) for group in loops.groups]


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> object:
    return aten.native_layer_norm(x, [C], w, b, 1e-5)


def in_inference(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, [C], w, b)


def layer_norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> object:
    return aten.native_layer_norm_backward(g, x, [C], mean, rstd, w, w, [True] * 3)


BACKWARD = G, X, MEAN, RSTD, W


needs_two_steps = pytest.mark.skipif(
    not hasattr(config.cpp, "use_two_step_variance_threshold"),
    reason="needs torch 2.13: before, Inductor uses Welford's formulas for few numbers too",
)
