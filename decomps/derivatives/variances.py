"""Variance and standard deviation, alone and with the mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import put_back, reduced, size_of
from normpass.decomps.conventions import Result, like
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"

_DIM = "int[1]? dim_opt, Scalar? correction_opt, bool keepdim"
_RESULT = (Result(like("self"), None),)


def _with_axes(grad: Tensor, x: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    """The gradient of a reduction of x over these axes, with them again."""
    # A number broadcasts as it is.
    return grad if keepdim or len(axes) == x.dim() else put_back(grad, axes)


@formula(
    "vjp",
    f"var_backward(Tensor? grad, Tensor self, {_DIM}) -> Tensor",
    source=f"{MANUAL}: var_backward",
    shapes="grad: *n, self: *n *d -> dself: *n *d",
    results=_RESULT,
    zeros=("grad",),
    why="as upstream: without degrees of freedom the full reduction has the gradient inf, NaN "
    "where x is its mean; a reduction over named axes divides by what there is",
)
def var_backward(
    grad: Tensor,
    self: Tensor,
    dim_opt: Sequence[int] | None,
    correction_opt: float | None,
    keepdim: bool,
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


@formula(
    "vjp",
    "std_backward(Tensor result, Tensor? grad, Tensor self, int[1]? dim, Scalar? correction_opt, "
    "bool keepdim) -> Tensor",
    source=f"{MANUAL}: std_backward",
    shapes="result: *n, grad: *n, self: *n *d -> dself: *n *d",
    results=_RESULT,
    zeros=("grad",),
    why="zero, a subgradient, where the deviation is zero",
)
def std_backward(
    result: Tensor,
    grad: Tensor,
    self: Tensor,
    dim: Sequence[int] | None,
    correction_opt: float | None,
    keepdim: bool,
) -> Tensor:
    """std = sqrt(var):  dvar = grad / (2 * std), and zero where std is;  dself as of var"""
    zero = result == 0
    # Divided by one there: an infinity would come back as NaN with the next derivative.
    grad_var = (grad / (2 * result.masked_fill(zero, 1))).masked_fill(zero, 0)
    return var_backward(grad_var, self, dim, correction_opt, keepdim)


def _mean_backward(grad: Tensor, x: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    """mean = sum_d(x) / d:  dx = grad / d"""
    axes = reduced(x, dim)
    return _with_axes(grad, x, axes, keepdim).expand(x.shape) / size_of(x, axes)


@formula(
    "vjp",
    f"var_mean_backward(Tensor? gvar, Tensor? gmean, Tensor self, {_DIM}) -> Tensor",
    source=f"{MANUAL}: var_mean_backward",
    shapes="gvar: *n, gmean: *n, self: *n *d -> dself: *n *d",
    results=_RESULT,
    zeros=("gvar", "gmean"),
)
def var_mean_backward(
    gvar: Tensor,
    gmean: Tensor,
    self: Tensor,
    dim_opt: Sequence[int] | None,
    correction_opt: float | None,
    keepdim: bool,
) -> Tensor:
    """dself = gvar * 2 * (x - mean_d(x)) / (d - correction) + gmean / d"""
    through_var = var_backward(gvar, self, dim_opt, correction_opt, keepdim)
    return through_var + _mean_backward(gmean, self, dim_opt, keepdim)


@formula(
    "vjp",
    f"std_mean_backward(Tensor? gstd, Tensor? gmean, Tensor self, Tensor std, {_DIM}) -> Tensor",
    source=f"{MANUAL}: std_mean_backward",
    shapes="gstd: *n, gmean: *n, self: *n *d, std: *n -> dself: *n *d",
    results=_RESULT,
    zeros=("gstd", "gmean"),
)
def std_mean_backward(
    gstd: Tensor,
    gmean: Tensor,
    self: Tensor,
    std: Tensor,
    dim_opt: Sequence[int] | None,
    correction_opt: float | None,
    keepdim: bool,
) -> Tensor:
    """dself = gstd / std * (x - mean_d(x)) / (d - correction) + gmean / d"""
    through_std = std_backward(std, gstd, self, dim_opt, correction_opt, keepdim)
    return through_std + _mean_backward(gmean, self, dim_opt, keepdim)
