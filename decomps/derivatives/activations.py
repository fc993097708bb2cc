"""Second derivatives of activations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from normpass.decomps.conventions import Result, absent, like
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"

_INPUT = (Result(like("input"), None),)


def _halves(x: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    return x.narrow(dim, 0, size), x.narrow(dim, size, size)


@formula(
    "double_backward",
    "glu_double_backward(Tensor? grad, Tensor? grad_output, Tensor input, int dim) -> Tensor",
    source=f"{MANUAL}: glu_double_backward",
    shapes="grad: *n 2d *m, grad_output: *n d *m, input: *n 2d *m -> dinput: *n 2d *m",
    results=_INPUT,
    zeros=("grad", "grad_output"),
    of=lambda grad_output, input, dim: aten.glu_backward(grad_output, input, dim),
)
def glu_double_backward(grad: Tensor, grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
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


@formula(
    "double_backward",
    "glu_double_backward_grad_output(Tensor? grad, Tensor input, int dim) -> Tensor",
    source=f"{MANUAL}: glu_double_backward_grad_output",
    shapes="grad: *n 2d *m, input: *n 2d *m -> dgrad_output: *n d *m",
    results=_INPUT,
    zeros=("grad",),
    of=lambda grad_output, input, dim: aten.glu_backward(grad_output, input, dim),
)
def glu_double_backward_grad_output(grad: Tensor, input: Tensor, dim: int) -> Tensor:
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


@formula(
    "double_backward",
    "gelu_double_backward(Tensor? ggI, Tensor? gO, Tensor input, str approximate) -> Tensor",
    source=f"{MANUAL}: gelu_double_backward",
    shapes="ggI: *s, gO: *s, input: *s -> dinput: *s",
    results=_INPUT,
    zeros=("ggI", "gO"),
    of=lambda gO, input, approximate: aten.gelu_backward(gO, input, approximate=approximate),
)
def gelu_double_backward(ggI: Tensor, gO: Tensor, input: Tensor, approximate: str) -> Tensor:
    """dinput = ggI * gO * gelu''(x)"""
    curvature = _tanh_curvature if approximate == "tanh" else _normal_curvature
    return ggI * gO * curvature(input)
