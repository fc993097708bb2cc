"""What generated Triton kernels are written in, beside triton.language: what normpass.h is to C++.

Everything here is as exact as the CUDA code behind eager PyTorch: division and square roots are rounded to
nearest (Triton's own are approximate in float32), exponentials and their kin come from libdevice, and the largest
of values of which one is NaN is NaN. Triton's interpreter knows no libdevice and its reductions drop NaN, so under
TRITON_INTERPRET=1 the same names are spelled in NumPy (triton_interpreted.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice as _libdevice

INTERPRETED: bool = triton.knobs.runtime.interpret

libdevice: Any = _libdevice


@triton.jit
def divide(x, y):  # type: ignore[no-untyped-def]
    """x / y, rounded to nearest."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def reciprocal(x):  # type: ignore[no-untyped-def]
    """1 / x, rounded to nearest."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x))"""
    return reciprocal(1.0 + libdevice.exp(x * -1.0))


@triton.jit
def sqrt(x):  # type: ignore[no-untyped-def]
    """The square root of x, rounded to nearest."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def maximum(x, y):  # type: ignore[no-untyped-def]
    """The larger; NaN if one is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):  # type: ignore[no-untyped-def]
    """The smaller; NaN if one is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _multiply(x, y):  # type: ignore[no-untyped-def]
    return x * y


@triton.jit
def amax(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """The largest element along an axis, or of all; NaN if one is."""
    return tl.reduce(x, axis, maximum, keep_dims=keep_dims)


@triton.jit
def amin(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """The smallest element along an axis, or of all; NaN if one is."""
    return tl.reduce(x, axis, minimum, keep_dims=keep_dims)


@triton.jit
def prod(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """The product of the elements along an axis, or of all."""
    return tl.reduce(x, axis, _multiply, keep_dims=keep_dims)


def share_count(programs: int, tiles: int, blocks: int) -> int:
    """How many programs share an axis of so many blocks, if `tiles` programs stand side by side at each."""
    return max(1, min(triton.cdiv(programs, max(tiles, 1)), blocks))


if INTERPRETED:
    from normpass.backend.codegen import triton_interpreted as _interpreted

    libdevice, amax, amin, prod = (
        _interpreted.libdevice,
        _interpreted.amax,
        _interpreted.amin,
        _interpreted.prod,
    )
