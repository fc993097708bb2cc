"""What the norms share: x_hat = (x - mean) * rstd, and how it changes with x.

mean and rstd are functions of x, and so x_hat's derivative is symmetric: one expression, `pull`, is
in every backward, double backward and tangent. RMS norm's x_hat is x * rstd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation import levels
from normpass.decomps.axes import sum_over
from normpass.decomps.conventions import working
from normpass.decomps.neutral import ZERO
from normpass.decomps.operators import is_recorded_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ALL = (True, True, True)
# Of the statistics that tests save for a backward operator, which is not told it.
EPS = 0.25


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x_hat * weight + bias, of which None is left out."""
    y = x_hat if weight is None else x_hat * weight
    return y if bias is None else y + bias


def spread(v: Any, shape: Sequence[int]) -> Any:
    """v over this shape; a tensor of its own, for an operator may not return a view of an argument.

    ZERO stays ZERO.
    """
    return v.expand(shape) * 1


@dataclass(frozen=True)
class Standardized:
    """x_hat, and how it changes with x.

    axes     over which the statistics are taken; None where they are constants (batch norm in eval
             mode), so that the mean of any derivative that goes through them is ZERO
    centred  whether there is a mean in x_hat
    """

    x_hat: Tensor
    rstd: Tensor
    axes: list[int] | None
    centred: bool = True

    def mean(self, u: Any) -> Any:
        return ZERO if self.axes is None else u.mean(self.axes, keepdim=True)

    def centre(self, u: Any) -> Any:
        return u - self.mean(u) if self.centred else u

    def pull(self, g: Any) -> Any:
        """The gradient of x from that of x_hat: rstd * (g - mean(g) - x_hat * mean(g * x_hat))"""
        return self.rstd * (self.centre(g) - self.x_hat * self.mean(g * self.x_hat))

    def push(self, t: Any) -> Any:
        """The tangent of x_hat from that of x: `pull`, in an order that no offset of t disturbs."""
        c = self.centre(t)
        return self.rstd * (c - self.x_hat * self.mean(c * self.x_hat))

    def tangent(self, t: Any, weight: Any, weight_t: Any, bias_t: Any) -> Any:
        """Of y = x_hat * weight + bias:  y_t = x_hat_t * weight + x_hat * weight_t + bias_t"""
        return self.push(t) * weight + self.x_hat * weight_t + spread(bias_t, self.x_hat.shape)

    def gradients(
        self, g: Any, weight: Any, copies: Sequence[int], wanted: Sequence[bool] = ALL
    ) -> tuple[Any, Any, Any]:
        """Those of x, weight and bias in y = x_hat * weight + bias; None where they are not wanted.

        dx = pull(g * weight),  dweight = sum(g * x_hat),  dbias = sum(g)      over these axes
        """
        dx = dweight = dbias = None
        if wanted[0]:  # `pull`, with both means first: they are taken in one pass
            gw = g if weight is None else g * weight
            a = self.mean(gw) if self.centred else ZERO
            b = self.mean(gw * self.x_hat)
            dx = self.rstd * (gw - a - self.x_hat * b)
        if wanted[1]:
            dweight = sum_over(g * self.x_hat, copies)
        if wanted[2]:
            dbias = sum_over(g, copies)
        return dx, dweight, dbias

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


def may_be_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a derivative of a backward's derivative is asked for, or may be, of a trace."""
    return is_recorded_apart() or levels.may_be_differentiated(tensors)


def recomputed(x: Tensor, rstd: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """mean = mean_d(x) and rstd = (mean_d((x - mean)^2) + eps)^(-1/2), with x's derivatives.

    torch differentiates the norms' backward operators as if what was saved were constants: from the
    third order in reverse that is wrong. Such an operator is not told eps; rstd^-2 - var is that
    constant, and added to var it gives rstd^-2 again without loss.
    """
    x, axes = x.to(working(x.dtype)), list(axes)
    mean = x.mean(axes, keepdim=True)
    var = (x - mean).square().mean(axes, keepdim=True)  # torch.var warns of an empty x
    eps = levels.constant(rstd.to(x.dtype).view(var.shape).pow(-2) - var)
    return mean, torch.rsqrt(var + eps)


def attached(
    x: Tensor, mean: Any, rstd: Any, axes: Sequence[int], *others: Tensor | None
) -> tuple[Any, Any]:
    """The statistics that were saved of x: as they are, and with x's derivatives where one is asked
    for.

    For a backward's batching rule: below vmap it is no operator any more whose derivative knows of
    them. To its primitives they are what a norm's forward saved, which is constant. Statistics that
    are none of this x (others are batched) stay so.
    """
    if mean is None or rstd is None or mean.shape[0] != x.shape[0]:
        return mean, rstd
    if not may_be_differentiated(x, *others):
        return mean, rstd
    fresh, fresh_rstd = recomputed(x, rstd, axes)
    same = fresh + levels.constant(mean.view(fresh.shape) - fresh)
    return same.view(mean.shape), fresh_rstd.view(rstd.shape)
