"""Elementwise functions of two tensors and more. A gradient has the shape that broadcasting gives
the operands; who calls sums it to the shape of each (decomps/table/binding.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.conventions import Arguments, absent
from normpass.decomps.manual import Gradient, Mask, Number, Tangent, manual
from normpass.decomps.neutral import ZERO

aten = torch.ops.aten


def _real_where_the_operand_is(given: Arguments) -> torch.dtype | None:
    grad, dtype = given["grad"], given["self_st"]
    if grad is None:
        return None
    return grad.dtype.to_real() if grad.is_complex() and not dtype.is_complex else grad.dtype


@manual(
    "grad: *n, other: *n -> dself: *n",
    dtype=_real_where_the_operand_is,
    sample=lambda other: {"self_st": other.dtype},
    of=aten.mul.Tensor,
)
def mul_tensor_backward(grad: Gradient, other: Tensor, self_st: torch.dtype) -> Tensor:
    """y = x * w:  dx = grad * conj(w)"""
    return grad * other.conj()


@manual(
    "grad: *n, other: *n -> dself: *n",
    dtype=_real_where_the_operand_is,
    sample=lambda other: {"self_st": other.dtype},
    of=aten.div.Tensor,
)
def div_tensor_self_backward(
    grad: Gradient, other: Tensor, self_st: torch.dtype, rounding_mode: str | None = None
) -> Tensor:
    """y = x / w:  dx = grad / conj(w);  zero where the quotient is rounded"""
    return grad / other.conj() if rounding_mode is None else grad * 0


@manual("grad: *n, self: *n, other: *n -> dother: *n", of=aten.div.Tensor)
def div_tensor_other_backward(
    grad: Gradient, self: Tensor, other: Tensor, rounding_mode: str | None = None
) -> Tensor:
    """y = x / w:  dw = -grad * conj(x / w / w);  zero where the quotient is rounded"""
    return -grad * (self / other / other).conj() if rounding_mode is None else grad * 0


@manual(
    "grad: *n, self: *n -> dself: *n",
    sample=lambda self: {"self": self.abs() + 0.5},
    of=lambda self, exponent: self**exponent,
)
def pow_backward(grad: Gradient, self: Tensor, exponent: Number) -> Tensor:
    """y = x^a:  dx = grad * conj(a * x^(a - 1));  zero for a = 0, at x = 0 too"""
    if exponent == 0:
        return torch.zeros_like(self)
    return grad * (exponent * self.pow(exponent - 1)).conj()


@manual(
    "grad: *n, self: *n, exponent: *n -> dself: *n",
    sample=lambda exponent: {"self": exponent.abs() + 0.5},
    of=lambda self, exponent: self**exponent,
)
def pow_backward_self(grad: Gradient, self: Tensor, exponent: Tensor) -> Tensor:
    """y = x^a:  dx = grad * conj(a * x^(a - 1));  zero for a = 0, at x = 0 too"""
    slope = (exponent * self.pow(exponent - 1)).conj()
    return grad * slope.masked_fill(exponent == 0, 0)


@manual(
    "grad: *n, self: *n, exponent: *n, result: *n -> dexponent: *n",
    sample=lambda exponent: {
        "self": exponent.abs() + 0.5,
        "result": (exponent.abs() + 0.5) ** exponent,
    },
    of=lambda self, exponent: self**exponent,
)
def pow_backward_exponent(grad: Gradient, self: Tensor, exponent: Tensor, result: Tensor) -> Tensor:
    """y = x^a:  da = grad * conj(y * log(x));  zero for x = 0 where a >= 0: y does not change"""
    real = exponent.real if exponent.is_complex() else exponent
    constant = (self == 0) & (real >= 0)
    slope = result * self.masked_fill(constant, 1).log()
    return grad * slope.conj()


@manual("grad: *n, self: *n, other: *n -> dself: *n, dother: *n", of=aten.atan2.default)
def atan2_backward(
    grad: Gradient, self: Tensor, other: Tensor, output_mask: Mask
) -> tuple[Tensor, Tensor]:
    """y = atan2(a, b):  da = grad * b / (a^2 + b^2),  db = -grad * a / (a^2 + b^2)

    zero at the origin
    """
    square = self * self + other * other
    nothing = square == 0
    scaled = (grad / square.masked_fill(nothing, 1)).masked_fill(nothing, 0)
    return scaled * other, -scaled * self


@manual(
    "grad: *n, self: *n, result: *n -> dself: *n",
    sample=lambda self: {"result": -self.abs()},
    of=lambda self: self.copysign(-1),
)
def copysign_tensor_self_backward(grad: Gradient, self: Tensor, result: Tensor) -> Tensor:
    """y = |x| * sgn(w):  dx = grad * y / x;  zero at x = 0"""
    nothing = self == 0
    return grad * (result / self.masked_fill(nothing, 1)).masked_fill(nothing, 0)


# --- clamp ---------------------------------------------------------------------------------------


@manual(
    "grad: *n, self: *n, min: *n, max: *n -> dself: *n",
    name="clamp_backward.Tensor",
    of="clamp.Tensor",
)
def clamp_backward_Tensor(
    grad: Gradient, self: Tensor, min: Tensor | None, max: Tensor | None
) -> Tensor:
    """y = min(max(x, a), b):  dx = grad, where a <= x <= b"""
    inside = torch.ones_like(self, dtype=torch.bool)
    if min is not None:
        inside = inside & (self >= min)
    if max is not None:
        inside = inside & (self <= max)
    return torch.where(inside, grad, 0)


@manual("grad: *n, self: *n, min: *n, max: *n -> dmin: *n, dmax: *n", of=aten.clamp.Tensor)
def clamp_backward_min_max(
    grad: Gradient, self: Tensor, min: Tensor | None, max: Tensor | None, grad_input_mask: Mask
) -> tuple[Tensor, Tensor]:
    """y = min(max(x, a), b):  da = grad, where x < a < b;  db = grad, where b < x or b < a"""
    below = None if min is None else self < min
    above = None if max is None else self > max
    if min is not None and max is not None:
        below, above = (min < max) & (self < min), (self > max) | (max < min)
    return (
        ZERO if below is None else torch.where(below, grad, 0),
        ZERO if above is None else torch.where(above, grad, 0),
    )


@manual(
    "self_p: *n, self_t: *n, min_p: *n, min_t: *n, max_p: *n, max_t: *n -> result_t: *n",
    of="clamp.Tensor",
)
def clamp_jvp(
    self_p: Tensor,
    self_t: Tangent,
    min_p: Tensor | None,
    min_t: Tangent,
    max_p: Tensor | None,
    max_t: Tangent,
) -> Tensor:
    """y = min(max(x, a), b):  dy is the tangent of whichever of x, a and b the result is"""
    result = torch.zeros_like(self_p) if absent(self_t) else self_t
    if min_p is not None:
        result = torch.where(self_p < min_p, 0 if absent(min_t) else min_t, result)
    if max_p is not None:
        above = self_p > max_p
        if min_p is not None:
            above = above | (min_p > max_p)
        result = torch.where(above, 0 if absent(max_t) else max_t, result)
    return result
