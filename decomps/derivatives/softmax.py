"""Softmax and what is made of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from normpass.decomps.axes import put_back, reduced
from normpass.decomps.conventions import Result, like, promoted
from normpass.decomps.manual import Tangent, manual
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


@formula(
    "double_backward",
    "softmax_double_backward(Tensor? grad, Tensor grad_output, int dim, Tensor output) -> Tensor",
    source=f"{MANUAL}: softmax_double_backward",
    shapes="grad: *s, grad_output: *s, output: *s -> doutput: *s",
    results=(Result(promoted("grad", "grad_output", "output"), None),),
    zeros=("grad",),
    of=lambda grad_output, output, dim: (
        output * (grad_output - (grad_output * output).sum(dim, keepdim=True))
    ),
)
def softmax_double_backward(grad: Tensor, grad_output: Tensor, dim: int, output: Tensor) -> Tensor:
    """dx = y * (g - sum_d(g * y)) differentiated in y, along v = grad:

    doutput = g * v - v * sum_d(g * y) - g * sum_d(v * y)
    """
    gy = (grad_output * output).sum(dim, keepdim=True)
    vy = (grad * output).sum(dim, keepdim=True)
    return grad_output * grad - grad * gy - grad_output * vy


@formula(
    "vjp",
    "logsumexp_backward(Tensor? grad, Tensor self, Tensor result, int[1] dim, bool keepdim) "
    "-> Tensor",
    source=f"{MANUAL}: logsumexp_backward",
    shapes="grad: *n, self: *n *d, result: *n -> dself: *n *d",
    results=(Result(like("self"), None),),
    zeros=("grad",),
    sample=lambda self, dim, keepdim: {"result": self.logsumexp(dim, keepdim)},
    of=lambda self, dim, keepdim: self.logsumexp(dim, keepdim),
)
def logsumexp_backward(
    grad: Tensor, self: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool
) -> Tensor:
    """y = log(sum_d(exp(x))):  dself = grad * conj(exp(x - y))"""
    if not keepdim:
        axes = reduced(self, dim)
        grad, result = put_back(grad, axes), put_back(result, axes)
    return grad * (self - result).exp().conj()


@formula(
    "jvp",
    "logsumexp_jvp(Tensor self_p, Tensor? self_t, int[1] dim, bool keepdim) -> Tensor",
    source=f"{MANUAL}: logsumexp_jvp",
    shapes="self_p: *n *d, self_t: *n *d -> y_t: *n",
    results=(Result(like("self_p"), None),),
    zeros=("self_t",),
    of=lambda self_p, dim, keepdim: self_p.logsumexp(dim, keepdim),
)
def logsumexp_jvp(self_p: Tensor, self_t: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """y = log(sum_d(exp(x))):  y_t = sum_d(exp(x - y) * x_t)"""
    axes = reduced(self_p, dim)
    weights = (self_p - self_p.logsumexp(axes, keepdim=True)).exp()
    return (weights * self_t).sum(axes, keepdim=keepdim)


@manual("self_p: *n d, self_t: *n d -> y_t: *n 1", of="_safe_softmax")
def safe_logsumexp_jvp(
    self_p: Tensor, self_t: Tangent, dim: Sequence[int], keepdim: bool
) -> Tensor:
    """y = log(sum_d(exp(x))):  y_t = sum_d(exp(x - y) * x_t), zero where all x are -inf"""
    nothing = (self_p == -math.inf).all(reduced(self_p, dim), keepdim=True)
    x, t = (v.masked_fill(nothing, 0) for v in (self_p, self_t))
    return logsumexp_jvp(x, t, dim, keepdim)
