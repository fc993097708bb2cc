"""Softmax and what is made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.axes import put_back, reduced
from normpass.decomps.conventions import promoted
from normpass.decomps.manual import Dims, Gradient, Ints, Tangent, manual

aten = torch.ops.aten


@manual(
    "grad: *s, grad_output: *s, output: *s -> doutput: *s",
    dtype=promoted("grad", "grad_output", "output"),
    of=lambda grad_output, output, dim: (
        output * (grad_output - (grad_output * output).sum(dim, keepdim=True))
    ),
)
def softmax_double_backward(
    grad: Gradient, grad_output: Tensor, dim: int, output: Tensor
) -> Tensor:
    """dx = y * (g - sum_d(g * y)) differentiated in y, along v = grad:

    doutput = g * v - v * sum_d(g * y) - g * sum_d(v * y)
    """
    gy = (grad_output * output).sum(dim, keepdim=True)
    vy = (grad * output).sum(dim, keepdim=True)
    return grad_output * grad - grad * gy - grad_output * vy


@manual(
    "grad: *n, self: *n *d, result: *n -> dself: *n *d",
    sample=lambda self, dim, keepdim: {"result": self.logsumexp(dim, keepdim)},
    of=aten.logsumexp.default,
)
def logsumexp_backward(
    grad: Gradient, self: Tensor, result: Tensor, dim: Dims, keepdim: bool
) -> Tensor:
    """y = log(sum_d(exp(x))):  dself = grad * conj(exp(x - y))"""
    if not keepdim:
        axes = reduced(self, dim)
        grad, result = put_back(grad, axes), put_back(result, axes)
    return grad * (self - result).exp().conj()


@manual("self_p: *n *d, self_t: *n *d -> y_t: *n", of=aten.logsumexp.default)
def logsumexp_jvp(self_p: Tensor, self_t: Tangent, dim: Dims, keepdim: bool) -> Tensor:
    """y = log(sum_d(exp(x))):  y_t = sum_d(exp(x - y) * x_t)"""
    axes = reduced(self_p, dim)
    weights = (self_p - self_p.logsumexp(axes, keepdim=True)).exp()
    return (weights * self_t).sum(axes, keepdim=keepdim)


@manual("self_p: *n d, self_t: *n d -> y_t: *n 1", of="_safe_softmax")
def safe_logsumexp_jvp(self_p: Tensor, self_t: Tangent, dim: Ints, keepdim: bool) -> Tensor:
    """y = log(sum_d(exp(x))):  y_t = sum_d(exp(x - y) * x_t), zero where all x are -inf"""
    nothing = (self_p == -torch.inf).all(reduced(self_p, dim), keepdim=True)
    x, t = (v.masked_fill(nothing, 0) for v in (self_p, self_t))
    return logsumexp_jvp(x, t, dim, keepdim)
