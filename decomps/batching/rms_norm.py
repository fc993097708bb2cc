"""Batching rules of RMS norm, for which torch has none: v is one more of the axes *n."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import sum_over
from normpass.decomps.batched import (
    any_of,
    batching_rule,
    check_rank,
    fronts,
    outputs,
    trailing,
)
from normpass.decomps.conventions import working

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.batched import Outputs


@batching_rule(
    "aten._fused_rms_norm.default",
    source="aten/src/ATen/native/layer_norm.cpp: rms_norm_composite",
    shapes="input: v *n *d, weight: v *d -> y: v *n *d, rstd: v *n 1",
    why="torch takes the operator apart before vmap, and copies an input that is not contiguous",
)
def rms_norm(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> Outputs:
    """y = x_hat * weight,  x_hat = x * rstd

    rstd = (mean_d(x^2) + eps)^(-1/2) per example and *n; eps, when None, is the machine epsilon of
    the working precision.
    """
    x_dim, _, w_dim, _ = in_dims
    check_rank(input, x_dim, normalized_shape)
    x, w = fronts((input, weight), (x_dim, w_dim))
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    inner = list(range(x.dim() - len(normalized_shape), x.dim()))
    rstd = torch.rsqrt((x * x).mean(inner, keepdim=True) + eps)
    y = x * rstd if w is None else x * rstd * trailing(w, x.dim())
    return outputs(
        (y.to(input.dtype), any_of(x_dim, w_dim)),
        (rstd.to(working(input.dtype)), any_of(x_dim)),
    )


@batching_rule(
    "aten._fused_rms_norm_backward.default",
    source="aten/src/ATen/native/cuda/layer_norm_kernel.cu: _fused_rms_norm_backward_cuda",
    shapes="grad_out: v *n *d, input: v *n *d, rstd: v *n 1, weight: v *d "
    "-> dx: v *n *d, dweight: v *d",
)
def rms_norm_backward(
    info: Any,
    in_dims: Sequence[Any],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> Outputs:
    """y = x_hat * weight,  x_hat = x * rstd,  gw = g * weight

    dx      = rstd * (gw - x_hat * mean_d(gw * x_hat))
    dweight = sum_n(g * x_hat)                                             per example
    """
    g_dim, x_dim, _, rstd_dim, w_dim, _ = in_dims
    dims = (g_dim, x_dim, rstd_dim, w_dim)
    g, x, r, w = fronts((grad_out, input, rstd, weight), dims)
    rank = x.dim()
    first = rank - len(normalized_shape)
    outer, inner = list(range(1, first)), list(range(first, rank))
    x_hat = x * r
    dx = dweight = None
    if output_mask[0]:
        gw = g if w is None else g * trailing(w, rank)
        b = (gw * x_hat).mean(inner, keepdim=True)
        dx = (r * (gw - x_hat * b)).to(input.dtype)
    if output_mask[1] and weight is not None:
        dweight = sum_over(g * x_hat, outer).to(weight.dtype)
    return outputs((dx, any_of(*dims)), (dweight, any_of(*dims[:3])))
