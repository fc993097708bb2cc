"""Reverse derivatives of the norms: double backwards, and backwards to any order.

All of them are about x_hat = (x - mean) * rstd, whose derivative, mean and rstd being functions
of x, is symmetric: one expression, `pull`, is in every formula. RMS norm's is x_hat = x * rstd.

Instance norm has no formulas, here as upstream: it is batch norm on a view of x as 1, n * c, *.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import (
    aligned,
    all_but,
    outer_and_inner,
    pad_to_rank,
    per_channel,
    size_of,
    sum_over,
)
from normpass.decomps.conventions import Result, like
from normpass.decomps.neutral import ZERO
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"

_Three = tuple["Tensor", "Tensor", "Tensor"]


def spread(v: Tensor, shape: Sequence[int]) -> Tensor:
    """v over this shape; a tensor of its own, for an operator may not return a view of an argument.

    ZERO stays ZERO.
    """
    return v.expand(shape) * 1


@dataclass(frozen=True)
class Standardized:
    """x_hat, and how it changes with x.

    axes   over which the statistics are taken; None where they are constants (batch norm in eval
           mode), so that the mean of any derivative that goes through them is ZERO
    """

    x_hat: Tensor
    rstd: Tensor
    axes: list[int] | None

    def mean(self, u: Any) -> Any:
        return ZERO if self.axes is None else u.mean(self.axes, keepdim=True)

    def pull(self, g: Any) -> Any:
        """The gradient of x from that of x_hat: rstd * (g - mean(g) - x_hat * mean(g * x_hat))"""
        return self.rstd * (g - self.mean(g) - self.x_hat * self.mean(g * self.x_hat))

    def push(self, t: Any) -> Any:
        """The tangent of x_hat from that of x: `pull`, in an order that no offset of t disturbs."""
        c = t - self.mean(t)
        return self.rstd * (c - self.x_hat * self.mean(c * self.x_hat))

    def double_backward(
        self, weight: Any, v: Any, vw: Any, vb: Any, g: Any, wanted: Sequence[bool]
    ) -> tuple[Any, ...]:
        """The gradients of x, of weight (before the sum over its copies) and of g, if wanted.

        They are those of sum(v * dx) + sum(vw * dweight) + sum(vb * dbias), with u = g * weight:

        x       pull(g * vw - rstd * (v * mean(u * x_hat) + u * mean(v * x_hat)))
                - rstd * x_hat * mean(v * pull(u))        the first through x_hat, the second rstd
        weight  g * pull(v)
        g       weight * pull(v) + x_hat * vw + vb
        """
        x_hat, rstd, dx, dg = self.x_hat, self.rstd, ZERO, ZERO
        k = self.pull(v) if wanted[1] or wanted[2] else ZERO
        if wanted[0]:
            u = g * weight
            c = g * vw - rstd * (v * self.mean(u * x_hat) + u * self.mean(v * x_hat))
            dx = self.pull(c) - rstd * x_hat * self.mean(v * self.pull(u))
        if wanted[2]:
            dg = weight * k + x_hat * vw + spread(vb, x_hat.shape)
        return dx, g * k, dg


def standardized_rows(
    x: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Sequence[int]
) -> Standardized:
    """Layer norm: statistics over the axes of normalized_shape."""
    mean, rstd = pad_to_rank(mean, x.dim()), pad_to_rank(rstd, x.dim())
    return Standardized((x - mean) * rstd, rstd, outer_and_inner(x, normalized_shape)[1])


def standardized_groups(x: Tensor, mean: Tensor, rstd: Tensor, groups: int) -> Standardized:
    """Group norm: x: n c *s -> n k q *s, statistics over q and s."""
    x = x.unflatten(1, (groups, -1))
    mean, rstd = pad_to_rank(mean, x.dim()), pad_to_rank(rstd, x.dim())
    return Standardized((x - mean) * rstd, rstd, list(range(2, x.dim())))


def standardized_channels(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    train: bool,
    eps: float,
) -> Standardized:
    """Batch norm: the saved statistics of this batch, or the running ones, which are constants."""
    if train:
        mean, rstd, expected = saved_mean, saved_rstd, "a saved mean and inverse deviation"
    else:
        mean, expected = running_mean, "running_mean and running_var"
        rstd = None if running_var is None else torch.rsqrt(running_var + eps)
    if mean is None or rstd is None:
        raise ValueError(f"batch norm's derivative with train={train} needs {expected}; found None")
    mean, rstd = per_channel(mean, x.dim()), per_channel(rstd, x.dim())
    return Standardized((x - mean) * rstd, rstd, all_but(x, 1) if train else None)


@formula(
    "double_backward",
    "layer_norm_double_backward(Tensor input_t, Tensor? gamma, Tensor? ggI, Tensor? ggG, "
    "Tensor? ggB, Tensor gO_t, Tensor save_mean_t, Tensor save_invstd_t, "
    "SymInt[] normalized_shape, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    source=f"{MANUAL}: layer_norm_double_backward",
    shapes="input_t: *n *d, gamma: *d, ggI: *n *d, ggG: *d, ggB: *d, gO_t: *n *d, "
    "save_mean_t: *n 1, save_invstd_t: *n 1 -> dinput: *n *d, dgamma: *d, dgO: *n *d",
    results=(
        Result(like("input_t"), None),
        Result(like("gamma"), None),
        Result(like("gO_t"), None),
    ),
    zeros=("ggI", "ggG", "ggB"),
    ones=("gamma",),
)
def layer_norm_double_backward(
    input_t: Tensor,
    gamma: Tensor,
    ggI: Tensor,
    ggG: Tensor,
    ggB: Tensor,
    gO_t: Tensor,
    save_mean_t: Tensor,
    save_invstd_t: Tensor,
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
) -> _Three:
    """The backward is, with u = g * gamma and P(u) = u - mean_d(u) - x_hat * mean_d(u * x_hat),

    dx = rstd * P(u),  dgamma = sum_n(g * x_hat),  dbeta = sum_n(g),  x_hat = (x - mean) * rstd

    and what has the gradients v = ggI, ggG, ggB is a function of x, gamma and g (here c is the
    gradient of x_hat, and drstd/dx = -rstd^2 * x_hat / d):

    c      = g * ggG - rstd * (v * mean_d(u * x_hat) + u * mean_d(v * x_hat))
    dinput = rstd * P(c) - rstd^2 * x_hat * mean_d(v * P(u))
    dgamma = sum_n(g * rstd * P(v))
    dgO    = gamma * rstd * P(v) + x_hat * ggG + ggB
    """
    norm = standardized_rows(input_t, save_mean_t, save_invstd_t, normalized_shape)
    outer, _ = outer_and_inner(input_t, normalized_shape)
    dinput, dgamma, dgO = norm.double_backward(gamma, ggI, ggG, ggB, gO_t, output_mask)
    return dinput, sum_over(dgamma, outer), dgO


@formula(
    "double_backward",
    "batchnorm_double_backward(Tensor input, Tensor? gamma, Tensor? ggI, Tensor? ggG, "
    "Tensor? ggB, Tensor gO, Tensor? running_mean, Tensor? running_var, bool training, float eps, "
    "Tensor? save_mean, Tensor? save_invstd, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    source=f"{MANUAL}: batchnorm_double_backward",
    shapes="input: n c *s, gamma: c, ggI: n c *s, ggG: c, ggB: c, gO: n c *s, running_mean: c, "
    "running_var: c, save_mean: c, save_invstd: c -> dinput: n c *s, dgamma: c, dgO: n c *s",
    results=(
        Result(like("input"), None),
        Result(like("gamma"), None),
        Result(like("gO"), None),
    ),
    zeros=("ggI", "ggG", "ggB"),
    ones=("gamma",),
)
def batchnorm_double_backward(
    input: Tensor,
    gamma: Tensor,
    ggI: Tensor,
    ggG: Tensor,
    ggB: Tensor,
    gO: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    output_mask: Sequence[bool],
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
    norm = standardized_channels(
        input, running_mean, running_var, save_mean, save_invstd, training, eps
    )
    gamma, ggG, ggB = (aligned(v, -1, rank=input.dim()) for v in (gamma, ggG, ggB))
    dinput, dgamma, dgO = norm.double_backward(gamma, ggI, ggG, ggB, gO, output_mask)
    return dinput, dgamma.sum(all_but(input, 1)), dgO


@formula(
    "vjp",
    "infinitely_differentiable_native_group_norm_backward(Tensor? dY, Tensor? dmean, "
    "Tensor? drstd, Tensor X, Tensor mean, Tensor rstd, Tensor? gamma, SymInt N, SymInt C, "
    "SymInt HxW, int group, float eps, bool[3] grad_input_mask) -> (Tensor, Tensor, Tensor)",
    source=f"{MANUAL}: infinitely_differentiable_native_group_norm_backward",
    shapes="dY: n c *s, dmean: n k, drstd: n k, X: n c *s, mean: n k, rstd: n k, gamma: c "
    "-> dX: n c *s, dgamma: c, dbeta: c",
    results=(
        Result(like("X"), None),
        Result(like("gamma"), None),
        Result(like("gamma", "X"), None),
    ),
    zeros=("dY", "dmean", "drstd"),
    ones=("gamma",),
    why="upstream drops dmean and drstd unless both are there, and dbeta without a gamma",
)
def infinitely_differentiable_native_group_norm_backward(
    dY: Tensor,
    dmean: Tensor,
    drstd: Tensor,
    X: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gamma: Tensor,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
    grad_input_mask: Sequence[bool],
) -> _Three:
    """y = x_hat * gamma + beta,  x_hat = (x - mean) * rstd,  x: n k q *s,  m = q s,  g = dY

    gs     = sum_s(g),  gx = sum_s(g * x_hat)                      per example and channel
    dX     = rstd * (g * gamma - sum_q(gs * gamma) / m - x_hat * sum_q(gx * gamma) / m)
             + dmean / m - drstd * rstd^2 * x_hat / m
    dgamma = sum_n(gx),  dbeta = sum_n(gs)
    """
    norm = standardized_groups(X, mean, rstd, group)
    x_hat, rstd, rank = norm.x_hat, norm.rstd, norm.x_hat.dim()
    g, m = dY.unflatten(1, (group, -1)), C // group * HxW
    weight = aligned(gamma, group, -1, rank=rank)
    dmean, drstd = (v.view(*mean.shape, *(1,) * (rank - 2)) for v in (dmean, drstd))
    spatial = list(range(3, rank))
    gs, gx = (v.sum(spatial, keepdim=True) if spatial else v for v in (g, g * x_hat))
    a, b = ((v * weight).sum(2, keepdim=True) / m for v in (gs, gx))
    through_statistics = spread(dmean, x_hat.shape) - drstd * rstd * rstd * x_hat
    dX = rstd * (g * weight - a - x_hat * b) + through_statistics / m
    return dX.flatten(1, 2), gx.sum(0).flatten(), gs.sum(0).flatten()


@formula(
    "vjp",
    "infinitely_differentiable_native_rms_norm_backward(Tensor? dY, Tensor? drstd, Tensor input, "
    "SymInt[] normalized_shape, Tensor rstd, Tensor? weight_opt, bool[2] grad_input_mask) "
    "-> (Tensor, Tensor)",
    source=f"{MANUAL}: infinitely_differentiable_native_rms_norm_backward",
    shapes="dY: *n *d, drstd: *n 1, input: *n *d, rstd: *n 1, weight_opt: *d "
    "-> dinput: *n *d, dweight: *d",
    results=(Result(like("input"), None), Result(like("weight_opt"), None)),
    zeros=("dY", "drstd"),
    ones=("weight_opt",),
)
def infinitely_differentiable_native_rms_norm_backward(
    dY: Tensor,
    drstd: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight_opt: Tensor,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """y = x_hat * weight,  x_hat = x * rstd,  rstd = (mean_d(x^2) + eps)^(-1/2),  g = dY

    dinput  = rstd * (g * weight - x_hat * mean_d(g * weight * x_hat)) - drstd * rstd^2 * x_hat / d
    dweight = sum_n(g * x_hat)
    """
    outer, inner = outer_and_inner(input, normalized_shape)
    x_hat, gw = input * rstd, dY * weight_opt
    through_y = rstd * (gw - x_hat * (gw * x_hat).mean(inner, keepdim=True))
    dinput = through_y - drstd * (rstd * rstd * x_hat / size_of(input, inner))
    return dinput, sum_over(dY * x_hat, outer)
