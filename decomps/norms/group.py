"""Group norm: statistics per example and group of channels, parameters per channel.

The channels are split, c = k q (k groups of q channels), and the spatial axes stay as they are, so
that contiguous, channels-last and permuted inputs are all read in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import pad_to_rank
from normpass.decomps.conventions import Result, as_input_on_cpu, like, statistic
from normpass.decomps.registry import decomposition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten


def _split(x: Tensor, axis: int, groups: int) -> Tensor:
    """x: ... c ... -> ... k q ..., always a view."""
    shape = x.shape
    return x.view(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def _split_parameter(v: Tensor, groups: int, rank: int) -> Tensor:
    """v: c -> k q 1 1 ..., against an x: n k q *s of this rank."""
    return pad_to_rank(_split(v, 0, groups), rank - 1)


@decomposition(
    aten.native_group_norm.default,
    source="aten/src/ATen/native/group_norm.cpp: native_group_norm",
    shapes="x: n c *s, weight: c, bias: c -> y: n c *s, mean: n k, rstd: n k",
    results=(Result(like("input"), as_input_on_cpu), Result(statistic), Result(statistic)),
    why="torch's own folds the mean into the bias on the CPU, through as_strided: not centred",
    autograd=True,
)
def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: n k q *s

    mean = mean_qs(x),  rstd = (mean_qs((x - mean)^2) + eps)^(-1/2)
    """
    x = _split(x, 1, group)
    var, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0)
    rstd = torch.rsqrt(var + eps)
    y = (x - pad_to_rank(mean, x.dim())) * pad_to_rank(rstd, x.dim())
    if weight is not None:
        y = y * _split_parameter(weight, group, x.dim())
    if bias is not None:
        y = y + _split_parameter(bias, group, x.dim())
    return y.flatten(1, 2), mean, rstd


@decomposition(
    aten.native_group_norm_backward.default,
    source="aten/src/ATen/native/group_norm.cpp: native_group_norm_backward",
    shapes="g: n c *s, x: n c *s, mean: n k, rstd: n k, weight: c "
    "-> dx: n c *s, dweight: c, dbias: c",
    results=(
        Result(like("input"), as_input_on_cpu),
        Result(like("weight", "mean")),
        Result(like("weight", "mean")),
    ),
    why="sums of g and g * x_hat per channel serve dx and the parameters alike; dweight is "
    "centred, where (sum(g * x) - mean * sum(g)) * rstd loses digits to an offset of x",
)
def group_norm_backward(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: n k q *s

    gs      = sum_s(g),  gx = sum_s(g * x_hat)                      per example and channel
    a       = sum_q(gs * weight) / (q s),  b = sum_q(gx * weight) / (q s)
    dx      = rstd * (g * weight - a - x_hat * b)
    dweight = sum_n(gx),  dbias = sum_n(gs)
    """
    g, x = _split(g, 1, group), _split(x, 1, group)
    rank, spatial = x.dim(), list(range(3, x.dim()))
    mean, rstd = pad_to_rank(mean, rank), pad_to_rank(rstd, rank)
    x_hat = (x - mean) * rstd
    gs, gx = (v.sum(spatial, keepdim=True) if spatial else v for v in (g, g * x_hat))
    w = None if weight is None else _split_parameter(weight, group, rank)
    size = C // group * HxW
    a = (gs if w is None else gs * w).sum(2, keepdim=True) / size
    b = (gx if w is None else gx * w).sum(2, keepdim=True) / size
    gw = g if w is None else g * w
    dx = rstd * (gw - a - x_hat * b)
    return dx.flatten(1, 2), gx.sum(0).view(C), gs.sum(0).view(C)
