"""Elementwise functions: the slope of each, from which its vjp and its jvp come.

The rows are what derivatives.yaml says; decomps/slopes.py says what a row may ask for. At kinks and
bounds, at infinity and for NaN the rows do what PyTorch's formulas and scalar kernels do: so
`~(y <= 0)`, not `y > 0`, where NaN passes the gradient on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import special

from normpass.decomps.registry import slopes
from normpass.decomps.torch_versions import BESSEL_HAS_DERIVATIVES, CLAMP_PASSES_AT_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Number = int | float | complex
    Slopes = dict[str, Callable[..., Any]]

LN2 = math.log(2)
LN10 = math.log(10)
SQRT_PI = math.sqrt(math.pi)
SQRT_2PI = math.sqrt(2 * math.pi)


# --- powers and products ------------------------------------------------------------------------


def _pow(x: Tensor, exponent: Number) -> Any:
    """x^a:  a * x^(a - 1);  zero for a = 0, at x = 0 too"""
    return 0 if exponent == 0 else exponent * x.pow(exponent - 1)


def _pow_of_exponent(x: Tensor, y: Tensor, self: Number) -> Tensor:
    """b^x:  y * log(b);  zero for b = 0 where x >= 0, as there y does not change"""
    log = y.new_full((), self).log()
    if self != 0:
        return y * log
    constant = (x.real >= 0) & (x.imag == 0) if x.is_complex() else x >= 0
    # Of x replaced: what is infinite there has NaN for the next derivative, which is masked so.
    away = torch.where(constant, -1, x)
    return torch.where(constant, 0, torch.pow(self, away) * log)


def _xlogy_of_x(g: Tensor, x: Tensor, other: float) -> Tensor:
    """x * log(c):  log(c);  zero along x = 0 where log(c) is not finite, and for g = 0"""
    product = torch.xlogy(g, other)
    return product if other > 0 else product.masked_fill(x == 0, 0)


def _xlog1py_of_x(g: Tensor, x: Tensor, other: float) -> Tensor:
    """x * log(1 + c): as x * log(c)"""
    product = special.xlog1py(g, other)
    return product if other > -1 else product.masked_fill(x == 0, 0)


# --- trigonometric ------------------------------------------------------------------------------


def _acosh(x: Tensor) -> Tensor:
    """1 / sqrt(x^2 - 1);  in the complex plane 1 / (sqrt(x + 1) * sqrt(x - 1)), by its branch"""
    return (x + 1).rsqrt() * (x - 1).rsqrt() if x.is_complex() else (x * x - 1).rsqrt()


def _sinc(g: Tensor, x: Tensor) -> Tensor:
    """sin(t) / t,  t = pi * x:  pi * (cos(t) - sin(t) / t) / t

    and near zero, where the difference cancels and at zero is 0 / 0, its series

        pi * sum_k (-1)^k * 2k * t^(2k - 1) / (2k + 1)!

    so that the derivatives of the slope are right too. An infinite g at zero gives zero.
    """
    t = math.pi * x
    near = t.abs() < 0.5
    square, series = t * t, torch.zeros_like(t)
    for k in range(8, 0, -1):
        series = series * square + (-1) ** k * 2 * k / math.factorial(2 * k + 1)
    far = torch.where(near, 1, t)
    slope = math.pi * torch.where(near, series * t, (far.cos() - far.sin() / far) / far)
    # isfinite has no batching rule for a conjugate, which is a view.
    is_finite = g.abs() < math.inf
    return torch.where((square == 0) & ~is_finite, 0, g * slope)


# --- special functions --------------------------------------------------------------------------


def _away_from_zero(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where |x| > eps or NaN, and x with the rest replaced, so that nothing divides by zero."""
    away = ~(x.abs() <= torch.finfo(x.dtype).eps)
    return away, torch.where(away, x, 1)


def _bessel(x: Tensor, far: Callable[[Tensor], Tensor], even: Callable[[int], float]) -> Tensor:
    """far(x), and near zero sum_k even(k) * (x / 2)^(2k) / (k! * (k + 1)!), whose derivatives are
    right at zero too: those of far divide by x.
    """
    near = x.abs() < 0.5
    square, series = x * x / 4, torch.zeros_like(x)
    for k in range(8, -1, -1):
        series = series * square + even(k) / (math.factorial(k) * math.factorial(k + 1))
    return torch.where(near, series, far(torch.where(near, 1, x)))


