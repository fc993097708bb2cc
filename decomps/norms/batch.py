"""Batch norm: statistics per channel, over the batch and the spatial axes.

What all its operators compute; batch_spellings.py enters it for each of them. Under vmap an axis v
comes first, and each pair of v and c is a channel of its own. `v`: how many such axes there are.

Below autograd the forward stays with torch's decompositions: they read the input once for both
statistics, are centred and out of place (`_native_batch_norm_legit_functional`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import per_channel, size_of
from normpass.decomps.batching import any_of, front, fronts, typed_as
from normpass.decomps.buffers import (
    RUNNING_STATISTICS_NOT_BATCHED,
    RunningStatistics,
    averaged,
    update,
)
from normpass.decomps.conventions import working, working_dtype
from normpass.decomps.manual import Gradient, Mask3, Tangent, Weight, manual
from normpass.decomps.norms.standardized import (
    Standardized,
    affine,
    attached,
    may_be_differentiated,
    recomputed,
)
from normpass.decomps.registry import derivative

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

_Three = tuple["Tensor", "Tensor", "Tensor"]
_Pair = tuple["Tensor", "Tensor"]
# Results v ..., each with whether it varies over v: what batching.outputs takes.
_Varying = tuple[tuple[Any, bool], ...]


def _reduced(x: Tensor, v: int = 0) -> list[int]:
    """The numbers of the axes n *s of an x: v n c *s."""
    return [axis for axis in range(v, x.dim()) if axis != v + 1]


# --- forward ------------------------------------------------------------------------------------


def _check_running(running_mean: Tensor | None, running_var: Tensor | None, training: bool) -> None:
    """Raises what eager raises of running statistics that are not there.

    Its own kernel for the CPU crashes in evaluation mode without both; torch.batch_norm, which asks
    first, has these messages.
    """
    if not training:
        for name, value in (("running_mean", running_mean), ("running_var", running_var)):
            if value is None:
                raise RuntimeError(f"{name} must be defined in evaluation mode")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")


def _normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Sequence[Any],
    training: bool,
    eps: float,
    v: int = 0,
) -> tuple[Tensor, _Pair, _Pair]:
    """y, the mean and rstd that it is made with, and what the running statistics move towards.

    Raises RuntimeError, as eager does, where there is no element to take statistics of.
    """
    if training:
        if 0 in x.shape[v:]:
            raise RuntimeError(
                "input tensor must have at least one element, but got input_sizes = "
                f"{list(x.shape[v:])}"
            )
        axes = _reduced(x, v)
        m = size_of(x, axes)
        var, mean = torch.var_mean(x, axes, correction=0)
        new = mean, var * m / (m - 1)
    else:
        mean, var = new = running[0].to(x.dtype), running[1].to(x.dtype)
    rstd, rank = torch.rsqrt(var + eps), x.dim()
    x_hat = (x - per_channel(mean, rank)) * per_channel(rstd, rank)
    w, b = (None if p is None else per_channel(p, rank) for p in (weight, bias))
    return affine(x_hat, w, b), (mean, rstd), new


def _saves(x: Tensor, training: bool, vendors: bool) -> bool:
    """Whether eager saves statistics: in evaluation mode its kernel for the CPU and cuDNN's and
    MIOpen's do not.
    """
    return training or not (vendors or x.device.type == "cpu")


def _saved(
    pair: _Pair, given: Sequence[Any], training: bool, vendors: bool, v: int = 0
) -> tuple[Tensor, ...]:
    """mean and rstd as eager returns them: in the weight's dtype by cuDNN and MIOpen; else on the
    CPU in the input's, unless a parameter is wider.
    """
    (mean, rstd), (x, weight) = pair, given[:2]
    mixed = any(value is not None and value.dtype != x.dtype for value in given)
    dtype = working(x.dtype) if mixed or x.device.type != "cpu" else x.dtype
    dtype = weight.dtype if vendors and weight is not None else dtype
    if not _saves(x, training, vendors):
        return tuple(x.new_empty((*(1,) * v, 0), dtype=dtype) for _ in pair)
    if not training:
        mean = mean.clone()  # a tensor of its own: the buffer goes on changing
    return mean.to(dtype), rstd.to(dtype)


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    vendors: bool,
) -> tuple[Tensor, ...]:
    """y = (x - mean) * rstd * weight + bias,  rstd = (var + eps)^(-1/2),  x the input

    training: mean = mean_ns(x), var = mean_ns((x - mean)^2), and in place, m the size of (n, s):
        running_mean += momentum * (mean - running_mean)
        running_var  += momentum * (var * m / (m - 1) - running_var)
    else: mean = running_mean, var = running_var; on the CPU nothing is saved.
    """
    given = (input, weight, bias, running_mean, running_var)
    _check_running(running_mean, running_var, training)
    x = input.to(working_dtype(given))
    y, pair, new = _normalized(x, weight, bias, given[3:], training, eps)
    if training:
        for buffer, value in zip(given[3:], new, strict=True):
            update(buffer, value, momentum)
    return y.to(input.dtype), *_saved(pair, given, training, vendors)


def batch_norm_batch_rule(
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
    vendors: bool,
    functional: bool,
) -> _Varying:
    """See `batch_norm`, whose channels are the pairs of v and c.

    functional: the new running statistics are results, and nothing is written.
    """
    given, dims = (input, weight, bias, running_mean, running_var), in_dims[:5]
    _check_running(running_mean, running_var, training)
    x, w, b, *running = fronts(given, dims)
    y, pair, new = _normalized(x, w, b, running, training, eps, v=1)
    averages = _new_running(given[3:], new, dims, momentum, training, functional)
    mean_dim, var_dim = (dims[0], dims[0]) if training else dims[3:]
    varies = any_of(*dims[:3], mean_dim, var_dim)
    saves = _saves(input, training, vendors)
    mean, rstd = _saved(pair, given, training, vendors, v=1)
    saved = (mean, saves and any_of(mean_dim)), (rstd, saves and any_of(var_dim))
    return (y.to(input.dtype), varies), *saved, *averages


def _new_running(
    running: Sequence[Tensor | None],
    new: _Pair,
    dims: Sequence[int | None],
    momentum: float,
    training: bool,
    functional: bool,
) -> list[tuple[Tensor, bool]]:
    """The running statistics with those of this batch: new tensors, or in place and nothing."""
    x_dim, own = dims[0], dims[3:]
    shared = any(v is not None and d is None for v, d in zip(running, own, strict=True))
    if training and not functional and shared and x_dim is not None:
        if not RunningStatistics.are_averaged:
            raise RuntimeError(RUNNING_STATISTICS_NOT_BATCHED)
        mean, var = (
            statistic if dim is not None else statistic.mean(0, keepdim=True)
            for statistic, dim in zip(new, own, strict=True)
        )
        new = mean, var
    results = []
    for value, dim, statistic in zip(running, own, new, strict=True):
        if value is None:
            continue
        if not functional:
            if training:
                update(front(value, dim), statistic, momentum)
        elif training:
            average = averaged(front(value, dim), statistic, momentum)
            results.append((average.to(value.dtype), any_of(dim, x_dim)))
        else:  # results may not be views of arguments
            results.append((front(value, dim).clone(), any_of(dim)))
    return results


# --- backward -----------------------------------------------------------------------------------


def _statistics(
    running: Sequence[Any], saved: Sequence[Any], train: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """mean and rstd: those of this batch, or from the running mean and variance."""
    mean, spread = saved if train else running
    if mean is None or spread is None:
        expected = "save_mean and save_invstd" if train else "running_mean and running_var"
        raise ValueError(f"batch norm's derivative with train={train} needs {expected}; found None")
    return mean, spread if train else torch.rsqrt(spread + eps)


def batch_norm_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    *,
    v: int = 0,
) -> _Three:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  m = the size of (n, s)

    dweight = sum_ns(g * x_hat)
    dbias   = sum_ns(g)
    dx      = rstd * weight * (g - dbias / m - x_hat * dweight / m)    statistics of this batch
    dx      = rstd * weight * g                                        running statistics

    In eval mode mean = running_mean and rstd = (running_var + eps)^(-1/2).
    """
    mean, rstd = _statistics((running_mean, running_var), (save_mean, save_rstd), train, eps)
    rank, reduced = x.dim(), _reduced(x, v)
    x_hat = (x - per_channel(mean, rank)) * per_channel(rstd, rank)
    centred = train and output_mask[0]
    dx: Any = None
    dweight: Any = (g * x_hat).sum(reduced) if centred or output_mask[1] else None
    dbias: Any = g.sum(reduced) if centred or output_mask[2] else None
    if output_mask[0]:
        scale = per_channel(rstd if weight is None else rstd * weight, rank)
        if train:
            m = size_of(x, reduced)
            a, b = per_channel(dbias / m, rank), per_channel(dweight / m, rank)
            g = g - a - x_hat * b
        dx = g * scale
    return dx, dweight, dbias


