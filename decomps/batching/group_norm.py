"""Batching rules of group norm: x: v n k q *s, statistics per v, n and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import pad_to_rank, sum_over
from normpass.decomps.batched import (
    affine,
    any_of,
    batching_rule,
    example_sizes,
    fronts,
    outputs,
    per_channel,
)
from normpass.decomps.conventions import statistic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.batched import Outputs

aten = torch.ops.aten

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"


@batching_rule(
    aten.native_group_norm.default,
    source=f"{RULES}: native_group_norm_plumbing",
    shapes="input: v n c *s, weight: v c, bias: v c -> y: v n c *s, mean: v n k, rstd: v n k",
    why="v and n are not folded: where v does not lie before n that would copy the input",
)
def group_norm(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Outputs:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  x: v n k q *s

    mean = mean_qs(x),  rstd = (mean_qs((x - mean)^2) + eps)^(-1/2)
    """
    x_dim, w_dim, b_dim = dims = in_dims[:3]
    _check_groups(input, x_dim, C, group)
    x, w, b = fronts((input, weight, bias), dims)
    rank = x.dim()
    x = x.unflatten(2, (group, C // group))
    var, mean = torch.var_mean(x, list(range(3, x.dim())), correction=0)
    rstd = torch.rsqrt(var + eps)
    x_hat = (x - pad_to_rank(mean, x.dim())) * pad_to_rank(rstd, x.dim())
    w, b = (None if value is None else per_channel(value, rank) for value in (w, b))
    dtype = statistic({"input": input, "weight": weight, "bias": bias})
    return outputs(
        (affine(x_hat.flatten(2, 3), w, b).to(input.dtype), any_of(x_dim, w_dim, b_dim)),
        (mean.to(dtype), any_of(x_dim)),
        (rstd.to(dtype), any_of(x_dim)),
    )


def _check_groups(x: Tensor, dim: int | None, channels: int, groups: int) -> None:
    if groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {groups}")
    if channels % groups != 0:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {example_sizes(x, dim)} and num_groups={groups}"
        )


@batching_rule(
    aten.native_group_norm_backward.default,
    source=f"{RULES}: native_group_norm_backward_plumbing",
    shapes="grad_out: v n c *s, input: v n c *s, mean: v n k, rstd: v n k, weight: v c "
    "-> dx: v n c *s, dweight: v c, dbias: v c",
    why="sums of g and g * x_hat per channel serve dx and the parameters alike",
)
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
