"""Batching rules of the norms' forward: each example of v is normalized by itself.

Statistics are taken over the axes that an example has, wherever v lies in memory: v is never
folded into the channels, which would transpose a copy of the input, and no weight is invented.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import pad_to_rank
from normpass.decomps.batched import (
    any_of,
    front,
    fronts,
    outputs,
    per_channel,
    trailing,
    unless_unbatched,
)
from normpass.decomps.buffers import RUNNING_STATISTICS_NOT_BATCHED, assign
from normpass.decomps.conventions import statistic, statistic_by_device, working
from normpass.decomps.registry import register_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.batched import Outputs

aten = torch.ops.aten

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"


def _affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x_hat * weight + bias, of which None is left out."""
    y = x_hat if weight is None else x_hat * weight
    return y if bias is None else y + bias


# --- layer norm ---------------------------------------------------------------------------------


@register_rule(
    "batching",
    aten.native_layer_norm.default,
    source=f"{RULES}: native_layer_norm_batch_rule",
    shapes="input: v *n *d, weight: v *d, bias: v *d -> y: v *n *d, mean: v *n 1, rstd: v *n 1",
    why="v is one more of the axes *n; a weight or bias per example is applied outside the norm",
)
@unless_unbatched(aten.native_layer_norm.default)
def layer_norm(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Outputs:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd

    mean = mean_d(x),  rstd = (mean_d((x - mean)^2) + eps)^(-1/2)     per example and *n
    """
    x_dim, _, w_dim, b_dim, _ = in_dims
    _check_rank(input, x_dim, normalized_shape)
    if not any_of(w_dim, b_dim):
        x = front(input, x_dim)
        y, mean, rstd = aten.native_layer_norm(x, normalized_shape, weight, bias, eps)
        return outputs((y, True), (mean, True), (rstd, True))
    _check_parameter("weight", weight, w_dim, normalized_shape)
    _check_parameter("bias", bias, b_dim, normalized_shape)
    x, w, b = fronts((input, weight, bias), (x_dim, w_dim, b_dim))
    x_hat, mean, rstd = aten.native_layer_norm(x, normalized_shape, None, None, eps)
    w, b = (None if value is None else trailing(value, x.dim()) for value in (w, b))
    dtype = statistic_by_device({"input": input, "weight": weight, "bias": bias})
    return outputs(
        (_affine(x_hat, w, b).to(input.dtype), True),
        (mean.to(dtype), any_of(x_dim)),
        (rstd.to(dtype), any_of(x_dim)),
    )


def _check_rank(x: Tensor, dim: int | None, normalized_shape: Sequence[int]) -> None:
    """The norm may not reach into the batch axis, which the operator itself cannot know."""
    sizes = _example(x, dim)
    if len(sizes) < len(normalized_shape):
        expected = ", ".join(str(size) for size in normalized_shape)
        raise RuntimeError(
            f"Given normalized_shape=[{expected}], expected input with shape [*, {expected}], but "
            f"got input of size{sizes}"
        )


def _check_parameter(
    name: str, value: Tensor | None, dim: int | None, normalized_shape: Sequence[int]
) -> None:
    if not normalized_shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
            "element, but got normalized_shape = []"
        )
    if value is not None and _example(value, dim) != list(normalized_shape):
        raise RuntimeError(
            f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
            f"{list(value.shape)} and normalized_shape = {list(normalized_shape)}"
        )


def _example(x: Tensor, dim: int | None) -> list[int]:
    """The sizes of one example."""
    sizes = list(x.shape)
    if dim is not None:
        del sizes[dim]
    return sizes


# --- group norm ---------------------------------------------------------------------------------


@register_rule(
    "batching",
    aten.native_group_norm.default,
    source=f"{RULES}: native_group_norm_plumbing",
    shapes="input: v n c *s, weight: v c, bias: v c -> y: v n c *s, mean: v n k, rstd: v n k",
    why="v and n are not folded: where v does not lie before n that would copy the input",
)
@unless_unbatched(aten.native_group_norm.default)
def group_norm(
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
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: v n k q *s

    mean = mean_qs(x),  rstd = (mean_qs((x - mean)^2) + eps)^(-1/2)
    """
    x_dim, w_dim, b_dim = dims = in_dims[:3]
    _check_groups(input, x_dim, C, group)
    x, w, b = fronts((input, weight, bias), dims)
    rank = x.dim()
    x = x.unflatten(2, (group, C // group))
    var, mean = torch.var_mean(x, list(range(3, x.dim())), correction=0)
    rstd = torch.rsqrt(var + eps)
    x_hat = (x - pad_to_rank(mean, x.dim())) * pad_to_rank(rstd, x.dim())
    w, b = (None if value is None else per_channel(value, rank) for value in (w, b))
    dtype = statistic({"input": input, "weight": weight, "bias": bias})
    return outputs(
        (_affine(x_hat.flatten(2, 3), w, b).to(input.dtype), any_of(x_dim, w_dim, b_dim)),
        (mean.to(dtype), any_of(x_dim)),
        (rstd.to(dtype), any_of(x_dim)),
    )


def _check_groups(x: Tensor, dim: int | None, channels: int, groups: int) -> None:
    if groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {groups}")
    if channels % groups != 0:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {_example(x, dim)} and num_groups={groups}"
        )


# --- batch norm ---------------------------------------------------------------------------------


@register_rule(
    "batching",
    aten.native_batch_norm.default,
    source=f"{RULES}: batch_norm_batch_rule",
    shapes="input: v n c *s, weight: v c, bias: v c, running_mean: v c, running_var: v c "
    "-> y: v n c *s, mean: v c, rstd: v c",
    why="each pair of v and c is a channel of its own: statistics never mix examples; running "
    "statistics are written through views, so that the update is not lost in a copy",
)
@unless_unbatched(aten.native_batch_norm.default)
def batch_norm(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Outputs:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  m = the size of (n, s)

    training:   mean = mean_ns(x),  var = mean_ns((x - mean)^2),  rstd = (var + eps)^(-1/2)
                running_mean <- (1 - momentum) * running_mean + momentum * mean
                running_var  <- (1 - momentum) * running_var  + momentum * var * m / (m - 1)
    otherwise:  mean = running_mean,  rstd = (running_var + eps)^(-1/2)
    """
    x_dim, w_dim, b_dim, mean_dim, var_dim = in_dims[:5]
    given = (input, weight, bias, running_mean, running_var)
    x, w, b, old_mean, old_var = fronts(given, in_dims[:5])
    if training:
        _check_running_statistics(in_dims, running_mean, running_var)
        mean, var, m = _moments(x)
        _update(running_mean, mean_dim, old_mean, mean, momentum)
        _update(running_var, var_dim, old_var, var * m / (m - 1), momentum)
        mean_dim = var_dim = x_dim
    else:
        mean, var = old_mean, old_var
        if mean is None or var is None:
            missing = "running_mean" if mean is None else "running_var"
            raise RuntimeError(f"{missing} must be defined in evaluation mode")
    rstd = torch.rsqrt(var + eps)
    x_hat = (x - per_channel(mean, x.dim())) * per_channel(rstd, x.dim())
    w, b = (None if value is None else per_channel(value, x.dim()) for value in (w, b))
    varies = any_of(x_dim, w_dim, b_dim, mean_dim, var_dim)
    y = _affine(x_hat, w, b).to(input.dtype), varies
    if not training and input.device.type == "cpu":
        # Eager's kernel for the CPU saves nothing in evaluation mode, those of accelerators do.
        mean = rstd = mean.new_empty((1, 0))
        mean_dim = var_dim = None
    dtype = _saved_dtype(*given)
    return outputs(y, (mean.to(dtype), any_of(mean_dim)), (rstd.to(dtype), any_of(var_dim)))


@register_rule(
    "batching",
    aten._native_batch_norm_legit.default,
    source=f"{RULES}: _native_batch_norm_legit_batch",
    shapes="input: v n c *s, weight: v c, bias: v c, running_mean: v c, running_var: v c "
    "-> y: v n c *s, mean: v c, rstd: v c",
)
def batch_norm_legit(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Outputs:
    """See `batch_norm`."""
    rest = (running_mean, running_var, training, momentum, eps)
    return batch_norm(info, in_dims, input, weight, bias, *rest)


@register_rule(
    "batching",
    aten._native_batch_norm_legit.no_stats,
    source=f"{RULES}: _native_batch_norm_legit_no_stats_batch",
    shapes="input: v n c *s, weight: v c, bias: v c -> y: v n c *s, mean: v c, rstd: v c",
)
def batch_norm_without_running_statistics(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Outputs:
    """See `batch_norm`."""
    in_dims = (*in_dims[:3], None, None, *in_dims[3:])
    return batch_norm(info, in_dims, input, weight, bias, None, None, training, momentum, eps)


@register_rule(
    "batching",
    aten._native_batch_norm_legit_no_training.default,
    source=f"{RULES}: batch_norm_batch_rule",
    shapes="input: v n c *s, weight: v c, bias: v c, running_mean: v c, running_var: v c "
    "-> y: v n c *s, mean: 0, rstd: 0",
    why="torch has no rule for this spelling, which its traces are made of",
)
def batch_norm_no_training(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Outputs:
    """See `batch_norm`, in evaluation mode."""
    in_dims = (*in_dims[:5], None, *in_dims[5:])
    rest = (running_mean, running_var, False, momentum, eps)
    return batch_norm(info, in_dims, input, weight, bias, *rest)


def _moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """x: v n c *s -> mean: v c, var: v c, and the size of (n, s)."""
    reduced = [axis for axis in range(1, x.dim()) if axis != 2]
    m = 1
    for axis in reduced:
        m = m * x.shape[axis]
    if m == 0:
        raise RuntimeError(
            "input tensor must have at least one element, but got input_sizes = "
            f"{list(x.shape[1:])}"
        )
    var, mean = torch.var_mean(x, reduced, correction=0)
    return mean, var, m


def _check_running_statistics(
    in_dims: Sequence[Any], running_mean: Tensor | None, running_var: Tensor | None
) -> None:
    x_dim, mean_dim, var_dim = in_dims[0], in_dims[3], in_dims[4]
    shared = (running_mean is not None and mean_dim is None) or (
        running_var is not None and var_dim is None
    )
    if x_dim is not None and shared:
        raise RuntimeError(RUNNING_STATISTICS_NOT_BATCHED)


def _update(
    running: Tensor | None, dim: int | None, old: Tensor, new: Tensor, momentum: float
) -> None:
    """running <- (1 - momentum) * old + momentum * new, in place; old is running as v c."""
    if running is not None:
        value = (1 - momentum) * old + momentum * new.detach()
        assign(front(running, dim), value, RUNNING_STATISTICS_NOT_BATCHED)


def _saved_dtype(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Eager's dtype for mean and rstd: the input's on the CPU, unless a parameter is wider."""
    mixed = any(value is not None and value.dtype != x.dtype for value in parameters)
    return working(x.dtype) if mixed or x.device.type != "cpu" else x.dtype