def batch_norm_backward_batch_rule(
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
) -> _Varying:
    """See `batch_norm_backward`, whose sums are per example, that is per v and c."""
    stats = (running_mean, running_var, save_mean, save_invstd)
    g, x, w, mean, var, kept, rstd = fronts((grad_out, input, weight, *stats), in_dims[:7])
    if train:
        kept, rstd = attached(x, kept, rstd, _reduced(x, 1), g, w)
    found = batch_norm_backward(g, x, w, mean, var, kept, rstd, train, eps, output_mask, v=1)
    dx, dweight, dbias = (u if there else None for u, there in zip(found, output_mask, strict=True))
    g_dim, x_dim, w_dim, *rest = in_dims[:7]
    mean_dim, rstd_dim = rest[2:] if train else rest[:2]
    x_dims = (x_dim, mean_dim) if train else ()
    parameter = next(p for p in (weight, running_mean, save_mean, input) if p is not None)
    return (
        (typed_as(dx, input), any_of(g_dim, w_dim, rstd_dim, *x_dims)),
        (typed_as(dweight, parameter), any_of(g_dim, x_dim, mean_dim, rstd_dim)),
        (typed_as(dbias, parameter), any_of(g_dim)),
    )


# --- derivatives --------------------------------------------------------------------------------


