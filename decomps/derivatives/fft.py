"""Fourier transforms of real signals: one half of the frequencies stands for both."""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.conventions import Arguments, real
from normpass.decomps.manual import Gradient, Ints, manual

aten = torch.ops.aten


def _weighted(half: Tensor, axis: int, size: int, weight: float) -> Tensor:
    """The frequencies of a signal of this size, times the weight where their opposites, which are
    left out, are others: all but the zeroth and, of an even size, the last.
    """
    count = half.shape[axis]
    k = torch.arange(count, device=half.device)
    inner = torch.where((k >= 1) & (k <= size - count), weight, 1.0)
    after = half.dim() - 1 - axis % half.dim()
    return half * inner.to(half.real.dtype).view(-1, *[1] * after)


def _complex(given: Arguments) -> torch.dtype | None:
    return None if given["grad"] is None else given["grad"].dtype.to_complex()


@manual(
    "grad: *n m -> dself: *n m/2+1",
    dtype=_complex,
    sample=lambda self: {
        "self": torch.complex(self.real, self.real.sin()),
        "dim": [self.dim() - 1],
    },
    of="_fft_c2r",
)
def fft_c2r_backward(grad: Gradient, dim: Ints, normalization: int) -> Tensor:
    """y = the real signal of half a spectrum:  dx = the half of y's, twice where it is for both"""
    half = aten._fft_r2c(grad, dim, normalization, True)
    return _weighted(half, dim[-1], grad.shape[dim[-1]], 2)


@manual(
    "grad: *n c -> dself: *n m",
    dtype=real("grad"),
    sample=lambda self: {"self": self.real, "dim": [self.dim() - 1]},
    of="_fft_r2c",
)
def fft_r2c_backward(
    grad: Gradient, dim: Ints, normalization: int, onesided: bool, last_dim_size: int
) -> Tensor:
    """y = the spectrum of a real signal, or half of it:  dx = the signal of grad, whose other half
    is zero: of half of grad, where it would be for both
    """
    if not onesided:
        return aten._fft_c2c(grad, dim, normalization, False).real
    half = _weighted(grad, dim[-1], last_dim_size, 0.5)
    return aten._fft_c2r(half, dim, normalization, last_dim_size)
