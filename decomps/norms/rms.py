"""RMS norm: y = x_hat * weight over the trailing axes *d, without centring.

On the CPU, and wherever input and weight differ in dtype, torch.rms_norm is a composite of
primitives and these operators do not appear; on GPUs they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import outer_and_inner, sum_over
from normpass.decomps.conventions import Result, as_input_on_cpu, like, raised
from normpass.decomps.registry import decomposition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@decomposition(
    "aten._fused_rms_norm.default",
    source="aten/src/ATen/native/layer_norm.cpp: rms_norm_composite; "
    "aten/src/ATen/native/cuda/layer_norm_kernel.cu: _fused_rms_norm_cuda",
    shapes="x: *n *d, weight: *d -> y: *n *d, rstd: *n 1",
    results=(Result(like("input"), as_input_on_cpu), Result(raised("input"))),
    autograd=True,
)
def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """y = x * rstd * weight,  rstd = (mean_d(x^2) + eps)^(-1/2)

    eps, when None, is the machine epsilon of the working precision.
    """
    _, inner = outer_and_inner(x, normalized_shape)
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    rstd = torch.rsqrt((x * x).mean(inner, keepdim=True) + eps)
    y = x * rstd
    return (y if weight is None else y * weight), rstd


@decomposition(
    "aten._fused_rms_norm_backward.default",
    source="aten/src/ATen/native/cuda/layer_norm_kernel.cu: _fused_rms_norm_backward_cuda",
    shapes="g: *n *d, x: *n *d, rstd: *n 1, weight: *d -> dx: *n *d, dweight: *d",
    results=(Result(like("input")), Result(like("weight"))),
    why="torch's own decomposition returns dweight in the input's dtype, CUDA in the weight's",
)
def rms_norm_backward(
    g: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """y = x_hat * weight,  x_hat = x * rstd,  gw = g * weight

    dx      = rstd * (gw - x_hat * mean_d(gw * x_hat))
    dweight = sum_n(g * x_hat)
    """
    outer, inner = outer_and_inner(x, normalized_shape)
    x_hat = x * rstd
    gw = g if weight is None else g * weight
    b = (gw * x_hat).mean(inner, keepdim=True)
    dx = rstd * (gw - x_hat * b)
    return dx, sum_over(g * x_hat, outer)
