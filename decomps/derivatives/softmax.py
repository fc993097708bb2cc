"""Softmax and what is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.decomps.conventions import Result, promoted
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


@formula(
    "double_backward",
    "softmax_double_backward(Tensor? grad, Tensor grad_output, int dim, Tensor output) -> Tensor",
    source=f"{MANUAL}: softmax_double_backward",
    shapes="grad: *s, grad_output: *s, output: *s -> doutput: *s",
    results=(Result(promoted("grad", "grad_output", "output"), None),),
    zeros=("grad",),
)
def softmax_double_backward(grad: Tensor, grad_output: Tensor, dim: int, output: Tensor) -> Tensor:
    """dx = y * (g - sum_d(g * y)) differentiated in y, along v = grad:

    doutput = g * v - v * sum_d(g * y) - g * sum_d(v * y)
    """
    gy = (grad_output * output).sum(dim, keepdim=True)
    vy = (grad * output).sum(dim, keepdim=True)
    return grad_output * grad - grad * gy - grad_output * vy
