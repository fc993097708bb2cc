"""Group norm: statistics per example and group of channels, parameters per channel.

The channels are split, c = k q (k groups of q channels), and the spatial axes stay as they are, so
that contiguous, channels-last and permuted inputs are all read in place. Under vmap an axis v
comes first, which is not folded with n either; `v` says how many such axes there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import pad_to_rank, per_channel
from normpass.decomps.batching import batched_decomposition
from normpass.decomps.conventions import Result, absent, as_input_on_cpu, like, statistic
from normpass.decomps.manual import Gradient, Mask3, Size, Tangent, Weight, manual
from normpass.decomps.norms.standardized import ALL, Standardized, affine, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"

_Three = tuple["Tensor", "Tensor", "Tensor"]


def _split(x: Any, axis: int, groups: int) -> Any:
    """x: ... c ... -> ... k q ..., always a view; ZERO stays ZERO."""
    if absent(x):
        return x
    shape = x.shape
    return x.view(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def _standardized(x: Tensor, mean: Tensor, rstd: Tensor, groups: int, v: int = 0) -> Standardized:
    """Of the x that is split."""
    x = _split(x, v + 1, groups)
    mean, rstd = pad_to_rank(mean, x.dim()), pad_to_rank(rstd, x.dim())
    return Standardized((x - mean) * rstd, rstd, list(range(v + 2, x.dim())))


# --- forward ------------------------------------------------------------------------------------


@batched_decomposition(
    aten.native_group_norm.default,
    source="aten/src/ATen/native/group_norm.cpp: native_group_norm",
    shapes="x: n c *s, weight: c, bias: c -> y: n c *s, mean: n k, rstd: n k",
    results=(Result(like("input"), as_input_on_cpu), Result(statistic), Result(statistic)),
    why="torch's own folds the mean into the bias on the CPU, through as_strided: not centred",
    autograd=True,
    of=("x weight bias", "x", "x"),
    batching=f"{RULES}: native_group_norm_plumbing",
    batching_why="v and n are not folded: where v does not lie before n that would copy the input",
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
    *,
    v: int = 0,
) -> _Three:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: n k q *s

    mean = mean_qs(x),  rstd = (mean_qs((x - mean)^2) + eps)^(-1/2)
    """
    if v:
        _check_groups(x.shape[v:], C, group)
    channels = group, x.shape[v + 1] // group
    x = _split(x, v + 1, group)
    var, mean = torch.var_mean(x, list(range(v + 2, x.dim())), correction=0)
    rstd = torch.rsqrt(var + eps)
    x_hat = (x - pad_to_rank(mean, x.dim())) * pad_to_rank(rstd, x.dim())
    w, b = (None if p is None else per_channel(p, x.dim(), *channels) for p in (weight, bias))
    return affine(x_hat, w, b).flatten(v + 1, v + 2), mean, rstd


def _check_groups(sizes: Sequence[int], channels: int, groups: int) -> None:
    """The operator's own errors, which it would raise of an example."""
    if groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {groups}")
    if channels % groups != 0:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {list(sizes)} and num_groups={groups}"
        )


# --- backward -----------------------------------------------------------------------------------


