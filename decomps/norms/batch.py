"""Batch norm's backward: statistics per channel, over the batch and the spatial axes.

The forward stays with torch's decompositions: they read the input once for both statistics, are
centred and out of place (`_native_batch_norm_legit_functional`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import all_but, per_channel
from normpass.decomps.conventions import Result, as_input, like
from normpass.decomps.registry import decomposition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten

_Gradients = tuple["Tensor", "Tensor", "Tensor"]

_PARAMETER = Result(like("weight", "running_mean", "save_mean", "input"))
_RESULTS = (Result(like("input"), as_input), _PARAMETER, _PARAMETER)
_STATISTICS = "weight: c, running_mean: c, running_var: c, save_mean: c"
_GRADIENTS = "dx: n c *s, dweight: c, dbias: c"


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, train: bool
) -> _Gradients:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  m = the size of (n, s)

    dweight = sum_ns(g * x_hat)
    dbias   = sum_ns(g)
    dx      = rstd * weight * (g - dbias / m - x_hat * dweight / m)    statistics of this batch
    dx      = rstd * weight * g                                        running statistics
    """
    rank, reduced = x.dim(), all_but(x, 1)
    x_hat = (x - per_channel(mean, rank)) * per_channel(rstd, rank)
    dweight, dbias = (g * x_hat).sum(reduced), g.sum(reduced)
    scale = per_channel(rstd if weight is None else rstd * weight, rank)
    if not train:
        return g * scale, dweight, dbias
    m = 1
    for axis in reduced:
        m = m * x.shape[axis]
    a, b = per_channel(dbias / m, rank), per_channel(dweight / m, rank)
    return (g - a - x_hat * b) * scale, dweight, dbias


@decomposition(
    aten.native_batch_norm_backward.default,
    source="aten/src/ATen/native/Normalization.cpp: batch_norm_backward_cpu; "
    "aten/src/ATen/native/cuda/Normalization.cu: batch_norm_backward_cuda",
    shapes=f"g: n c *s, x: n c *s, {_STATISTICS}, save_rstd: c -> {_GRADIENTS}",
    results=_RESULTS,
)
def batch_norm_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> _Gradients:
    """See `_gradients`; in eval mode rstd = (running_var + eps)^(-1/2)."""
    if train:
        mean, rstd, expected = save_mean, save_rstd, "save_mean and save_invstd"
    else:
        mean, expected = running_mean, "running_mean and running_var"
        rstd = None if running_var is None else torch.rsqrt(running_var + eps)
    if mean is None or rstd is None:
        raise ValueError(f"batch norm's backward with train={train} needs {expected}; found None")
    return _gradients(g, x, weight, mean, rstd, train)


@decomposition(
    "aten.batch_norm_backward.default",
    source="aten/src/ATen/native/Normalization.cpp: _new_batch_norm_backward_cpu; "
    "aten/src/ATen/native/cuda/Normalization.cu: _new_batch_norm_backward_cuda",
    shapes=f"g: n c *s, x: n c *s, {_STATISTICS}, save_rstd: c, reserve: r -> {_GRADIENTS}",
    results=_RESULTS,
    why="the schema's save_var is the inverse deviation; the reserve is cuDNN's own",
)
def batch_norm_backward_with_reserve(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Tensor,
) -> _Gradients:
    """See `_gradients`."""
    return batch_norm_backward(
        g,
        x,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_rstd,
        update,
        eps,
        output_mask,
    )


@decomposition(
    "aten.cudnn_batch_norm_backward.default",
    source="aten/src/ATen/native/cudnn/BatchNorm.cpp: cudnn_batch_norm_backward",
    shapes=f"x: n c *s, g: n c *s, {_STATISTICS}, save_rstd: c, reserve: r -> {_GRADIENTS}",
    results=_RESULTS,
    why="only called in train mode; the schema's save_var is the inverse deviation",
)
def cudnn_batch_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_rstd: Tensor,
    eps: float,
    reserve: Tensor,
) -> _Gradients:
    """See `_gradients`."""
    return _gradients(g, x, weight, save_mean, save_rstd, train=True)


@decomposition(
    "aten.miopen_batch_norm_backward.default",
    source="aten/src/ATen/native/miopen/BatchNorm_miopen.cpp: miopen_batch_norm_backward",
    shapes=f"x: n c *s, g: n c *s, {_STATISTICS}, save_rstd: c -> {_GRADIENTS}",
    results=_RESULTS,
    why="only called in train mode; the schema's save_var is the inverse deviation",
)
def miopen_batch_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_rstd: Tensor,
    eps: float,
) -> _Gradients:
    """See `_gradients`."""
    return _gradients(g, x, weight, save_mean, save_rstd, train=True)
