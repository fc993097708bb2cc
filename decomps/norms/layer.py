"""Layer norm: y = x_hat * weight + bias over the trailing axes *d.

Under vmap the batch axis v is one more of the axes *n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import outer_and_inner, pad_to_rank, sum_over
from normpass.decomps.batching import (
    any_of,
    batched_decomposition,
    batching_rule,
    check_rank,
    example_sizes,
    front,
    fronts,
    outputs,
    trailing,
)
from normpass.decomps.conventions import Result, like, statistic_by_device
from normpass.decomps.manual import Gradient, Ints, Mask3, Tangent, Weight, manual
from normpass.decomps.norms.standardized import (
    EPS,
    Standardized,
    affine,
    attached,
    may_be_differentiated,
    recomputed,
)
from normpass.decomps.registry import decomposition, derivative, register_rule

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from normpass.decomps.batching import Outputs

aten = torch.ops.aten

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"


def _standardized(x: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Ints) -> Standardized:
    mean, rstd = pad_to_rank(mean, x.dim()), pad_to_rank(rstd, x.dim())
    return Standardized((x - mean) * rstd, rstd, outer_and_inner(x, normalized_shape)[1])


# --- forward ------------------------------------------------------------------------------------


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
    normalized_shape: Ints,
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
    return affine((x - mean) * rstd, weight, bias), mean, rstd


@batching_rule(
    aten.native_layer_norm.default,
    source=f"{RULES}: native_layer_norm_batch_rule",
    shapes="input: v *n *d, weight: v *d, bias: v *d -> y: v *n *d, mean: v *n 1, rstd: v *n 1",
    why="v is one more of the axes *n; a weight or bias per example is applied outside the norm",
    constants=(1, 2),
)
def layer_norm_batch_rule(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    normalized_shape: Ints,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Outputs:
    """See `layer_norm`, which is per example and *n."""
    x_dim, _, w_dim, b_dim, _ = in_dims
    check_rank(example_sizes(input, x_dim), normalized_shape)
    if not any_of(w_dim, b_dim):
        x = front(input, x_dim)
        y, mean, rstd = aten.native_layer_norm(x, normalized_shape, weight, bias, eps)
        return outputs((y, True), (mean, True), (rstd, True))
    _check_parameter("weight", weight, w_dim, normalized_shape)
    _check_parameter("bias", bias, b_dim, normalized_shape)
    x, w, b = fronts((input, weight, bias), (x_dim, w_dim, b_dim))
    x_hat, mean, rstd = aten.native_layer_norm(x, normalized_shape, None, None, eps)
    w, b = trailing(w, x.dim()), trailing(b, x.dim())
    dtype = statistic_by_device({"input": input, "weight": weight, "bias": bias})
    return outputs(
        (affine(x_hat, w, b).to(input.dtype), True),
        (mean.to(dtype), any_of(x_dim)),
        (rstd.to(dtype), any_of(x_dim)),
    )


def _check_parameter(
    name: str, value: Tensor | None, dim: int | None, normalized_shape: Ints
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


# --- backward -----------------------------------------------------------------------------------


@batched_decomposition(
    aten.native_layer_norm_backward.default,
    source="aten/src/ATen/native/cpu/layer_norm_kernel.cpp: LayerNormBackwardKernelImplInternal; "
    "aten/src/ATen/native/cuda/layer_norm_kernel.cu: layer_norm_backward_cuda",
    shapes="g: *n *d, x: *n *d, mean: *n 1, rstd: *n 1, weight: *d, bias: *d "
    "-> dx: *n *d, dweight: *d, dbias: *d",
    results=(Result(like("input")), Result(like("weight")), Result(like("bias"))),
    of=("g x mean rstd weight", "g x mean rstd", "g"),
    batching=f"{RULES}: native_layer_norm_backward_plumbing",
)
def layer_norm_backward(
    g: Tensor,
    x: Tensor,
    normalized_shape: Ints,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
    *,
    v: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  gw = g * weight

    dx      = rstd * (gw - mean_d(gw) - x_hat * mean_d(gw * x_hat))
    dweight = sum_n(g * x_hat)
    dbias   = sum_n(g)
    """
    outer, inner = outer_and_inner(x, normalized_shape)
    if v:
        mean, rstd = attached(x, mean, rstd, inner, g, weight)
    norm = _standardized(x, mean, rstd, normalized_shape)
    return norm.gradients(g, trailing(weight, x.dim(), v), outer[v:], output_mask)


