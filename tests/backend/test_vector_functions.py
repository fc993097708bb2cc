"""Functions that kernels compute by formulas of their own, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normpass.backend.runtime import kernel

inf, nan = float("inf"), float("nan")
FUNCTIONS = {"erf": torch.erf, "tanh": torch.tanh}


def computed(name: str, x: Tensor) -> Tensor:
    """name(x) as a kernel computes it."""
    text = f"region {name}\naxes r=?\ninput x: f32[r]\ny = {name}(x)\noutput y0: f32[r] = y\n"
    (found,) = kernel(text)([x], [len(x)])
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_three_units_in_the_last_place(name: str) -> None:
    """Relative to the result, however small it is. The odd length leaves lanes at the end."""
    x = torch.cat([torch.linspace(-11, 11, 400_001), torch.logspace(-37, 1, 100_002)])
    right = FUNCTIONS[name](x.double())
    found = computed(name, x)
    assert ((found - right) / right).abs()[right != 0].max() < 3.5 * 2**-23
    assert found.abs().max() == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_odd(name: str) -> None:
    x = torch.randn(1000)
    assert torch.equal(computed(name, -x), -computed(name, x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_number(name: str) -> None:
    x = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e-42, 3e38, nan, 1.0])
    found, right = computed(name, x), FUNCTIONS[name](x)
    torch.testing.assert_close(found, right, equal_nan=True)
    assert torch.equal(found.signbit()[1:5], right.signbit()[1:5])
