"""Forward derivatives of the norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.decomps.axes import aligned, outer_and_inner
from normpass.decomps.conventions import Result, like
from normpass.decomps.derivatives.norms import (
    MANUAL,
    Standardized,
    spread,
    standardized_channels,
    standardized_groups,
    standardized_rows,
)
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_AFFINE = "Tensor? weight_p, Tensor? weight_t, Tensor? bias_p, Tensor? bias_t"
_TANGENTS = ("input_t", "weight_t", "bias_t")


def _affine(norm: Standardized, input_t: Any, weight: Any, weight_t: Any, bias_t: Any) -> Any:
    """y = x_hat * weight + bias:  y_t = x_hat_t * weight + x_hat * weight_t + bias_t"""
    return norm.push(input_t) * weight + norm.x_hat * weight_t + spread(bias_t, norm.x_hat.shape)


@formula(
    "jvp",
    f"layer_norm_jvp(Tensor input_p, Tensor? input_t, {_AFFINE}, Tensor saved_mean, "
    "Tensor saved_invstd, SymInt[] normalized_shape) -> Tensor",
    source=f"{MANUAL}: layer_norm_jvp",
    shapes="input_p: *n *d, input_t: *n *d, weight_p: *d, weight_t: *d, bias_p: *d, bias_t: *d, "
    "saved_mean: *n 1, saved_invstd: *n 1 -> y_t: *n *d",
    results=(Result(like("input_p"), None),),
    zeros=_TANGENTS,
    ones=("weight_p",),
)
def layer_norm_jvp(
    input_p: Tensor,
    input_t: Tensor,
    weight_p: Tensor,
    weight_t: Tensor,
    bias_p: Tensor | None,
    bias_t: Tensor,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    normalized_shape: Sequence[int],
) -> Tensor:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  c = x_t - mean_d(x_t)

    x_hat_t = rstd * (c - x_hat * mean_d(c * x_hat))
    y_t     = x_hat_t * weight + x_hat * weight_t + bias_t
    """
    norm = standardized_rows(input_p, saved_mean, saved_invstd, normalized_shape)
    return _affine(norm, input_t, weight_p, weight_t, bias_t)


@formula(
    "jvp",
    f"batch_norm_jvp(Tensor input_p, Tensor? input_t, {_AFFINE}, Tensor? running_mean, "
    "Tensor? running_var, Tensor? saved_mean, Tensor? saved_invstd, bool train, float eps) "
    "-> Tensor",
    source=f"{MANUAL}: batch_norm_jvp",
    shapes="input_p: n c *s, input_t: n c *s, weight_p: c, weight_t: c, bias_p: c, bias_t: c, "
    "running_mean: c, running_var: c, saved_mean: c, saved_invstd: c -> y_t: n c *s",
    results=(Result(like("input_p"), None),),
    zeros=_TANGENTS,
    ones=("weight_p",),
    why="the running statistics are constants: they have no tangents here",
)
def batch_norm_jvp(
    input_p: Tensor,
    input_t: Tensor,
    weight_p: Tensor,
    weight_t: Tensor,
    bias_p: Tensor | None,
    bias_t: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    saved_mean: Tensor | None,
    saved_invstd: Tensor | None,
    train: bool,
    eps: float,
) -> Tensor:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  c = x_t - mean_ns(x_t)

    x_hat_t = rstd * (c - x_hat * mean_ns(c * x_hat))              statistics of this batch
    x_hat_t = rstd * x_t                                           running statistics
    y_t     = x_hat_t * weight + x_hat * weight_t + bias_t
    """
    norm = standardized_channels(
        input_p, running_mean, running_var, saved_mean, saved_invstd, train, eps
    )
    weight, weight_t, bias_t = (
        aligned(v, -1, rank=input_p.dim()) for v in (weight_p, weight_t, bias_t)
    )
    return _affine(norm, input_t, weight, weight_t, bias_t)


@formula(
    "jvp",
    f"group_norm_jvp(Tensor input_p, Tensor? input_t, {_AFFINE}, Tensor saved_mean, "
    "Tensor saved_invstd, int groups) -> Tensor",
    source=f"{MANUAL}: group_norm_jvp",
    shapes="input_p: n c *s, input_t: n c *s, weight_p: c, weight_t: c, bias_p: c, bias_t: c, "
    "saved_mean: n k, saved_invstd: n k -> y_t: n c *s",
    results=(Result(like("input_p"), None),),
    zeros=_TANGENTS,
    ones=("weight_p",),
)
def group_norm_jvp(
    input_p: Tensor,
    input_t: Tensor,
    weight_p: Tensor,
    weight_t: Tensor,
    bias_p: Tensor | None,
    bias_t: Tensor,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    groups: int,
) -> Tensor:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  c = x_t - mean_qs(x_t),  x: n k q *s

    x_hat_t = rstd * (c - x_hat * mean_qs(c * x_hat))
    y_t     = x_hat_t * weight + x_hat * weight_t + bias_t
    """
    norm = standardized_groups(input_p, saved_mean, saved_invstd, groups)
    rank = norm.x_hat.dim()
    weight, weight_t, bias_t = (
        aligned(v, groups, -1, rank=rank) for v in (weight_p, weight_t, bias_t)
    )
    input_t = input_t.unflatten(1, (groups, -1))
    return _affine(norm, input_t, weight, weight_t, bias_t).flatten(1, 2)


