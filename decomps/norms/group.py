"""Group norm: statistics per example and group of channels, parameters per channel.

The channels are split, c = k q (k groups of q channels), and the spatial axes stay as they are, so
that contiguous, channels-last and permuted inputs are all read in place. Under vmap an axis v
comes first, which is not folded with n either; `v` says how many such axes there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import pad_to_rank, per_channel
from normpass.decomps.batching import (
    any_of,
    batching_rule,
    example_sizes,
    fronts,
    outputs,
    typed_as,
)
from normpass.decomps.conventions import Result, absent, as_input_on_cpu, like, statistic
from normpass.decomps.manual import Gradient, Mask3, Size, Tangent, Weight, manual
from normpass.decomps.norms.standardized import ALL, Standardized, affine, spread
from normpass.decomps.registry import decomposition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.batching import Outputs

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


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float, v: int = 0
) -> _Three:
    channels = group, x.shape[v + 1] // group
    x = _split(x, v + 1, group)
    var, mean = torch.var_mean(x, list(range(v + 2, x.dim())), correction=0)
    rstd = torch.rsqrt(var + eps)
    x_hat = (x - pad_to_rank(mean, x.dim())) * pad_to_rank(rstd, x.dim())
    w, b = (None if p is None else per_channel(p, x.dim(), *channels) for p in (weight, bias))
    return affine(x_hat, w, b).flatten(v + 1, v + 2), mean, rstd


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
) -> _Three:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: n k q *s

    mean = mean_qs(x),  rstd = (mean_qs((x - mean)^2) + eps)^(-1/2)
    """
    return _normalized(x, weight, bias, group, eps)


@batching_rule(
    aten.native_group_norm.default,
    source=f"{RULES}: native_group_norm_plumbing",
    shapes="input: v n c *s, weight: v c, bias: v c -> y: v n c *s, mean: v n k, rstd: v n k",
    why="v and n are not folded: where v does not lie before n that would copy the input",
)
def group_norm_batch_rule(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Outputs:
    """See `group_norm`, which is per example; x: v n k q *s."""
    x_dim, w_dim, b_dim = dims = in_dims[:3]
    _check_groups(input, x_dim, C, group)
    x, w, b = fronts((input, weight, bias), dims)
    y, mean, rstd = _normalized(x, w, b, group, eps, v=1)
    dtype = statistic({"input": input, "weight": weight, "bias": bias})
    return outputs(
        (y.to(input.dtype), any_of(x_dim, w_dim, b_dim)),
        (mean.to(dtype), any_of(x_dim)),
        (rstd.to(dtype), any_of(x_dim)),
    )


def _check_groups(x: Tensor, dim: int | None, channels: int, groups: int) -> None:
    if groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {groups}")
    if channels % groups != 0:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {example_sizes(x, dim)} and num_groups={groups}"
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
) -> _Three:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: n k q *s

    gs      = sum_s(g),  gx = sum_s(g * x_hat)                      per example and channel
    a       = sum_q(gs * weight) / (q s),  b = sum_q(gx * weight) / (q s)
    dx      = rstd * (g * weight - a - x_hat * b)
    dweight = sum_n(gx),  dbias = sum_n(gs)
    """
    norm = _standardized(x, mean, rstd, group)
    dx, dweight, dbias = _gradients(norm, g, weight, C, HxW, group)
    return dx.flatten(1, 2), dweight, dbias


@batching_rule(
    aten.native_group_norm_backward.default,
    source=f"{RULES}: native_group_norm_backward_plumbing",
    shapes="grad_out: v n c *s, input: v n c *s, mean: v n k, rstd: v n k, weight: v c "
    "-> dx: v n c *s, dweight: v c, dbias: v c",
    why="sums of g and g * x_hat per channel serve dx and the parameters alike",
)
def group_norm_backward_batch_rule(
    info: Any,
    in_dims: Sequence[Any],
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Outputs:
    """See `group_norm_backward`; the sums over n are per example."""
    dims = in_dims[:5]
    g, x, m, r, w = fronts((grad_out, input, mean, rstd, weight), dims)
    norm = _standardized(x, m, r, group, v=1)
    dx, dweight, dbias = _gradients(norm, g, w, C, HxW, group, output_mask, v=1)
    dx = None if dx is None else dx.flatten(2, 3)
    parameter = mean if weight is None else weight
    return outputs(
        (typed_as(dx, input), any_of(*dims)),
        (typed_as(dweight, parameter), any_of(*dims[:4])),
        (typed_as(dbias, parameter), any_of(dims[0])),
    )


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
