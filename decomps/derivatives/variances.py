"""Variance and standard deviation, alone and with the mean."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normpass.decomps.axes import put_back, reduced, size_of
from normpass.decomps.manual import Dims, Gradient, Ints, Real, manual


def _with_axes(grad: Tensor, x: Tensor, axes: Ints, keepdim: bool) -> Tensor:
    """The gradient of a reduction of x over these axes, with them again."""
    # A number broadcasts as it is.
    return grad if keepdim or len(axes) == x.dim() else put_back(grad, axes)


@manual(
    "grad: *n, self: *n *d -> dself: *n *d",
    why="as upstream: without degrees of freedom the full reduction has the gradient inf, NaN "
    "where x is its mean; a reduction over named axes divides by what there is",
)
def var_backward(
    grad: Gradient, self: Tensor, dim_opt: Dims | None, correction_opt: Real | None, keepdim: bool
) -> Tensor:
    """var = sum_d(|x - mean_d(x)|^2) / (d - correction)

    dself = grad * 2 * (x - mean_d(x)) / (d - correction)
    """
    axes = reduced(self, dim_opt)
    degrees = size_of(self, axes) - (1 if correction_opt is None else correction_opt)
    mean = self.mean(axes, keepdim=True)
    if (not dim_opt or self.dim() == 0) and degrees <= 0:
        # An inequality between sizes, which a trace keeps as a guard; upstream has the same.
        return grad * torch.where(self == mean, math.nan, math.inf)
    grad = _with_axes(grad, self, axes, keepdim)
    # A tensor divided by a number that may be zero: Python's division would raise.
    return grad * (2 * (self - mean) / degrees)


@manual(
    "result: *n, grad: *n, self: *n *d -> dself: *n *d",
    rest="int[1]? dim, Scalar? correction_opt, bool keepdim",
    why="zero, a subgradient, where the deviation is zero",
)
def std_backward(result: Tensor, grad: Gradient, self: Tensor, *how: Any) -> Tensor:
    """std = sqrt(var):  dvar = grad / (2 * std), and zero where std is;  dself as of var"""
    zero = result == 0
    # Divided by one there: an infinity would come back as NaN with the next derivative.
    grad_var = (grad / (2 * result.masked_fill(zero, 1))).masked_fill(zero, 0)
    return var_backward(grad_var, self, *how)


def _mean_backward(grad: Tensor, x: Tensor, dim: Ints | None, _: Any, keepdim: bool) -> Tensor:
    """mean = sum_d(x) / d:  dx = grad / d"""
    axes = reduced(x, dim)
    return _with_axes(grad, x, axes, keepdim).expand(x.shape) / size_of(x, axes)


_HOW = "int[1]? dim_opt, Scalar? correction_opt, bool keepdim"


@manual("gvar: *n, gmean: *n, self: *n *d -> dself: *n *d", rest=_HOW)
def var_mean_backward(gvar: Gradient, gmean: Gradient, self: Tensor, *how: Any) -> Tensor:
    """dself = gvar * 2 * (x - mean_d(x)) / (d - correction) + gmean / d"""
    return var_backward(gvar, self, *how) + _mean_backward(gmean, self, *how)


@manual("gstd: *n, gmean: *n, self: *n *d, std: *n -> dself: *n *d", rest=_HOW)
def std_mean_backward(
    gstd: Gradient, gmean: Gradient, self: Tensor, std: Tensor, *how: Any
) -> Tensor:
    """dself = gstd / std * (x - mean_d(x)) / (d - correction) + gmean / d"""
    return std_backward(std, gstd, self, *how) + _mean_backward(gmean, self, *how)