@formula(
    "jvp",
    "group_norm_mean_jvp(Tensor? input_t, Tensor mean_p, int groups) -> Tensor",
    source=f"{MANUAL}: group_norm_mean_jvp",
    shapes="input_t: n c *s, mean_p: n k -> mean_t: n k",
    results=(Result(like("mean_p"), None),),
    zeros=("input_t",),
)
def group_norm_mean_jvp(input_t: Tensor, mean_p: Tensor, groups: int) -> Tensor:
    """mean_t = mean_qs(x_t),  x: n k q *s"""
    return input_t.unflatten(1, (groups, -1)).flatten(2).mean(2)


@formula(
    "jvp",
    "group_norm_invstd_jvp(Tensor input_p, Tensor? input_t, Tensor mean_p, Tensor invstd_p, "
    "int groups) -> Tensor",
    source=f"{MANUAL}: group_norm_invstd_jvp",
    shapes="input_p: n c *s, input_t: n c *s, mean_p: n k, invstd_p: n k -> invstd_t: n k",
    results=(Result(like("invstd_p"), None),),
    zeros=("input_t",),
)
def group_norm_invstd_jvp(
    input_p: Tensor, input_t: Tensor, mean_p: Tensor, invstd_p: Tensor, groups: int
) -> Tensor:
    """rstd = (mean_qs((x - mean)^2) + eps)^(-1/2),  x_hat = (x - mean) * rstd,  x: n k q *s

    rstd_t = -rstd^2 * mean_qs(x_hat * (x_t - mean_qs(x_t)))
    """
    norm = standardized_groups(input_p, mean_p, invstd_p, groups)
    input_t = input_t.unflatten(1, (groups, -1))
    centred = input_t - norm.mean(input_t)
    return -(invstd_p * invstd_p) * (norm.x_hat * centred).mean(norm.axes)


@formula(
    "jvp",
    "rms_norm_jvp(Tensor input_p, Tensor? input_t, Tensor? weight_p, Tensor? weight_t, "
    "Tensor saved_rstd, SymInt[] normalized_shape) -> Tensor",
    source=f"{MANUAL}: rms_norm_jvp",
    shapes="input_p: *n *d, input_t: *n *d, weight_p: *d, weight_t: *d, saved_rstd: *n 1 "
    "-> y_t: *n *d",
    results=(Result(like("input_p"), None),),
    zeros=("input_t", "weight_t"),
    ones=("weight_p",),
)
def rms_norm_jvp(
    input_p: Tensor,
    input_t: Tensor,
    weight_p: Tensor,
    weight_t: Tensor,
    saved_rstd: Tensor,
    normalized_shape: Sequence[int],
) -> Tensor:
    """y = x_hat * weight,  x_hat = x * rstd

    x_hat_t = rstd * (x_t - x_hat * mean_d(x_t * x_hat))
    y_t     = x_hat_t * weight + x_hat * weight_t
    """
    _, inner = outer_and_inner(input_p, normalized_shape)
    x_hat = input_p * saved_rstd
    x_hat_t = saved_rstd * (input_t - x_hat * (input_t * x_hat).mean(inner, keepdim=True))
    return x_hat_t * weight_p + x_hat * weight_t


@formula(
    "jvp",
    "rms_norm_rstd_jvp(Tensor input_p, Tensor? input_t, Tensor saved_rstd, "
    "SymInt[] normalized_shape) -> Tensor",
    source=f"{MANUAL}: rms_norm_rstd_jvp",
    shapes="input_p: *n *d, input_t: *n *d, saved_rstd: *n 1 -> rstd_t: *n 1",
    results=(Result(like("saved_rstd"), None),),
    zeros=("input_t",),
)
def rms_norm_rstd_jvp(
    input_p: Tensor, input_t: Tensor, saved_rstd: Tensor, normalized_shape: Sequence[int]
) -> Tensor:
    """rstd = (mean_d(x^2) + eps)^(-1/2),  x_hat = x * rstd

    rstd_t = -rstd^2 * mean_d(x_hat * x_t)
    """
    _, inner = outer_and_inner(input_p, normalized_shape)
    x_hat = input_p * saved_rstd
    return -(saved_rstd * saved_rstd) * (x_hat * input_t).mean(inner, keepdim=True)
