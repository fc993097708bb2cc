"""Batch norm under vmap: each pair of v and c is a channel of its own, examples never mix.

What all its operators compute; batch_norm_spellings.py enters them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import size_of
from normpass.decomps.batched import affine, any_of, front, fronts, per_channel
from normpass.decomps.buffers import RUNNING_STATISTICS_NOT_BATCHED
from normpass.decomps.norms.statistics import (
    averaged,
    check_running,
    moments,
    saved_dtype,
    saves_running,
    update,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Batched:
    """Results v ..., each with whether it varies over v; the new running statistics where asked."""

    y: tuple[Tensor, bool]
    mean: tuple[Tensor, bool]
    rstd: tuple[Tensor, bool]
    running: tuple[tuple[Tensor, bool], ...] = ()


def normalize(
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    functional: bool,
    vendors: bool,
) -> Batched:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  m = the size of (n, s)

    training:   mean = mean_ns(x),  var = mean_ns((x - mean)^2),  rstd = (var + eps)^(-1/2)
                running_mean <- (1 - momentum) * running_mean + momentum * mean
                running_var  <- (1 - momentum) * running_var  + momentum * var * m / (m - 1)
    otherwise:  mean = running_mean,  rstd = (running_var + eps)^(-1/2)
    """
    x_dim, w_dim, b_dim, mean_dim, var_dim = in_dims[:5]
    given = (input, weight, bias, running_mean, running_var)
    check_running(running_mean, running_var, training)
    x, w, b, old_mean, old_var = fronts(given, in_dims[:5])
    running: tuple[tuple[Tensor, bool], ...] = ()
    if training:
        mean, var, m = moments(x, _examples(x), x.shape[1:])
        new = (mean, var * m / (m - 1))
        running = _updated(given[3:], in_dims[3:5], new, x_dim, momentum, functional)
        mean_dim = var_dim = x_dim
    else:
        mean, var = old_mean, old_var
        if functional:
            running = _copied(given[3:], in_dims[3:5])
    rstd = torch.rsqrt(var + eps)
    x_hat = (x - per_channel(mean, x.dim())) * per_channel(rstd, x.dim())
    w, b = (None if value is None else per_channel(value, x.dim()) for value in (w, b))
    y = affine(x_hat, w, b).to(input.dtype), any_of(x_dim, w_dim, b_dim, mean_dim, var_dim)
    if not training:
        if vendors or not saves_running(input):
            mean, rstd = mean.new_empty((1, 0)), mean.new_empty((1, 0))
            mean_dim = var_dim = None
        else:
            mean = mean.clone()  # a tensor of its own: the buffer goes on changing
    kept = saved_dtype(*given)
    saved = (mean.to(kept), any_of(mean_dim)), (rstd.to(kept), any_of(var_dim))
    return Batched(y, *saved, running)


def _examples(x: Tensor) -> list[int]:
    """The numbers of the axes n *s of an x: v n c *s."""
    return [axis for axis in range(1, x.dim()) if axis != 2]


def _updated(
    running: Sequence[Tensor | None],
    dims: Sequence[int | None],
    new: Sequence[Tensor],
    x_dim: int | None,
    momentum: float,
    functional: bool,
) -> tuple[tuple[Tensor, bool], ...]:
    """The running statistics with those of this batch: new tensors, or in place and nothing."""
    shared = any(v is not None and d is None for v, d in zip(running, dims, strict=True))
    if x_dim is not None and shared and not functional:
        raise RuntimeError(RUNNING_STATISTICS_NOT_BATCHED)
    results = []
    for value, dim, statistic in zip(running, dims, new, strict=True):
        if value is None:
            continue
        if functional:
            average = averaged(front(value, dim), statistic, momentum)
            results.append((average.to(value.dtype), any_of(dim, x_dim)))
        else:
            update(front(value, dim), statistic, momentum)
    return tuple(results)


def _copied(
    running: Sequence[Tensor | None], dims: Sequence[int | None]
) -> tuple[tuple[Tensor, bool], ...]:
    """The running statistics as results, which may not be views of arguments."""
    return tuple(
        (front(value, dim).clone(), any_of(dim))
        for value, dim in zip(running, dims, strict=True)
        if value is not None
    )


def gradients(
    in_dims: Sequence[Any],
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[tuple[Tensor | None, bool], ...]:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  m = the size of (n, s)

    dweight = sum_ns(g * x_hat)                                          per example
    dbias   = sum_ns(g)
    dx      = rstd * weight * (g - dbias / m - x_hat * dweight / m)      statistics of this batch
    dx      = rstd * weight * g                                          running statistics
    """
    g_dim, x_dim, w_dim, *rest = in_dims[:7]
    mean_dim, rstd_dim = rest[2:] if train else rest[:2]
    chosen = (save_mean, save_invstd) if train else (running_mean, running_var)
    if chosen[0] is None or chosen[1] is None:
        expected = "save_mean and save_invstd" if train else "running_mean and running_var"
        raise RuntimeError(f"batch norm's backward with train={train} needs {expected}; found None")
    dims = (g_dim, x_dim, mean_dim, rstd_dim, w_dim)
    g, x, mean, rstd, w = fronts((grad_out, input, *chosen, weight), dims)
    if not train:
        rstd = torch.rsqrt(rstd + eps)
    rank, reduced = x.dim(), _examples(x)
    x_hat = (x - per_channel(mean, rank)) * per_channel(rstd, rank)
    centred = train and output_mask[0]
    dx: Any = None
    dweight: Any = (g * x_hat).sum(reduced) if centred or output_mask[1] else None
    dbias: Any = g.sum(reduced) if centred or output_mask[2] else None
    if centred:
        m = size_of(x, reduced)
        g = g - per_channel(dbias / m, rank) - x_hat * per_channel(dweight / m, rank)
    if output_mask[0]:
        dx = (g * per_channel(rstd if w is None else rstd * w, rank)).to(input.dtype)
    parameters = (weight, running_mean, save_mean, input)
    dtype = next(value.dtype for value in parameters if value is not None)
    return (
        (dx, any_of(*dims) if train else any_of(g_dim, rstd_dim, w_dim)),
        (dweight.to(dtype) if output_mask[1] else None, any_of(*dims[:4])),
        (dbias.to(dtype) if output_mask[2] else None, any_of(g_dim)),
    )