def _standardized(
    x: Tensor, running: Sequence[Any], saved: Sequence[Any], train: bool, eps: float
) -> Standardized:
    """With the saved statistics of this batch, or the running ones, which are constants."""
    mean, rstd = (per_channel(u, x.dim()) for u in _statistics(running, saved, train, eps))
    return Standardized((x - mean) * rstd, rstd, _reduced(x) if train else None)


@manual(
    "input_p: n c *s, input_t: n c *s, weight_p: c, weight_t: c, bias_p: c, bias_t: c, "
    "running_mean: c, running_var: c, saved_mean: c, saved_invstd: c -> y_t: n c *s",
    why="the running statistics are constants: they have no tangents here",
)
def batch_norm_jvp(
    input_p: Tensor,
    input_t: Tangent,
    weight_p: Weight,
    weight_t: Tangent,
    bias_p: Tensor | None,
    bias_t: Tangent,
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
    running, saved = (running_mean, running_var), (saved_mean, saved_invstd)
    norm = _standardized(input_p, running, saved, train, eps)
    parameters = (per_channel(p, input_p.dim(), -1) for p in (weight_p, weight_t, bias_t))
    return norm.tangent(input_t, *parameters)


@manual(
    "input: n c *s, gamma: c, ggI: n c *s, ggG: c, ggB: c, gO: n c *s, running_mean: c, "
    "running_var: c, save_mean: c, save_invstd: c -> dinput: n c *s, dgamma: c, dgO: n c *s"
)
def batchnorm_double_backward(
    input: Tensor,
    gamma: Weight,
    ggI: Gradient,
    ggG: Gradient,
    ggB: Gradient,
    gO: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    output_mask: Mask3,
) -> _Three:
    """As in `layer_norm_double_backward`, per channel: v = ggI, u = g * gamma, g = gO and

    P(u)   = u - mean_ns(u) - x_hat * mean_ns(u * x_hat),  x_hat = (x - mean) * rstd
    c      = g * ggG - rstd * (v * mean_ns(u * x_hat) + u * mean_ns(v * x_hat))
    dinput = rstd * P(c) - rstd^2 * x_hat * mean_ns(v * P(u))
    dgamma = sum_ns(g * rstd * P(v))
    dgO    = gamma * rstd * P(v) + x_hat * ggG + ggB

    In eval mode the statistics are the running ones and every mean_ns is nothing:

    dinput = rstd * g * ggG,  dgamma = sum_ns(g * rstd * v),  dgO = gamma * rstd * v + ...
    """
    running, saved = (running_mean, running_var), (save_mean, save_invstd)
    norm = _standardized(input, running, saved, training, eps)
    weight, vw, vb = (per_channel(p, input.dim(), -1) for p in (gamma, ggG, ggB))
    dinput, dgamma, dgO = norm.double_backward(weight, ggI, vw, vb, gO, output_mask)
    return dinput, dgamma.sum(_reduced(input)), dgO


NEEDS = ("input", "weight", "grad_out")


def batch_norm_backward_derivative(
    grads: Sequence[Tensor | None],
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
    needs: Collection[str] = NEEDS,
) -> dict[str, Tensor | None]:
    """The gradients of the arguments, by name: see `batchnorm_double_backward`."""
    differentiated = may_be_differentiated(input, *grads, grad_out, weight)
    if train and save_invstd is not None and differentiated:
        rstd = per_channel(save_invstd, input.dim(), -1)
        pair = recomputed(input, rstd, _reduced(input))
        save_mean, save_invstd = (value.flatten() for value in pair)
    formula = derivative("batchnorm_double_backward")
    wanted, running = [name in needs for name in NEEDS], (running_mean, running_var)
    found = formula(
        input, weight, *grads, grad_out, *running, train, eps, save_mean, save_invstd, wanted
    )
    return dict(zip(NEEDS, found, strict=True))
