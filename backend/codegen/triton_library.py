"""What generated Triton kernels are written in, beside triton.language: what normpass.h is to C++.

Everything here is as exact as the CUDA code behind eager PyTorch: division and square roots are
rounded to nearest (Triton's own are approximate in float32), exponentials and their kin come from
libdevice, and the largest of values of which one is NaN is NaN. Triton's interpreter knows no
libdevice and its reductions drop NaN, so under TRITON_INTERPRET=1 the same names are spelled in
NumPy (triton_interpreted.py)."""

# Triton's functions are not Python's: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice as _libdevice

from normpass.backend.program.counts import divide_up, larger, smaller

if TYPE_CHECKING:
    from collections.abc import Mapping

    from normpass.backend.program.counts import Count

INTERPRETED: bool = triton.knobs.runtime.interpret

libdevice: Any = _libdevice

# How every kernel is compiled, beside `options`. Loops that may fetch ahead say so themselves:
# elsewhere a load could pass a store to the same array. And contracting a*b+c is one rounding less.
OPTIONS = {"num_stages": 1, "enable_fp_fusion": True}

# Bytes of shared memory that the system keeps of each program.
RESERVED = 1024
# Registers of an NVIDIA multiprocessor, and the most that a thread can have.
REGISTERS, OF_THREAD = 64 * 1024, 255
# Iterations whose tensors are on chip at once: more hide no more of a fetch.
MOST_STAGES = 4


@dataclass(frozen=True)
class Card:
    """What a launch has to know of a GPU. processors: multiprocessors. shared: bytes of shared
    memory that each has. of_program: bytes of it that one program may have. fitting: of kernels
    that take more registers than was planned for, how many programs fit on a multiprocessor.
    """

    processors: int
    shared: int
    of_program: int
    fitting: Mapping[str, int] = field(default_factory=dict)

    def programs(self, kernel: str, planned: int) -> int:
        """How many programs of a kernel are to run on a multiprocessor."""
        return self.fitting.get(kernel, planned)


@triton.jit
def divide(x, y):
    """x / y, rounded to nearest."""
    if x.dtype == tl.float64:
        return x / y
    else:  # noqa: RET505
        return tl.div_rn(x, y)


@triton.jit
def reciprocal(x):
    """1 / x, rounded to nearest."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:  # noqa: RET505
        return tl.div_rn(1.0, x)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))"""
    return reciprocal(1.0 + libdevice.exp(x * -1.0))


@triton.jit
def sqrt(x):
    """The square root of x, rounded to nearest."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:  # noqa: RET505
        return tl.sqrt_rn(x)


@triton.jit
def maximum(x, y):
    """The larger; NaN if one is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """The smaller; NaN if one is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def both(x, y):
    """Whether x and y are true."""
    return x & y


@triton.jit
def either(x, y):
    """Whether x or y is true."""
    return x | y


# Numbers of one byte lie in memory as their bits: GPUs without hardware for them have them too, and
# what is too large is what torch makes of it: infinity, the largest number from 2.13 on where there
# is none, NaN before.
_TOO_LARGE = torch.tensor(1e6)
E4M3FN_LARGEST = tl.constexpr(int(_TOO_LARGE.to(torch.float8_e4m3fn).view(torch.uint8)))
E5M2_LARGEST = tl.constexpr(int(_TOO_LARGE.to(torch.float8_e5m2).view(torch.uint8)))


@triton.jit
def _to_float8(x, mantissa: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr):
    """The bits of x, rounded to nearest. largest: those of what is too large."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - mantissa
    # Half of the last place is added, and one more bit where the last place would be odd.
    rest: tl.constexpr = ((bias - 127) << 23) + (1 << (drop - 1)) - 1
    normal = (size + rest + ((size >> drop) & 1)) >> drop
    # A sum with this has its last place where the smallest numbers have theirs.
    places: tl.constexpr = (151 - bias - mantissa) << 23
    ruler = tl.full([], places, tl.int32).to(tl.float32, bitcast=True)
    tiny = (size.to(tl.float32, bitcast=True) + ruler).to(tl.int32, bitcast=True) - places
    rounded = tl.where(size < ((128 - bias) << 23), tiny, normal)
    rounded = tl.where(size > 0x7F800000, 0x7F, tl.minimum(rounded, largest))
    return (((bits >> 24) & 0x80) | rounded).to(tl.uint8)


@triton.jit
def _from_float8(bits, mantissa: tl.constexpr, bias: tl.constexpr, beyond: tl.constexpr):
    """The float32 of such bits. beyond: the first that are not finite."""
    bits = bits.to(tl.int32)
    size = bits & 0x7F
    scale: tl.constexpr = (254 - bias) << 23
    unit = tl.full([], scale, tl.int32).to(tl.float32, bitcast=True)
    value = (size << (23 - mantissa)).to(tl.float32, bitcast=True) * unit
    value = tl.where(size >= beyond, float("inf"), value)
    value = tl.where(size > (0x7E if mantissa == 3 else 0x7C), float("nan"), value)
    return tl.where(bits > 0x7F, -value, value)


@triton.jit
def to_float8_e4m3fn(x):
    return _to_float8(x, 3, 7, E4M3FN_LARGEST)


@triton.jit
def from_float8_e4m3fn(bits):
    return _from_float8(bits, 3, 7, 0x7F)


@triton.jit
def to_float8_e5m2(x):
    return _to_float8(x, 2, 15, E5M2_LARGEST)


@triton.jit
def from_float8_e5m2(bits):
    return _from_float8(bits, 2, 15, 0x7C)


@triton.jit
def _multiply(x, y):
    return x * y


# The following take and return what tl.sum does.


@triton.jit
def amax(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The largest element along an axis, or of all; NaN if one is."""
    return tl.reduce(x, axis, maximum, keep_dims=keep_dims)


@triton.jit
def amin(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The smallest element along an axis, or of all; NaN if one is."""
    return tl.reduce(x, axis, minimum, keep_dims=keep_dims)


@triton.jit
def prod(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The product of the elements along an axis, or of all."""
    return tl.reduce(x, axis, _multiply, keep_dims=keep_dims)


def options(warps: int, programs: int) -> dict[str, Any]:
    """How a kernel is compiled. programs: so many are to run on a multiprocessor. Left alone,
    NVIDIA's assembler spills registers for the sake of more, and takes so many that fewer fit.
    """
    given = {"num_warps": warps, **OPTIONS}
    if torch.version.hip is None:
        given["maxnreg"] = min(OF_THREAD, REGISTERS // (32 * warps * programs))
    return given


def stages(card: Card, ahead: int, beside: int, programs: int) -> int:
    """Of how many iterations a loop's tensors are on chip at once: the one that is computed, and
    those fetched meanwhile for which there is shared memory. 1 where nothing is fetched ahead.

    ahead: bytes of one iteration. beside: what a program needs of shared memory besides. programs:
    so many are to run on a multiprocessor.
    """
    room = min(card.of_program, card.shared // programs) - RESERVED - beside
    return max(1, min(MOST_STAGES, 1 + room // ahead))


def share_count(programs: int, tiles: Count, blocks: Count) -> Count:
    """How many programs share an axis of so many blocks, where `tiles` stand side by side."""
    return larger(1, smaller(divide_up(programs, larger(tiles, 1)), blocks))


if INTERPRETED:
    from normpass.backend.codegen import triton_interpreted as _interpreted

    libdevice = _interpreted.libdevice
    both, either = _interpreted.both, _interpreted.either
    amax, amin, prod = _interpreted.amax, _interpreted.amin, _interpreted.prod
