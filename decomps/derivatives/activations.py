"""Activations: first derivatives that can be differentiated again, and second ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Number, manual

aten = torch.ops.aten


def _halves(x: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    return x.narrow(dim, 0, size), x.narrow(dim, size, size)


@manual(
    "grad: *n 2d *m, grad_output: *n d *m, input: *n 2d *m -> dinput: *n 2d *m",
    of=aten.glu_backward.default,
)
def glu_double_backward(grad: Gradient, grad_output: Gradient, input: Tensor, dim: int) -> Tensor:
    """da = g * s, db = g * a * s',  s = sigmoid(b), s' = s * (1 - s), differentiated in a and b,
    along (u, v) = grad:

    a: g * v * s',  b: g * (u * s' + v * a * s''),  s'' = s' * (1 - 2 * s)
    """
    size = input.shape[dim] // 2
    a, b = _halves(input, dim, size)
    u, v = _halves(grad, dim, size)
    s = b.sigmoid()
    slope = s * (1 - s)
    first = grad_output * v * slope
    if absent(first):
        return first
    return torch.cat([first, grad_output * slope * (u + v * a * (1 - 2 * s))], dim)


@manual("grad: *n 2d *m, input: *n 2d *m -> dgrad_output: *n d *m", of=aten.glu_backward.default)
def glu_double_backward_grad_output(grad: Gradient, input: Tensor, dim: int) -> Tensor:
    """da = g * s, db = g * a * s',  s = sigmoid(b), s' = s * (1 - s), differentiated in g, along
    (u, v) = grad:

    dgrad_output = u * s + v * a * s'
    """
    size = input.shape[dim] // 2
    a, b = _halves(input, dim, size)
    u, v = _halves(grad, dim, size)
    s = b.sigmoid()
    return (u + v * a * (1 - s)) * s


def _normal_curvature(x: Tensor) -> Tensor:
    """gelu = x * cdf(x):  gelu'' = pdf * (2 - x^2),  pdf = exp(-x^2 / 2) / sqrt(2 * pi)"""
    return (-x * x / 2).exp() * (2 - x * x) / math.sqrt(2 * math.pi)


def _tanh_curvature(x: Tensor) -> Tensor:
    """gelu = x * (1 + t) / 2,  t = tanh(u),  u = b * (x + k * x^3):

    gelu'' = (1 - t^2) * (u' + x / 2 * (u'' - 2 * t * u'^2))
    """
    b, k = math.sqrt(2 / math.pi), 0.044715
    t = (b * (x + k * x * x * x)).tanh()
    u1 = b * (1 + 3 * k * x * x)
    u2 = 6 * b * k * x
    return (1 - t * t) * (u1 + x / 2 * (u2 - 2 * t * u1 * u1))


@manual(
    "ggI: *s, gO: *s, input: *s -> dinput: *s",
    of=lambda gO, input, approximate: aten.gelu_backward(gO, input, approximate=approximate),
)
def gelu_double_backward(ggI: Gradient, gO: Gradient, input: Tensor, approximate: str) -> Tensor:
    """dinput = ggI * gO * gelu''(x)"""
    curvature = _tanh_curvature if approximate == "tanh" else _normal_curvature
    return ggI * gO * curvature(input)


@manual("grad_output: *n, input: *n -> dinput: *n", of=aten.silu.default)
def infinitely_differentiable_silu_backward(grad_output: Gradient, input: Tensor) -> Tensor:
    """y = x * s,  s = sigmoid(x):  dx = grad * s * (1 + x * (1 - s))"""
    s = input.sigmoid()
    return grad_output * s * (1 + input * (1 - s))


@manual("grad: *n, input: *n -> dinput: *n", of=aten.mish.default)
def infinitely_differentiable_mish_backward(grad: Gradient, input: Tensor) -> Tensor:
    """y = x * t,  t = tanh(softplus(x)):  dx = grad * (t + x * sigmoid(x) * (1 - t^2))"""
    t = softplus(input).tanh()
    return grad * (t + input * input.sigmoid() * (1 - t * t))


@manual("grad: *n, self: *n -> dself: *n", of=aten.logit.default)
def infinitely_differentiable_logit_backward(
    grad: Gradient, self: Tensor, eps: float | None
) -> Tensor:
    """y = log(x / (1 - x)):  dx = grad / (x * (1 - x));  of x clamped: zero outside, without a
    bound NaN
    """
    low, fill = (0.0, math.nan) if eps is None else (eps, 0.0)
    inside = (self >= low) & (self <= 1 - low)
    x = torch.where(inside, self, 0.5)
    return torch.where(inside, grad / (x * (1 - x)), fill)


@manual("grad: *n, mask: *n -> dself: *n", of=lambda self, mask, p1m: self * mask / p1m)
def _fused_dropout_backward(grad: Gradient, mask: Tensor, p1m: float) -> Tensor:
    """y = x * mask / p:  dx = grad * mask / p,  p what is kept"""
    return grad * (mask / p1m)


@manual("grad: *n, mask: *n -> dinput: *n", of=lambda input, mask, scale: input * mask * scale)
def infinitely_differentiable_native_dropout_backward(
    grad: Gradient, mask: Tensor, scale: float
) -> Tensor:
    """y = x * mask / (1 - p):  dx = grad * mask * scale"""
    return grad * mask * scale


@manual(
    "ggI: *n, grad: *n, mask: *n -> dgrad: *n", of=lambda grad, mask, scale: grad * mask * scale
)
def native_dropout_double_backward(
    ggI: Gradient, grad: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """dx = grad * mask * scale, differentiated in grad along ggI:  ggI * mask * scale"""
    return ggI * mask * scale


@manual(
    "grad: *n, input: *n -> dinput: *n",
    of=lambda input, beta, threshold: aten.softplus_backward(
        torch.ones_like(input), input, beta, threshold
    ),
)
def softplus_double_backward(
    grad: Gradient, input: Tensor, beta: Number, threshold: Number
) -> Tensor:
    """softplus' = sigmoid(beta * x):  softplus'' = beta * s * (1 - s);  zero above the threshold"""
    x = input * beta
    s = x.sigmoid()
    return grad * (beta * s * (1 - s)).masked_fill(x > threshold, 0)


@manual("grad: *n, input: *n -> dinput: *n", of=lambda input: 1 - input.sigmoid())
def log_sigmoid_double_backward(grad: Gradient, input: Tensor) -> Tensor:
    """(log s)' = 1 - s:  (log s)'' = -s * (1 - s)"""
    s = input.sigmoid()
    return grad * (s * (s - 1))


@manual(
    "grad: *n, grad_output: *n, self_or_result: *n -> dself_or_result: *n",
    of=aten.elu_backward.default,
)
def elu_double_backward(
    grad: Gradient,
    grad_output: Gradient,
    alpha: Number,
    scale: Number,
    input_scale: Number,
    is_result: bool,
    self_or_result: Tensor,
) -> Tensor:
    """below zero y = scale * a * (exp(c * x) - 1),  y' = scale * a * c * exp(c * x) = c * (y +
    scale * a), differentiated in what is given, x or y, along grad; above zero y' is constant
    """
    a, b, c = self_or_result, scale * alpha, input_scale
    slope = c if is_result else b * c * c * (a.clamp(max=0) * c).exp()
    product = grad * grad_output * slope
    return product if absent(product) else torch.where(a <= 0, product, 0)