def _i0(x: Tensor) -> Tensor:
    """i1(x);  near zero x / 2 * sum_k (x / 2)^(2k) / (k! * (k + 1)!)"""
    near = x.abs() < 0.5
    return torch.where(near, x, 1) * _bessel(x, special.i1, lambda k: 0.5)


def _i1(x: Tensor) -> Tensor:
    """i0(x) - i1(x) / x;  near zero sum_k (k + 1/2) * (x / 2)^(2k) / (k! * (k + 1)!)"""
    return _bessel(x, lambda z: special.i0(z) - special.i1(z) / z, lambda k: k + 0.5)


def _j0(x: Tensor) -> Tensor:
    """-j1(x);  near zero -x / 2 * sum_k (-1)^k * (x / 2)^(2k) / (k! * (k + 1)!)"""
    near = x.abs() < 0.5
    return -torch.where(near, x, 1) * _bessel(x, special.bessel_j1, lambda k: 0.5 * (-1) ** k)


def _j1(x: Tensor) -> Tensor:
    """j0(x) - j1(x) / x;  near zero sum_k (-1)^k * (k + 1/2) * (x / 2)^(2k) / (k! * (k + 1)!)"""
    return _bessel(
        x,
        lambda z: special.bessel_j0(z) - special.bessel_j1(z) / z,
        lambda k: (k + 0.5) * (-1) ** k,
    )


def _y1(x: Tensor) -> Tensor:
    """y0(x) - y1(x) / x;  infinite at zero, where both terms are"""
    return torch.where(x == 0, torch.inf, special.bessel_y0(x) - special.bessel_y1(x) / x)


def _i1e(x: Tensor) -> Tensor:
    """i0e(x) - i1e(x) * (sgn(x) + 1 / x);  1/2 at zero"""
    away, z = _away_from_zero(x)
    return torch.where(away, special.i0e(z) - special.i1e(z) * (z.sgn() + 1 / z), 0.5)


def _log_ndtr(x: Tensor) -> Tensor:
    """log(P(x)):  P'(x) / P(x) = exp(-x^2 / 2 - log(P(x))) / sqrt(2 pi)"""
    return (-(special.log_ndtr(x) + x * x / 2)).exp() / SQRT_2PI


def _mvlgamma(x: Tensor, p: int) -> Tensor:
    """sum_i lgamma(x + i / 2) + const,  i = 1 - p .. 0:  sum_i digamma(x + i / 2)"""
    i = torch.arange(1 - p, 1, dtype=x.dtype, device=x.device)
    return (x.unsqueeze(-1) + i / 2).digamma().sum(-1)


def _logit(g: Tensor, x: Tensor, eps: float | None) -> Tensor:
    """log(z / (1 - z)),  z = clamp(x, eps, 1 - eps):  1 / (x * (1 - x));  zero where z is clamped

    Without eps it is NaN outside [0, 1].
    """
    low = 0 if eps is None else eps
    outside = (x < low) | (x > 1 - low)
    # |x|, so that at -0.0 it is the infinity of 0.0, from inside; as autograd has it. PyTorch's
    # forward mode has the other infinity there, and zero for NaN with eps.
    return torch.where(outside, math.nan if eps is None else 0, g / (x.abs() * (1 - x)))


# --- activations --------------------------------------------------------------------------------


