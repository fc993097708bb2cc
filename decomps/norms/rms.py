"""RMS norm: y = x_hat * weight over the trailing axes *d, without centring.

On the CPU, and wherever input and weight differ in dtype, torch.rms_norm is a composite of
primitives and these operators do not appear; on GPUs they do. Under vmap, for which torch has no
rules of them, the batch axis v is one more of the axes *n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import outer_and_inner, size_of
from normpass.decomps.batching import batched_decomposition, check_rank, trailing
from normpass.decomps.conventions import Result, as_input_on_cpu, like, raised
from normpass.decomps.manual import Gradient, Ints, Mask2, Tangent, Weight, manual
from normpass.decomps.neutral import ZERO
from normpass.decomps.norms.standardized import Standardized, affine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def _standardized(x: Tensor, rstd: Tensor, normalized_shape: Ints) -> Standardized:
    inner = outer_and_inner(x, normalized_shape)[1]
    return Standardized(x * rstd, rstd, inner, centred=False)


# --- forward ------------------------------------------------------------------------------------


@batched_decomposition(
    "aten._fused_rms_norm.default",
    source="aten/src/ATen/native/layer_norm.cpp: rms_norm_composite; "
    "aten/src/ATen/native/cuda/layer_norm_kernel.cu: _fused_rms_norm_cuda",
    shapes="x: *n *d, weight: *d -> y: *n *d, rstd: *n 1",
    results=(Result(like("input"), as_input_on_cpu), Result(raised("input"))),
    autograd=True,
    of=("x weight", "x"),
    batching="aten/src/ATen/native/layer_norm.cpp: rms_norm_composite",
    batching_why="torch takes the operator apart before vmap, and copies an input that is not "
    "contiguous",
)
def rms_norm(
    x: Tensor,
    normalized_shape: Ints,
    weight: Tensor | None,
    eps: float | None,
    *,
    v: int = 0,
) -> tuple[Tensor, Tensor]:
    """y = x * rstd * weight,  rstd = (mean_d(x^2) + eps)^(-1/2)

    eps, when None, is the machine epsilon of the working precision.
    """
    check_rank(x.shape[v:], normalized_shape)
    _, inner = outer_and_inner(x, normalized_shape)
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    rstd = torch.rsqrt((x * x).mean(inner, keepdim=True) + eps)
    return affine(x * rstd, trailing(weight, x.dim(), v), None), rstd


# --- backward -----------------------------------------------------------------------------------


@batched_decomposition(
    "aten._fused_rms_norm_backward.default",
    source="aten/src/ATen/native/cuda/layer_norm_kernel.cu: _fused_rms_norm_backward_cuda",
    shapes="g: *n *d, x: *n *d, rstd: *n 1, weight: *d -> dx: *n *d, dweight: *d",
    results=(Result(like("input")), Result(like("weight"))),
    why="torch's own decomposition returns dweight in the input's dtype, CUDA in the weight's",
    of=("g x rstd weight", "g x rstd"),
    batching="aten/src/ATen/native/cuda/layer_norm_kernel.cu: _fused_rms_norm_backward_cuda",
)
def rms_norm_backward(
    g: Tensor,
    x: Tensor,
    normalized_shape: Ints,
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
    *,
    v: int = 0,
) -> tuple[Tensor, Tensor]:
    """y = x_hat * weight,  x_hat = x * rstd,  gw = g * weight

    dx      = rstd * (gw - x_hat * mean_d(gw * x_hat))
    dweight = sum_n(g * x_hat)
    """
    outer, _ = outer_and_inner(x, normalized_shape)
    norm, wanted = _standardized(x, rstd, normalized_shape), (*output_mask, False)
    return norm.gradients(g, trailing(weight, x.dim(), v), outer[v:], wanted)[:2]


# --- derivatives --------------------------------------------------------------------------------


@manual(
    "dY: *n *d, drstd: *n 1, input: *n *d, rstd: *n 1, weight_opt: *d -> dinput: *n *d, dweight: *d"
)
def infinitely_differentiable_native_rms_norm_backward(
    dY: Gradient,
    drstd: Gradient,
    input: Tensor,
    normalized_shape: Ints,
    rstd: Tensor,
    weight_opt: Weight,
    grad_input_mask: Mask2,
) -> tuple[Tensor, Tensor]:
    """y = x_hat * weight,  x_hat = x * rstd,  rstd = (mean_d(x^2) + eps)^(-1/2),  g = dY

    dinput  = rstd * (g * weight - x_hat * mean_d(g * weight * x_hat)) - drstd * rstd^2 * x_hat / d
    dweight = sum_n(g * x_hat)
    """
    outer, inner = outer_and_inner(input, normalized_shape)
    norm = _standardized(input, rstd, normalized_shape)
    through_y, dweight, _ = norm.gradients(dY, weight_opt, outer)
    through_rstd = drstd * (rstd * rstd * norm.x_hat / size_of(input, inner))
    return through_y - through_rstd, dweight


@manual(
    "input_p: *n *d, input_t: *n *d, weight_p: *d, weight_t: *d, saved_rstd: *n 1 -> y_t: *n *d"
)
def rms_norm_jvp(
    input_p: Tensor,
    input_t: Tangent,
    weight_p: Weight,
    weight_t: Tangent,
    saved_rstd: Tensor,
    normalized_shape: Ints,
) -> Tensor:
    """y = x_hat * weight,  x_hat = x * rstd

    x_hat_t = rstd * (x_t - x_hat * mean_d(x_t * x_hat))
    y_t     = x_hat_t * weight + x_hat * weight_t
    """
    norm = _standardized(input_p, saved_rstd, normalized_shape)
    return norm.tangent(input_t, weight_p, weight_t, ZERO)


@manual(
    "input_p: *n *d, input_t: *n *d, saved_rstd: *n 1 -> rstd_t: *n 1",
    results=(Result(like("saved_rstd"), None),),
)
def rms_norm_rstd_jvp(
    input_p: Tensor, input_t: Tangent, saved_rstd: Tensor, normalized_shape: Ints
) -> Tensor:
    """rstd = (mean_d(x^2) + eps)^(-1/2),  x_hat = x * rstd

    rstd_t = -rstd^2 * mean_d(x_hat * x_t)
    """
    norm = _standardized(input_p, saved_rstd, normalized_shape)
    return -(saved_rstd * saved_rstd) * norm.mean(norm.x_hat * input_t)
