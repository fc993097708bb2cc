"""Transforms of real signals: sizes of both parities, of which the last frequency tells."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.registry import derivative

aten = torch.ops.aten


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_a_spectrum_and_half_of_one(size: int) -> None:
    x = torch.randn(3, size, dtype=torch.float64, requires_grad=True)
    for onesided in (True, False):
        y = aten._fft_r2c(x, [1], 0, onesided)
        g = torch.randn_like(y)
        (expected,) = torch.autograd.grad(y, x, g)
        assert_close(derivative("fft_r2c_backward")(g, [1], 0, onesided, size), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_a_signal_of_half_a_spectrum(size: int) -> None:
    half = torch.randn(3, size // 2 + 1, dtype=torch.complex128, requires_grad=True)
    y = aten._fft_c2r(half, [1], 0, size)
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, half, g)
    assert_close(derivative("fft_c2r_backward")(g, [1], 0), expected)