def _elu(
    g: Tensor, x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Tensor:
    """scale * x where x > 0, else scale * alpha * (exp(k * x) - 1),  k = input_scale

    scale where x > 0, else scale * alpha * k * exp(k * x)
    """
    # Clamped, as exp of what is not selected may be infinite, and its derivative then NaN.
    e = (x.clamp(max=0) * input_scale).exp()
    return torch.where(x <= 0, g * (e * (scale * alpha * input_scale)), g * scale)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    """x * P(x):  P(x) + x * P'(x)

    none:  P = (1 + erf(x / sqrt(2))) / 2,   P' = exp(-x^2 / 2) / sqrt(2 pi)
    tanh:  P = (1 + tanh(u)) / 2,            P' = (1 - tanh(u)^2) / 2 * u'
           u = sqrt(2 / pi) * (x + c * x^3), u' = sqrt(2 / pi) * (1 + 3 * c * x^2)
    """
    if approximate == "none":
        return 0.5 * (1 + (x * math.sqrt(0.5)).erf()) + x * (-0.5 * x * x).exp() / SQRT_2PI
    k, c = math.sqrt(2 / math.pi), 0.044715
    t = (k * (x + c * x * x * x)).tanh()
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (k * (1 + 3 * c * x * x))


def _hardswish(g: Tensor, x: Tensor) -> Tensor:
    """x * clamp(x + 3, 0, 6) / 6:  zero below -3, one above 3, x / 3 + 1/2 between"""
    return torch.where(x <= -3, 0, torch.where(x < 3, g * (x / 3 + 0.5), g))


def _mish(x: Tensor) -> Tensor:
    """x * t,  t = tanh(softplus(x)):  t + x * sigmoid(x) * (1 - t^2)"""
    t = torch.nn.functional.softplus(x).tanh()
    return t + x * x.sigmoid() * (1 - t * t)


def _rrelu(
    g: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool
) -> Tensor:
    """x * noise in training, where noise is what the forward pass has drawn, one where x > 0;
    otherwise leaky_relu with the middle of the interval.
    """
    if training and upper - lower > 1e-6:
        return g * noise
    return torch.where(x > 0, g, g * ((lower + upper) / 2))


def _silu(x: Tensor) -> Tensor:
    """x * s,  s = sigmoid(x):  s * (1 + x * (1 - s))"""
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _clamp(x: Tensor, min: float | None, max: float | None) -> Any:
    """One from bound to bound, else zero;  at a bound as clamp_min and clamp_max"""
    if min is None:
        return 1 if max is None else _clamp_max(x, max)
    return _clamp_min(x, min) if max is None else _clamp_min(x, min) & _clamp_max(x, max)


def _clamp_min(x: Tensor, min: float) -> Tensor:
    """One above min, else zero;  at min one up to torch 2.13, zero from 2.14 on"""
    return x >= min if CLAMP_PASSES_AT_BOUNDS else x > min


def _clamp_max(x: Tensor, max: float) -> Tensor:
    """One below max, else zero;  at max one up to torch 2.13, zero from 2.14 on"""
    return x <= max if CLAMP_PASSES_AT_BOUNDS else x < max


# --- the table ----------------------------------------------------------------------------------

POWERS_AND_PRODUCTS: Slopes = {
    "aten.copysign.Scalar": lambda x, y: torch.where(x == 0, 0, y / x),
    "aten.deg2rad.default": lambda: math.pi / 180,
    "aten.neg.default": lambda: -1,
    "aten.pow.Scalar": _pow_of_exponent,
    "aten.pow.Tensor_Scalar": _pow,
    "aten.rad2deg.default": lambda: 180 / math.pi,
    "aten.reciprocal.default": lambda y: -y * y,
    "aten.rsqrt.default": lambda y: -0.5 * y * y * y,
    "aten.rsub.Scalar": lambda alpha: -alpha,
    "aten.special_xlog1py.other_scalar": _xlog1py_of_x,
    "aten.special_xlog1py.self_scalar": lambda x, self: self / (x + 1),
    "aten.sqrt.default": lambda g, y: g / (2 * y),
    "aten.sub.Scalar": lambda: 1,
    "aten.xlogy.Scalar_Other": _xlogy_of_x,
    "aten.xlogy.Scalar_Self": lambda x, self: self / x,
}

EXPONENTIAL: Slopes = {
    "aten.exp.default": lambda y: y,
    "aten.exp2.default": lambda y: y * LN2,
    "aten.expm1.default": lambda y: y + 1,
    "aten.log.default": lambda g, x: g / x,
    "aten.log10.default": lambda g, x: g / (x * LN10),
    "aten.log1p.default": lambda g, x: g / (x + 1),
    "aten.log2.default": lambda g, x: g / (x * LN2),
}

TRIGONOMETRIC: Slopes = {
    "aten.acos.default": lambda x: -(1 - x * x).rsqrt(),
    "aten.acosh.default": _acosh,
    "aten.asin.default": lambda x: (1 - x * x).rsqrt(),
    "aten.asinh.default": lambda x: (x * x + 1).rsqrt(),
    "aten.atan.default": lambda g, x: g / (x * x + 1),
    "aten.atanh.default": lambda g, x: g / (1 - x * x),
    "aten.cos.default": lambda x: -x.sin(),
    "aten.cosh.default": lambda x: x.sinh(),
    "aten.sin.default": lambda x: x.cos(),
    "aten.sinc.default": _sinc,
    "aten.sinh.default": lambda x: x.cosh(),
    "aten.tan.default": lambda y: 1 + y * y,
    "aten.tanh.default": lambda y: 1 - y * y,
}

# Where a difference cancels, the result is computed anew: one kept in half precision is too coarse.
SPECIAL: Slopes = {
    "aten.digamma.default": lambda x: torch.polygamma(1, x),
    "aten.erf.default": lambda x: 2 / SQRT_PI * (-x * x).exp(),
    "aten.erfc.default": lambda x: -2 / SQRT_PI * (-x * x).exp(),
    "aten.erfinv.default": lambda y: 0.5 * SQRT_PI * (y * y).exp(),
    "aten.i0.default": _i0,
    "aten.lgamma.default": lambda x: x.digamma(),
    "aten.logit.default": _logit,
    "aten.mvlgamma.default": _mvlgamma,
    "aten.polygamma.default": lambda x, n: torch.polygamma(n + 1, x),
    "aten.sigmoid.default": lambda y: y * (1 - y),
    "aten.special_entr.default": lambda x: -(1 + x.log()),
    "aten.special_erfcx.default": lambda x: 2 * x * special.erfcx(x) - 2 / SQRT_PI,
    "aten.special_i0e.default": lambda x: special.i1e(x) - x.sgn() * special.i0e(x),
    "aten.special_i1.default": _i1,
    "aten.special_i1e.default": _i1e,
    "aten.special_log_ndtr.default": _log_ndtr,
    "aten.special_ndtri.default": lambda y: SQRT_2PI * (y * y / 2).exp(),
}

# Entered where torch differentiates the Bessel functions that the slopes are made of.
BESSEL: Slopes = {
    "aten.special_bessel_j0.default": _j0,
    "aten.special_bessel_j1.default": _j1,
    "aten.special_bessel_y0.default": lambda x: -special.bessel_y1(x),
    "aten.special_bessel_y1.default": _y1,
    "aten.special_modified_bessel_i0.default": _i0,
    "aten.special_modified_bessel_i1.default": _i1,
    "aten.special_modified_bessel_k0.default": lambda x: -special.modified_bessel_k1(x),
    "aten.special_modified_bessel_k1.default": lambda x, y: (
        -(special.modified_bessel_k0(x) + y / x)
    ),
}

ACTIVATIONS: Slopes = {
    "aten.celu.default": lambda g, x, alpha: _elu(g, x, alpha, 1, 1 / alpha),
    "aten.elu.default": _elu,
    "aten.gelu.default": _gelu,
    "aten.hardshrink.default": lambda x, lambd: ~((x >= -lambd) & (x <= lambd)),
    "aten.hardsigmoid.default": lambda g, x: torch.where((x > -3) & (x < 3), g / 6, 0),
    "aten.hardswish.default": _hardswish,
    "aten.hardtanh.default": lambda x, min_val, max_val: ~((x <= min_val) | (x >= max_val)),
    "aten.leaky_relu.default": lambda g, x, negative_slope: torch.where(
        x > 0, g, g * negative_slope
    ),
    "aten.mish.default": _mish,
    "aten.relu.default": lambda y: ~(y <= 0),
    "aten.rrelu_with_noise.default": _rrelu,
    "aten.silu.default": _silu,
    "aten.softplus.default": lambda g, x, beta, threshold: torch.where(
        x * beta > threshold, g, g * (x * beta).sigmoid()
    ),
    "aten.softshrink.default": lambda x, lambd: ~((x >= -lambd) & (x <= lambd)),
    "aten.threshold.default": lambda x, threshold: ~(x <= threshold),
}

ROUNDING: Slopes = {
    "aten.ceil.default": lambda: 0,
    "aten.clamp.default": _clamp,
    "aten.clamp_max.default": _clamp_max,
    "aten.clamp_min.default": _clamp_min,
    "aten.floor.default": lambda: 0,
    "aten.fmod.Scalar": lambda: 1,
    "aten.nan_to_num.default": lambda x: x.isfinite().to(x.dtype),
    "aten.remainder.Scalar": lambda: 1,
    "aten.round.decimals": lambda: 0,
    "aten.round.default": lambda: 0,
    "aten.sign.default": lambda: 0,
    "aten.trunc.default": lambda: 0,
}

_FAMILIES = [POWERS_AND_PRODUCTS, EXPONENTIAL, TRIGONOMETRIC, SPECIAL, ACTIVATIONS, ROUNDING]
for _family in _FAMILIES + [BESSEL] * BESSEL_HAS_DERIVATIVES:
    slopes(_family, source="tools/autograd/derivatives.yaml")
