"""Batch norm's forward for autograd: a composition of primitives, right to any order.

Below autograd the forward stays with torch's decompositions (see batch.py). Every spelling of the
operator is `_normalize` with other arguments: saved statistics are results of it, and derivatives
go through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import all_but, per_channel
from normpass.decomps.buffers import RUNNING_STATISTICS_NOT_BATCHED, assign
from normpass.decomps.conventions import working
from normpass.decomps.registry import find_op, register_rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SOURCE = "aten/src/ATen/native/Normalization.cpp"
SHAPES = "x: n c *s, weight: c, bias: c -> y: n c *s, save_mean: c, save_invstd: c"

_Results = tuple["Tensor", "Tensor", "Tensor"]


def _normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Results:
    """y = (x - mean) * rstd * weight + bias,  rstd = (var + eps)^(-1/2)

    training: mean = mean_ns(x), var = mean_ns((x - mean)^2), and in place, m the size of (n, s):
        running_mean += momentum * (mean - running_mean)
        running_var  += momentum * (var * m / (m - 1) - running_var)
    else: mean = running_mean, var = running_var; nothing is saved.
    """
    raised = x.to(working(x.dtype))
    rank, reduced = x.dim(), all_but(x, 1)
    if training:
        var, mean = torch.var_mean(raised, reduced, correction=0)
        m = x.numel() // x.shape[1]
        _update(running_mean, mean, momentum)
        _update(running_var, var * m / (m - 1), momentum)
    elif running_mean is None or running_var is None:
        raise ValueError("batch norm in eval mode needs running_mean and running_var; found None")
    else:
        mean, var = running_mean.to(raised.dtype), running_var.to(raised.dtype)
    rstd = torch.rsqrt(var + eps)
    y = (raised - per_channel(mean, rank)) * per_channel(rstd, rank)
    if weight is not None:
        y = y * per_channel(weight, rank)
    if bias is not None:
        y = y + per_channel(bias, rank)
    if not training:
        mean = rstd = x.new_empty(0)
    return y.to(x.dtype), mean, rstd


def _update(running: Tensor | None, new: Tensor, momentum: float) -> None:
    """running <- (1 - momentum) * running + momentum * new, which no derivative goes through."""
    if running is not None:
        value = (1 - momentum) * running + momentum * new.detach()
        assign(running, value, RUNNING_STATISTICS_NOT_BATCHED)


def _rule(op: str, function: Callable[..., object], why: str = "") -> None:
    found = find_op(op)
    if found is not None:
        register_rule(
            "autograd", found, source=f"{SOURCE}: batch_norm_cpu", shapes=SHAPES, why=why
        )(function)


def batch_norm_no_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Results:
    """See `_normalize`, without running statistics."""
    return _normalize(x, weight, bias, None, None, training, momentum, eps)


_rule("aten.native_batch_norm.default", _normalize)
_rule("aten._native_batch_norm_legit.default", _normalize)
_rule("aten._native_batch_norm_legit.no_stats", batch_norm_no_stats)
_rule("aten.miopen_batch_norm.default", _normalize)


def batch_norm_with_reserve(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_normalize`; the reserve, which is cuDNN's own, stays empty."""
    results = _normalize(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return *results, x.new_empty(0, dtype=torch.uint8)


def batch_norm_with_update(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_normalize`, training."""
    return batch_norm_with_reserve(x, weight, bias, running_mean, running_var, True, momentum, eps)


_rule("aten.cudnn_batch_norm.default", batch_norm_with_reserve)
_rule("aten._batch_norm_with_update.default", batch_norm_with_update)
