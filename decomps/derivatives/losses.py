"""Second derivatives of losses. They return what each element of the loss has: who calls reduces
the gradient as the loss is reduced.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from normpass.decomps.manual import Gradient, manual

aten = torch.ops.aten
NONE, MEAN = 0, 1


def reduced(grad: Tensor, input: Tensor, reduction: int) -> Tensor:
    """The gradient of each element of a loss whose mean has this one."""
    return grad / input.numel() if reduction == MEAN else grad


def summed(grad: Tensor, reduction: int) -> Tensor:
    """The gradient of what all elements were multiplied with, where the loss is one number."""
    return grad if reduction == NONE else grad.sum()


@manual(
    "grad: *n, input: *n -> dinput: *n",
    of=lambda input, reduction: aten.mse_loss_backward(
        input.new_ones(()), input, torch.zeros_like(input), reduction
    ),
)
def mse_loss_double_backward(grad: Gradient, input: Tensor, reduction: int) -> Tensor:
    """l = (x - y)^2:  l'' = 2"""
    return reduced(grad * 2, input, reduction)


@manual(
    "grad: *n, input: *n, target: *n -> dinput: *n",
    of=lambda input, target, reduction, beta: aten.smooth_l1_loss_backward(
        input.new_ones(()), input, target, reduction, beta
    ),
)
def smooth_l1_loss_double_backward(
    grad: Gradient, input: Tensor, target: Tensor, reduction: int, beta: float
) -> Tensor:
    """l = (x - y)^2 / (2 * beta), |x - y| beyond beta:  l'' = 1 / beta, 0 beyond"""
    if beta == 0:
        return grad * 0
    inside = (input - target).abs() < beta
    return reduced(grad * inside / beta, input, reduction)


@manual(
    "grad: *n, input: *n, target: *n -> dinput: *n",
    of=lambda input, target, reduction, delta: aten.huber_loss_backward(
        input.new_ones(()), input, target, reduction, delta
    ),
)
def huber_loss_double_backward(
    grad: Gradient, input: Tensor, target: Tensor, reduction: int, delta: float
) -> Tensor:
    """l = (x - y)^2 / 2, delta * |x - y| beyond delta:  l'' = 1, 0 beyond"""
    return reduced(grad * ((input - target).abs() < delta), input, reduction)


@manual(
    "grad: *n, grad_output: , input: *n, target: *n -> dgrad_output: ",
    of=aten.huber_loss_backward.default,
)
def huber_loss_double_backward_grad_output(
    grad: Gradient, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int, delta: float
) -> Tensor:
    """dx = g * l',  l' = x - y, of |x - y| < delta, else delta * sgn(x - y):  dg = grad * l'"""
    away = input - target
    slope = torch.where(away.abs() < delta, away, delta * away.sign())
    return summed(reduced(grad * slope, input, reduction), reduction)


@manual(
    "grad: *n, input: *n, target: *n -> dinput: *n",
    of=lambda input, target, reduction: aten.soft_margin_loss_backward(
        input.new_ones(()), input, target, reduction
    ),
)
def soft_margin_loss_double_backward(
    grad: Gradient, input: Tensor, target: Tensor, reduction: int
) -> Tensor:
    """l = log(1 + exp(-x * y)):  l'' = y^2 * s * (1 - s),  s = sigmoid(-x * y)"""
    s = (-input * target).sigmoid()
    return reduced(grad * (target * target * s * (1 - s)), input, reduction)


@manual(
    "grad: *n, grad_output: , input: *n, target: *n -> dgrad_output: ",
    of=aten.soft_margin_loss_backward.default,
)
def soft_margin_loss_double_backward_grad_output(
    grad: Gradient, grad_output: Tensor, input: Tensor, target: Tensor, reduction: int
) -> Tensor:
    """dx = g * l',  l' = -y * s,  s = sigmoid(-x * y):  dg = grad * l'"""
    slope = -target * (-input * target).sigmoid()
    return summed(reduced(grad * slope, input, reduction), reduction)


# --- connectionist temporal classification ------------------------------------------------------


# Of a loss that is linear, and zero in one example.
_ctc = partial(
    manual,
    "grad_out: n, loss: n, raw_grad: m n c -> dlog_probs: m n c",
    sample=lambda loss: {"loss": loss * (torch.arange(len(loss)) > 0)},
    of=lambda log_probs, loss, raw_grad, zero_infinity: (
        (log_probs * raw_grad).sum((0, 2)) * ((loss != 0) if zero_infinity else 1)
    ),
    compared=("loss",),
)


@_ctc(name="_miopen_ctc_loss_backward")
@_ctc(name="_cudnn_ctc_loss_backward")
def _ctc_loss_backward(
    grad_out: Gradient, loss: Tensor, raw_grad: Tensor, zero_infinity: bool
) -> Tensor:
    """dlog_probs = grad * what the kernel saved;  zero for an example whose loss was made zero"""
    if zero_infinity:
        raw_grad = raw_grad.masked_fill((loss == 0).unsqueeze(-1), 0)
    return grad_out.unsqueeze(-1) * raw_grad
