"""Distances between rows, and slices whose norms are limited."""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.axes import all_but
from normpass.decomps.derivatives.reductions import norm_backward_dim, norm_jvp_dim
from normpass.decomps.manual import Gradient, Number, Tangent, manual


@manual(
    "grad: *b n m, x1: *b n d, x2: *b m d, res: *b n m -> dx1: *b n d, dx2: *b m d",
    of="_euclidean_dist",
)
def _euclidean_dist_backward(
    grad: Gradient, x1: Tensor, x2: Tensor, res: Tensor
) -> tuple[Tensor, Tensor]:
    """r_ij = |x_i - y_j|,  w = grad / r:  dx_i = sum_j(w_ij (x_i - y_j)),  dy_j is -sum_i of it

    zero, a subgradient, where r is
    """
    nothing = res == 0
    weight = (grad / res.masked_fill(nothing, 1)).masked_fill(nothing, 0)
    return (
        x1 * weight.sum(-1, keepdim=True) - weight @ x2,
        x2 * weight.sum(-2).unsqueeze(-1) - weight.mT @ x1,
    )


# --- slices --------------------------------------------------------------------------------------


def _limited(x: Tensor, p: float, dim: int, maxnorm: float) -> tuple[list[int], Tensor, Tensor]:
    """A slice is divided by its norm, and 1e-7, where that is above maxnorm: the axes of a slice,
    the norms, and what they are divided by.
    """
    axes = all_but(x, dim % x.dim())
    norm = torch.linalg.vector_norm(x, p, axes, keepdim=True)
    return axes, norm, norm + 1e-7


@manual("grad: d *n, self: d *n -> dself: d *n", of="renorm")
def renorm_backward(grad: Gradient, self: Tensor, p: Number, dim: int, maxnorm: Number) -> Tensor:
    """y = x c / N, where N = norm_p(x) + 1e-7 and norm_p(x) > c:
    dx = c / N (grad - Re(x^H grad) / N dnorm/dx)
    """
    axes, norm, divisor = _limited(self, p.real, dim, maxnorm.real)
    along = (self.conj() * grad).real if grad.is_complex() else self * grad
    of_norm = norm_backward_dim(
        along.sum(axes, keepdim=True) / divisor, self, p.real, norm, axes, True
    )
    return torch.where(norm > maxnorm, (grad - of_norm) * (maxnorm / divisor), grad)


@manual("self_p: d *n, self_t: d *n -> dself: d *n", of="renorm")
def renorm_jvp(self_p: Tensor, self_t: Tangent, p: Number, dim: int, maxnorm: Number) -> Tensor:
    """y = x c / N:  dy = c / N (dx - x dnorm / N)"""
    axes, norm, divisor = _limited(self_p, p.real, dim, maxnorm.real)
    along = norm_jvp_dim(self_p, self_t, p.real, norm, axes, True)
    along = along.real if along.is_complex() else along
    inside = (self_t - self_p * (along / divisor)) * (maxnorm / divisor)
    return torch.where(norm > maxnorm, inside, self_t)
