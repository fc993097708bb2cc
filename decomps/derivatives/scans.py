"""Cumulative sums and products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.conventions import Result, absent, like
from normpass.decomps.manual import Gradient, manual
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from torch import Tensor

# Not among the formulas of FunctionsManual.cpp: an operator of its own.
SOURCE = "aten/src/ATen/native/ReduceOps.cpp"


def products_before(x: Tensor, dim: int) -> Tensor:
    """The products of all that comes before each element along dim; of nothing it is one."""
    size = list(x.shape)
    size[dim] = 1
    return torch.cat([x.new_ones(size), x], dim).cumprod(dim).narrow(dim, 0, x.shape[dim])


@formula(
    "vjp",
    "cumprod_backward(Tensor? grad, Tensor input, int dim, Tensor output) -> Tensor",
    source=f"{SOURCE}: cumprod_backward",
    shapes="grad: *n d, input: *n d, output: *n d -> dinput: *n d",
    results=(Result(like("input"), None),),
    zeros=("grad",),
    sample=lambda input, dim: {"output": input.cumprod(dim)},
    of=lambda input, dim: input.cumprod(dim),
    why="d * d products for a row of d: with a division it would be d of them, but wrong at zeros, "
    "and the ways around them either ask for the values or are wrong to second order",
)
def cumprod_backward(grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """y_i = prod_{j <= i}(x_j):

    dinput_k = sum_{i >= k}(grad_i * conj(prod over j <= i other than k of x_j))
    """
    if input.dim() == 0:
        return grad * torch.ones_like(input)
    x, g = input.movedim(dim, -1).unsqueeze(-2), grad.movedim(dim, -1)
    i = torch.arange(x.shape[-1], device=x.device)
    k = i.unsqueeze(-1)
    # x: *n 1 d -> *n k i
    others = torch.where(i == k, 1, x).cumprod(-1)
    slope = torch.where(i >= k, others, 0).conj()
    return (g.unsqueeze(-2) * slope).sum(-1).movedim(-1, dim)


@manual("grad: *n d -> dself: *n d", of=lambda self, dim: self.cumsum(dim))
def cumsum_backward(grad: Gradient, dim: int) -> Tensor:
    """y_i = sum_{j <= i}(x_j):  dx_j = sum_{i >= j}(grad_i)"""
    if absent(grad) or grad.dim() == 0 or grad.numel() <= 1:
        return grad
    return grad.flip(dim).cumsum(dim).flip(dim)
