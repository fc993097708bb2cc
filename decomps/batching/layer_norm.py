"""Batching rules of layer norm: the batch axis v is one more of the axes *n."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import pad_to_rank, sum_over
from normpass.decomps.batched import (
    affine,
    any_of,
    batching_rule,
    check_rank,
    example_sizes,
    front,
    fronts,
    outputs,
    trailing,
)
from normpass.decomps.conventions import statistic_by_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.batched import Outputs

aten = torch.ops.aten

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"


@batching_rule(
    aten.native_layer_norm.default,
    source=f"{RULES}: native_layer_norm_batch_rule",
    shapes="input: v *n *d, weight: v *d, bias: v *d -> y: v *n *d, mean: v *n 1, rstd: v *n 1",
    why="v is one more of the axes *n; a weight or bias per example is applied outside the norm",
    constants=(1, 2),
)
def layer_norm(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Outputs:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd

    mean = mean_d(x),  rstd = (mean_d((x - mean)^2) + eps)^(-1/2)     per example and *n
    """
    x_dim, _, w_dim, b_dim, _ = in_dims
    check_rank(input, x_dim, normalized_shape)
    if not any_of(w_dim, b_dim):
        x = front(input, x_dim)
        y, mean, rstd = aten.native_layer_norm(x, normalized_shape, weight, bias, eps)
        return outputs((y, True), (mean, True), (rstd, True))
    _check_parameter("weight", weight, w_dim, normalized_shape)
    _check_parameter("bias", bias, b_dim, normalized_shape)
    x, w, b = fronts((input, weight, bias), (x_dim, w_dim, b_dim))
    x_hat, mean, rstd = aten.native_layer_norm(x, normalized_shape, None, None, eps)
    w, b = (None if value is None else trailing(value, x.dim()) for value in (w, b))
    dtype = statistic_by_device({"input": input, "weight": weight, "bias": bias})
    return outputs(
        (affine(x_hat, w, b).to(input.dtype), True),
        (mean.to(dtype), any_of(x_dim)),
        (rstd.to(dtype), any_of(x_dim)),
    )


def _check_parameter(
    name: str, value: Tensor | None, dim: int | None, normalized_shape: Sequence[int]
) -> None:
    if not normalized_shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one "
            "element, but got normalized_shape = []"
        )
    if value is not None and example_sizes(value, dim) != list(normalized_shape):
        raise RuntimeError(
            f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
            f"{list(value.shape)} and normalized_shape = {list(normalized_shape)}"
        )


@batching_rule(
    aten.native_layer_norm_backward.default,
    source=f"{RULES}: native_layer_norm_backward_plumbing",
    shapes="grad_out: v *n *d, input: v *n *d, mean: v *n 1, rstd: v *n 1, weight: v *d, "
    "bias: v *d -> dx: v *n *d, dweight: v *d, dbias: v *d",
)
def layer_norm_backward(
    info: Any,
    in_dims: Sequence[Any],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Outputs:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  gw = g * weight

    dx      = rstd * (gw - mean_d(gw) - x_hat * mean_d(gw * x_hat))
    dweight = sum_n(g * x_hat)                                             per example
    dbias   = sum_n(g)
    """
    g_dim, x_dim, _, mean_dim, rstd_dim, w_dim, _, _ = in_dims
    dims = (g_dim, x_dim, mean_dim, rstd_dim, w_dim)
    g, x, m, r, w = fronts((grad_out, input, mean, rstd, weight), dims)
    rank = x.dim()
    first = rank - len(normalized_shape)
    outer, inner = list(range(1, first)), list(range(first, rank))
    r = pad_to_rank(r, rank)
    x_hat = (x - pad_to_rank(m, rank)) * r
    dx = dweight = dbias = None
    if output_mask[0]:
        gw = g if w is None else g * trailing(w, rank)
        a = gw.mean(inner, keepdim=True)
        b = (gw * x_hat).mean(inner, keepdim=True)
        dx = (r * (gw - a - x_hat * b)).to(input.dtype)
    if output_mask[1] and weight is not None:
        dweight = sum_over(g * x_hat, outer).to(weight.dtype)
    if output_mask[2] and bias is not None:
        dbias = sum_over(g, outer).to(bias.dtype)
    return outputs((dx, any_of(*dims)), (dweight, any_of(*dims[:4])), (dbias, any_of(g_dim)))
