"""Layer norm: y = x_hat * weight + bias over the trailing axes *d."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import outer_and_inner, pad_to_rank, sum_over
from normpass.decomps.conventions import Result, like, statistic_by_device
from normpass.decomps.registry import decomposition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten


@decomposition(
    aten.native_layer_norm.default,
    source="aten/src/ATen/native/layer_norm.cpp: layer_norm_cpu; "
    "aten/src/ATen/native/cuda/layer_norm_kernel.cu: layer_norm_cuda",
    shapes="x: *n *d, weight: *d, bias: *d -> y: *n *d, mean: *n 1, rstd: *n 1",
    results=(Result(like("input")), Result(statistic_by_device), Result(statistic_by_device)),
    why="torch's own copies a non-contiguous input first",
    autograd=True,
    constants=(1, 2),
)
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd

    mean = mean_d(x),  rstd = (mean_d((x - mean)^2) + eps)^(-1/2)
    """
    _, inner = outer_and_inner(x, normalized_shape)
    var, mean = torch.var_mean(x, inner, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    y = (x - mean) * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y, mean, rstd


@decomposition(
    aten.native_layer_norm_backward.default,
    source="aten/src/ATen/native/cpu/layer_norm_kernel.cpp: LayerNormBackwardKernelImplInternal; "
    "aten/src/ATen/native/cuda/layer_norm_kernel.cu: layer_norm_backward_cuda",
    shapes="g: *n *d, x: *n *d, mean: *n 1, rstd: *n 1, weight: *d, bias: *d "
    "-> dx: *n *d, dweight: *d, dbias: *d",
    results=(Result(like("input")), Result(like("weight")), Result(like("bias"))),
)
def layer_norm_backward(
    g: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  gw = g * weight

    dx      = rstd * (gw - mean_d(gw) - x_hat * mean_d(gw * x_hat))
    dweight = sum_n(g * x_hat)
    dbias   = sum_n(g)
    """
    outer, inner = outer_and_inner(x, normalized_shape)
    mean, rstd = pad_to_rank(mean, x.dim()), pad_to_rank(rstd, x.dim())
    x_hat = (x - mean) * rstd
    gw = g if weight is None else g * weight
    a = gw.mean(inner, keepdim=True)
    b = (gw * x_hat).mean(inner, keepdim=True)
    dx = rstd * (gw - a - x_hat * b)
    return dx, sum_over(g * x_hat, outer), sum_over(g, outer)
