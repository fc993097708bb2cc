"""Angle and size of complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.conventions import real
from normpass.decomps.manual import Gradient, manual

aten = torch.ops.aten


@manual("grad: *n, self: *n -> dself: *n", of="angle")
def angle_backward(grad: Gradient, self: Tensor) -> Tensor:
    """y = Im(log(z)):  dz = i * grad / conj(z);  zero at zero, and for real numbers"""
    if not self.is_complex():
        return torch.zeros_like(self)
    nothing = self == 0
    return grad * (1j / self.conj().masked_fill(nothing, 1)).masked_fill(nothing, 0)


@manual("x: *n, gx: *n, sgn: *n -> dx: *n", sample=lambda x: {"sgn": x.sgn()}, of=aten.sgn.default)
def sgn_backward(x: Tensor, gx: Gradient, sgn: Tensor) -> Tensor:
    """s = z / |z|:  dz = (grad - s^2 * conj(grad)) / (2 * |z|);  zero at zero, and for real numbers

    Jacobian and its transpose are the same, so that it is the tangent's formula too.
    """
    if not x.is_complex():
        return torch.zeros_like(sgn)
    size = x.abs()
    nothing = size == 0
    across = gx - sgn * sgn * gx.conj()
    return (across / (2 * size.masked_fill(nothing, 1))).masked_fill(nothing, 0)


@manual(
    "grad: *n, result: *n -> dabs: *n, dangle: *n",
    dtype=real("grad"),
    sample=lambda abs, angle: {"abs": abs.abs(), "result": torch.polar(abs.abs(), angle)},
    of=aten.polar.default,
    why="right for abs > 0 alone: of other numbers the result does not tell the angle",
)
def polar_backward(grad: Gradient, result: Tensor) -> tuple[Tensor, Tensor]:
    """y = r * exp(i * t):  dr = Re(grad * conj(y / |y|)),  dt = Im(grad * conj(y))"""
    u = result.sgn()
    of_abs = grad.real * u.real + grad.imag * u.imag
    return of_abs, grad.imag * result.real - grad.real * result.imag