def _gradients(
    norm: Standardized,
    g: Any,
    weight: Any,
    C: int,
    HxW: int,
    group: int,
    wanted: Sequence[bool] = ALL,
    v: int = 0,
) -> tuple[Any, Any, Any]:
    """dx, which is split, dweight and dbias; None where they are not wanted: `group_norm_backward`.

    As `Standardized.gradients`, but for the sums: those per channel serve all three.
    """
    x_hat, rank = norm.x_hat, norm.x_hat.dim()
    g = _split(g, v + 1, group)
    w = None if weight is None else per_channel(weight, rank, group, C // group)
    spatial, m = list(range(v + 3, rank)), C // group * HxW
    gs, gx = (u.sum(spatial, keepdim=True) if spatial else u for u in (g, g * x_hat))
    dx = dweight = dbias = None
    if wanted[0]:
        a, b = ((u if w is None else u * w).sum(v + 2, keepdim=True) / m for u in (gs, gx))
        gw = g if w is None else g * w
        dx = norm.rstd * (gw - a - x_hat * b)
    if wanted[1]:
        dweight = gx.sum(v).flatten(v)
    if wanted[2]:
        dbias = gs.sum(v).flatten(v)
    return dx, dweight, dbias


@batched_decomposition(
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
    of=("g x mean rstd weight", "g x mean rstd", "g"),
    batching=f"{RULES}: native_group_norm_backward_plumbing",
    batching_why="sums of g and g * x_hat per channel serve dx and the parameters alike",
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
    *,
    v: int = 0,
) -> _Three:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: n k q *s

    gs      = sum_s(g),  gx = sum_s(g * x_hat)                      per example and channel
    a       = sum_q(gs * weight) / (q s),  b = sum_q(gx * weight) / (q s)
    dx      = rstd * (g * weight - a - x_hat * b)
    dweight = sum_n(gx),  dbias = sum_n(gs)
    """
    norm = _standardized(x, mean, rstd, group, v)
    dx, dweight, dbias = _gradients(norm, g, weight, C, HxW, group, output_mask, v)
    if dx is not None:
        dx = dx.flatten(v + 1, v + 2)
    return dx, dweight, dbias


# --- derivatives --------------------------------------------------------------------------------


@manual(
    "dY: n c *s, dmean: n k, drstd: n k, X: n c *s, mean: n k, rstd: n k, gamma: c "
    "-> dX: n c *s, dgamma: c, dbeta: c",
    results=tuple(Result(like(*names), None) for names in (("X",), ("gamma",), ("gamma", "X"))),
    why="upstream drops dmean and drstd unless both are there, and dbeta without a gamma",
)
def infinitely_differentiable_native_group_norm_backward(
    dY: Gradient,
    dmean: Gradient,
    drstd: Gradient,
    X: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gamma: Weight,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    eps: float,
    grad_input_mask: Mask3,
) -> _Three:
    """y = x_hat * gamma + beta,  x_hat = (x - mean) * rstd,  x: n k q *s,  m = q s,  g = dY

    gs     = sum_s(g),  gx = sum_s(g * x_hat)                      per example and channel
    dX     = rstd * (g * gamma - sum_q(gs * gamma) / m - x_hat * sum_q(gx * gamma) / m)
             + dmean / m - drstd * rstd^2 * x_hat / m
    dgamma = sum_n(gx),  dbeta = sum_n(gs)
    """
    norm = _standardized(X, mean, rstd, group)
    x_hat, rstd = norm.x_hat, norm.rstd
    dmean, drstd = (u.view(rstd.shape) for u in (dmean, drstd))
    through_y, dgamma, dbeta = _gradients(norm, dY, gamma, C, HxW, group)
    through_statistics = spread(dmean, x_hat.shape) - drstd * rstd * rstd * x_hat
    dX = through_y + through_statistics / (C // group * HxW)
    return dX.flatten(1, 2), dgamma, dbeta


@manual(
    "input_p: n c *s, input_t: n c *s, weight_p: c, weight_t: c, bias_p: c, bias_t: c, "
    "saved_mean: n k, saved_invstd: n k -> y_t: n c *s"
)
def group_norm_jvp(
    input_p: Tensor,
    input_t: Tangent,
    weight_p: Weight,
    weight_t: Tangent,
    bias_p: Tensor | None,
    bias_t: Tangent,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    groups: int,
) -> Tensor:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  c = x_t - mean_qs(x_t),  x: n k q *s

    x_hat_t = rstd * (c - x_hat * mean_qs(c * x_hat))
    y_t     = x_hat_t * weight + x_hat * weight_t + bias_t
    """
    norm = _standardized(input_p, saved_mean, saved_invstd, groups)
    _, k, q, *_ = norm.x_hat.shape
    parameters = (per_channel(p, norm.x_hat.dim(), k, q) for p in (weight_p, weight_t, bias_t))
    return norm.tangent(_split(input_t, 1, groups), *parameters).flatten(1, 2)


@manual("input_t: n c *s, mean_p: n k -> mean_t: n k", results=(Result(like("mean_p"), None),))
def group_norm_mean_jvp(input_t: Tangent, mean_p: Tensor, groups: int) -> Tensor:
    """mean_t = mean_qs(x_t),  x: n k q *s"""
    return _split(input_t, 1, groups).flatten(2).mean(2)


@manual(
    "input_p: n c *s, input_t: n c *s, mean_p: n k, invstd_p: n k -> invstd_t: n k",
    results=(Result(like("invstd_p"), None),),
)
def group_norm_invstd_jvp(
    input_p: Tensor, input_t: Tangent, mean_p: Tensor, invstd_p: Tensor, groups: int
) -> Tensor:
    """rstd = (mean_qs((x - mean)^2) + eps)^(-1/2),  x_hat = (x - mean) * rstd,  x: n k q *s

    rstd_t = -rstd^2 * mean_qs(x_hat * (x_t - mean_qs(x_t)))
    """
    norm = _standardized(input_p, mean_p, invstd_p, groups)
    centred = norm.centre(_split(input_t, 1, groups))
    return -(invstd_p * invstd_p) * (norm.x_hat * centred).mean(norm.axes)
