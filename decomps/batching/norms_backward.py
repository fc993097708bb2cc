"""Batching rules of the norms' backward: gradients per example, x read in place.

What is summed into the gradient of a parameter is summed over the axes of one example; the sums
that the input's gradient needs anyway are not taken twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import pad_to_rank, sum_over
from normpass.decomps.batched import (
    any_of,
    fronts,
    outputs,
    per_channel,
    trailing,
    unless_unbatched,
)
from normpass.decomps.registry import register_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.batched import Outputs

aten = torch.ops.aten

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"


@register_rule(
    "batching",
    aten.native_layer_norm_backward.default,
    source=f"{RULES}: native_layer_norm_backward_plumbing",
    shapes="grad_out: v *n *d, input: v *n *d, mean: v *n 1, rstd: v *n 1, weight: v *d, "
    "bias: v *d -> dx: v *n *d, dweight: v *d, dbias: v *d",
)
@unless_unbatched(aten.native_layer_norm_backward.default)
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


@register_rule(
    "batching",
    aten.native_group_norm_backward.default,
    source=f"{RULES}: native_group_norm_backward_plumbing",
    shapes="grad_out: v n c *s, input: v n c *s, mean: v n k, rstd: v n k, weight: v c "
    "-> dx: v n c *s, dweight: v c, dbias: v c",
    why="sums of g and g * x_hat per channel serve dx and the parameters alike",
)
@unless_unbatched(aten.native_group_norm_backward.default)
def group_norm_backward(
    info: Any,
    in_dims: Sequence[Any],
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Outputs:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: v n k q *s

    gs      = sum_s(g),  gx = sum_s(g * x_hat)                      per example, n and channel
    a       = sum_q(gs * weight) / (q s),  b = sum_q(gx * weight) / (q s)
    dx      = rstd * (g * weight - a - x_hat * b)
    dweight = sum_n(gx),  dbias = sum_n(gs)
    """
    dims = in_dims[:5]
    g, x, m, r, w = fronts((grad_out, input, mean, rstd, weight), dims)
    g, x = (value.unflatten(2, (group, C // group)) for value in (g, x))
    rank, spatial = x.dim(), list(range(4, x.dim()))
    r = pad_to_rank(r, rank)
    x_hat = (x - pad_to_rank(m, rank)) * r
    gs, gx = (sum_over(value, spatial) for value in (g, g * x_hat))  # v n k q
    dx = dweight = dbias = None
    if output_mask[0]:
        size = C // group * HxW
        gw, gsw, gxw = g, gs, gx
        if w is not None:
            w = w.unflatten(1, (group, C // group)).unsqueeze(1)
            gw, gsw, gxw = g * pad_to_rank(w, rank), gs * w, gx * w
        a, b = (pad_to_rank(value.sum(3) / size, rank) for value in (gsw, gxw))
        dx = (r * (gw - a - x_hat * b)).flatten(2, 3).to(input.dtype)
    dtype = mean.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = gx.sum(1).flatten(1, 2).to(dtype)
    if output_mask[2]:
        dbias = gs.sum(1).flatten(1, 2).to(dtype)
    return outputs((dx, any_of(*dims)), (dweight, any_of(*dims[:4])), (dbias, any_of(dims[0])))


@register_rule(
    "batching",
    aten.native_batch_norm_backward.default,
    source=f"{RULES}: batch_norm_backward_plumbing",
    shapes="grad_out: v n c *s, input: v n c *s, weight: v c, running_mean: v c, running_var: v c, "
    "save_mean: v c, save_invstd: v c -> dx: v n c *s, dweight: v c, dbias: v c",
    why="two sums serve the three gradients; the C++ rule takes each of them twice",
)
@unless_unbatched(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    info: Any,
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
) -> Outputs:
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
    rank, reduced = x.dim(), [axis for axis in range(1, x.dim()) if axis != 2]
    x_hat = (x - per_channel(mean, rank)) * per_channel(rstd, rank)
    centred = train and output_mask[0]
    dx: Any = None
    dweight: Any = (g * x_hat).sum(reduced) if centred or output_mask[1] else None
    dbias: Any = g.sum(reduced) if centred or output_mask[2] else None
    if centred:
        m = math.prod(x.shape[axis] for axis in reduced)
        g = g - per_channel(dbias / m, rank) - x_hat * per_channel(dweight / m, rank)
    if output_mask[0]:
        dx = (g * per_channel(rstd if w is None else rstd * w, rank)).to(input.dtype)
    parameters = (weight, running_mean, save_mean, input)
    dtype = next(value.dtype for value in parameters if value is not None)
    return outputs(
        (dx, any_of(*dims) if train else any_of(g_dim, rstd_dim, w_dim)),
        (dweight.to(dtype) if output_mask[1] else None, any_of(*dims[:4])),
        (dbias.to(dtype) if output_mask[2] else None, any_of(g_dim)),
    )
