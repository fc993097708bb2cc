"""Binary cross entropies, of probabilities and of logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from normpass.decomps.conventions import absent
from normpass.decomps.derivatives.losses import reduced
from normpass.decomps.manual import Gradient, Weight, manual

aten = torch.ops.aten

# What the operators have for log(0), and for x * (1 - x) where that is less.
LOG_OF_ZERO = -100.0
LEAST = 1e-12


def _log(x: Tensor) -> Tensor:
    """log(x), nowhere below that of zero: there it is a constant"""
    small = x <= math.exp(LOG_OF_ZERO)
    return x.masked_fill(small, 1).log().masked_fill(small, LOG_OF_ZERO)


def _variance(x: Tensor) -> Tensor:
    """x * (1 - x), nowhere below the least: there it is a constant"""
    variance = x * (1 - x)
    return variance.masked_fill(variance < LEAST, LEAST)


def _weighed(grad: Tensor, weight: Weight, reduction: int) -> Tensor:
    """The gradient along each element of a loss, from that of one without weights or a mean."""
    weighed = grad * weight
    return weighed if absent(weighed) else reduced(weighed, weighed, reduction)


# --- of probabilities ---------------------------------------------------------------------------


@manual(
    "grad: , self: *n, target: *n, weight: *n -> dtarget: *n",
    sample=lambda self, target: {"self": self.sigmoid(), "target": target.sigmoid()},
    of=aten.binary_cross_entropy.default,
)
def binary_cross_entropy_target_backward(
    grad: Gradient, self: Tensor, target: Tensor, weight: Weight, reduction: int
) -> Tensor:
    """l = -y * log(x) - (1 - y) * log(1 - x):  dl / dy = log(1 - x) - log(x)"""
    return _weighed(grad * (_log(1 - self) - _log(self)), weight, reduction)


@manual(
    "grad_output: , grad: *n, input: *n, target: *n, weight: *n -> dinput: *n",
    sample=lambda input: {"input": input.sigmoid()},
    of=aten.binary_cross_entropy_backward.default,
)
def binary_cross_entropy_double_backward(
    grad_output: Gradient,
    grad: Gradient,
    input: Tensor,
    target: Tensor,
    weight: Weight,
    reduction: int,
) -> Tensor:
    """l' = (x - y) / v,  v = x * (1 - x):  l'' = (x^2 - 2 * x * y + y) / v^2"""
    slope = (input * input - 2 * input * target + target) / _variance(input).square()
    return _weighed(grad * grad_output * slope, weight, reduction)


@manual(
    "grad: *n, grad_output: , self: *n, target: *n, weight: *n -> dtarget: *n",
    sample=lambda self: {"self": self.sigmoid()},
    of=aten.binary_cross_entropy_backward.default,
)
def binary_cross_entropy_double_backward_target(
    grad: Gradient,
    grad_output: Gradient,
    self: Tensor,
    target: Tensor,
    weight: Weight,
    reduction: int,
) -> Tensor:
    """l' = (x - y) / v,  v = x * (1 - x):  dl' / dy = -1 / v"""
    return _weighed(-grad * grad_output / _variance(self), weight, reduction)


@manual(
    "grad: *n, input: *n, target: *n, weight: *n -> dgrad_output: *n",
    sample=lambda input: {"input": input.sigmoid()},
    of=aten.binary_cross_entropy_backward.default,
)
def binary_cross_entropy_double_backward_grad_output(
    grad: Gradient, input: Tensor, target: Tensor, weight: Weight, reduction: int
) -> Tensor:
    """dx = g * l',  l' = (x - y) / v,  v = x * (1 - x):  dg = grad * l' of each element"""
    return _weighed(grad * ((input - target) / _variance(input)), weight, reduction)


# --- of logits ----------------------------------------------------------------------------------


@manual(
    "grad: , input: *n, target: *n, weight: *n, pos_weight: *n -> dinput: *n",
    of=aten.binary_cross_entropy_with_logits.default,
)
def binary_cross_entropy_with_logits_backward(
    grad: Gradient,
    input: Tensor,
    target: Tensor,
    weight: Weight,
    pos_weight: Tensor | None,
    reduction: int,
) -> Tensor:
    """l = -p * y * log(s) - (1 - y) * log(1 - s),  s = sigmoid(x):

    dl / dx = (p * y + 1 - y) * s - p * y
    """
    positive = target if pos_weight is None else target * pos_weight
    slope = (positive + 1 - target) * input.sigmoid() - positive
    return _weighed(grad * slope, weight, reduction)


@manual(
    "grad_output: , self: *n, target: *n, weight: *n, pos_weight: *n -> dtarget: *n",
    of=aten.binary_cross_entropy_with_logits.default,
)
def binary_cross_entropy_with_logits_target_backward(
    grad_output: Gradient,
    self: Tensor,
    target: Tensor,
    weight: Weight,
    pos_weight: Tensor | None,
    reduction: int,
) -> Tensor:
    """l = -p * y * log(s) - (1 - y) * log(1 - s),  s = sigmoid(x):

    dl / dy = log(1 - s) - p * log(s);  -x for p = 1
    """
    slope = -self if pos_weight is None else logsigmoid(-self) - pos_weight * logsigmoid(self)
    return _weighed(grad_output * slope, weight, reduction)
