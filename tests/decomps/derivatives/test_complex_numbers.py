"""Angles, signs and powers of complex numbers, and where they have none."""

from __future__ import annotations

import pytest
import table_calls
import torch
from torch.testing import assert_close

from normpass.decomps.registry import derivative
from normpass.decomps.table.binding import vjp

aten = torch.ops.aten
Z = torch.tensor([0.0, 1.5 - 0.5j, -2.0, 3j, 1e200 + 1e200j], dtype=torch.complex128)
G = torch.tensor([1.0 + 2j, -0.5j, 1.5 + 1j, 2.0, 1.0], dtype=torch.complex128)


@pytest.mark.parametrize("op", [aten.angle.default, aten.sgn.default], ids=str)
def test_of_zero_and_of_what_is_real(op: torch._ops.OpOverload) -> None:
    for x in (Z[:4], Z.real[:4], Z[:0]):
        for check in (table_calls.check_vjp, table_calls.check_jvp):
            assert check(table_calls.Call(op, {"self": x})) in (
                *(table_calls.RIGHT, table_calls.NOT_COUNTED),
            )


def test_an_angle_of_a_large_number() -> None:
    found = derivative("angle_backward")(G.real, Z)
    assert_close(found[4], 1j / Z[4].conj())
    assert found[0] == 0


def test_sizes_that_are_not_positive() -> None:
    """PyTorch asks the result for the angle, which is not its own there."""
    r = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.3, 1.2, 0.7], dtype=torch.float64, requires_grad=True)
    g, y = G[1:4], torch.polar(r, t)
    found = vjp(aten.polar)((g,), (r, t), y)
    h = 1e-6
    of_r = (torch.polar(r + h, t) - torch.polar(r - h, t)) / (2 * h)
    of_t = (torch.polar(r, t + h) - torch.polar(r, t - h)) / (2 * h)
    expected = {"abs": (g.conj() * of_r).real, "angle": (g.conj() * of_t).real}
    assert_close(found, expected, rtol=1e-8, atol=1e-8)
    stock = torch.autograd.grad(y, (r, t), g)
    assert not torch.allclose(stock[0], found["abs"])
    assert_close(derivative("polar_backward")(g, y), stock)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3.5, -1, 2 + 1j, 0j])
def test_powers(exponent: complex) -> None:
    """As torch.pow has them, at zero too."""
    rule = derivative("pow_backward")
    for x in (Z[:4], Z.real[:4]):
        z = x.clone().requires_grad_()
        y = z.pow(exponent)
        (expected,) = torch.autograd.grad(y, z, G[:4] if y.is_complex() else G.real[:4])
        found = rule(G[:4] if y.is_complex() else G.real[:4], x, exponent)
        assert_close(found, expected, equal_nan=True)