# --- derivatives --------------------------------------------------------------------------------


@manual(
    "input_p: *n *d, input_t: *n *d, weight_p: *d, weight_t: *d, bias_p: *d, bias_t: *d, "
    "saved_mean: *n 1, saved_invstd: *n 1 -> y_t: *n *d"
)
def layer_norm_jvp(
    input_p: Tensor,
    input_t: Tangent,
    weight_p: Weight,
    weight_t: Tangent,
    bias_p: Tensor | None,
    bias_t: Tangent,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    normalized_shape: Ints,
) -> Tensor:
    """y = x_hat * weight + bias,  x_hat = (x - mean) * rstd,  c = x_t - mean_d(x_t)

    x_hat_t = rstd * (c - x_hat * mean_d(c * x_hat))
    y_t     = x_hat_t * weight + x_hat * weight_t + bias_t
    """
    norm = _standardized(input_p, saved_mean, saved_invstd, normalized_shape)
    return norm.tangent(input_t, weight_p, weight_t, bias_t)


@manual(
    "input_t: *n *d, gamma: *d, ggI: *n *d, ggG: *d, ggB: *d, gO_t: *n *d, "
    "save_mean_t: *n 1, save_invstd_t: *n 1 -> dinput: *n *d, dgamma: *d, dgO: *n *d"
)
def layer_norm_double_backward(
    input_t: Tensor,
    gamma: Weight,
    ggI: Gradient,
    ggG: Gradient,
    ggB: Gradient,
    gO_t: Tensor,
    save_mean_t: Tensor,
    save_invstd_t: Tensor,
    normalized_shape: Ints,
    output_mask: Mask3,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward is, with u = g * gamma and P(u) = u - mean_d(u) - x_hat * mean_d(u * x_hat),

    dx = rstd * P(u),  dgamma = sum_n(g * x_hat),  dbeta = sum_n(g),  x_hat = (x - mean) * rstd

    and what has the gradients v = ggI, ggG, ggB is a function of x, gamma and g (here c is the
    gradient of x_hat, and drstd/dx = -rstd^2 * x_hat / d):

    c      = g * ggG - rstd * (v * mean_d(u * x_hat) + u * mean_d(v * x_hat))
    dinput = rstd * P(c) - rstd^2 * x_hat * mean_d(v * P(u))
    dgamma = sum_n(g * rstd * P(v))
    dgO    = gamma * rstd * P(v) + x_hat * ggG + ggB
    """
    norm = _standardized(input_t, save_mean_t, save_invstd_t, normalized_shape)
    outer, _ = outer_and_inner(input_t, normalized_shape)
    dinput, dgamma, dgO = norm.double_backward(gamma, ggI, ggG, ggB, gO_t, output_mask)
    return dinput, sum_over(dgamma, outer), dgO


_NEEDS = ("input", "weight", "grad_out")


@register_rule(
    "double_backward",
    aten.native_layer_norm_backward.default,
    source="tools/autograd/derivatives.yaml: native_layer_norm_backward",
    shapes="grad_out: *n *d, input: *n *d, mean: *n 1, rstd: *n 1, weight: *d, bias: *d "
    "-> dgrad_out: *n *d, dinput: *n *d, dweight: *d",
    sample=lambda input, normalized_shape: dict(
        zip(
            ("mean", "rstd"),
            aten.native_layer_norm(input, normalized_shape, None, None, EPS)[1:],
            strict=True,
        )
    ),
)
def layer_norm_backward_derivative(
    grads: Sequence[Tensor | None],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Ints,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
    needs: Collection[str] = _NEEDS,
) -> dict[str, Tensor | None]:
    """The gradients of the arguments, by name: see `layer_norm_double_backward`."""
    if may_be_differentiated(input, *grads, grad_out, weight):
        mean, rstd = recomputed(input, rstd, outer_and_inner(input, normalized_shape)[1])
    formula = derivative("layer_norm_double_backward")
    wanted = [name in needs for name in _NEEDS]
    found = formula(input, weight, *grads, grad_out, mean, rstd, normalized_shape, wanted)
    return dict(zip(_NEEDS, found, strict=True))
