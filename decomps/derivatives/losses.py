"""Second derivatives of losses. They return what each element of the loss has: who calls reduces
the gradient as the loss is reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.manual import Gradient, manual

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten
MEAN = 1


def _reduced(grad: Tensor, input: Tensor, reduction: int) -> Tensor:
    """The gradient of each element of a loss whose mean has this one."""
    return grad / input.numel() if reduction == MEAN else grad


@manual(
    "grad: *n, input: *n -> dinput: *n",
    of=lambda input, reduction: aten.mse_loss_backward(
        input.new_ones(()), input, torch.zeros_like(input), reduction
    ),
)
def mse_loss_double_backward(grad: Gradient, input: Tensor, reduction: int) -> Tensor:
    """l = (x - y)^2:  l'' = 2"""
    return _reduced(grad * 2, input, reduction)


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
    return _reduced(grad * inside / beta, input, reduction)


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
    return _reduced(grad * ((input - target).abs() < delta), input, reduction)


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
    return _reduced(grad * (target * target * s * (1 - s)), input, reduction)
