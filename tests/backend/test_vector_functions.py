"""Functions that kernels compute by formulas of their own, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normpass.backend.run.runtime import launch

inf, nan = float("inf"), float("nan")
FUNCTIONS = {"erf": torch.erf, "tanh": torch.tanh, "exp": torch.exp, "sigmoid": torch.sigmoid}
ODD = ("erf", "tanh")
# Units in the last place.
MOST = {"erf": 3.5, "tanh": 3.5, "exp": 1, "sigmoid": 2.5}


def computed(name: str, x: Tensor) -> Tensor:
    """name(x) as a kernel computes it."""
    text = f"region {name}\naxes r=?\ninput x: f32[r]\ny = {name}(x)\noutput y0: f32[r] = y\n"
    (found,) = launch([x], [len(x)], text)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_some_units_in_the_last_place(name: str) -> None:
    """Relative to the result, however small it is. The odd length leaves lanes at the end."""
    x = torch.cat([torch.linspace(-87, 88, 400_001), torch.logspace(-37, 1, 100_002)])
    right = FUNCTIONS[name](x.double())
    found = computed(name, x)
    assert ((found - right) / right).abs().max() < MOST[name] * 2**-23
    if name in ODD:
        assert found.abs().max() == 1


def test_an_exponential_that_is_hardly_a_number() -> None:
    """Denormal, zero and infinite ones."""
    x = torch.cat([torch.linspace(-120, -87, 20_000), torch.linspace(88, 90, 20_000)])
    found, right = computed("exp", x), x.double().exp()
    torch.testing.assert_close(found, right.float(), rtol=2**-23, atol=2**-149)


@pytest.mark.parametrize("name", ODD)
def test_it_is_odd(name: str) -> None:
    x = torch.randn(1000)
    assert torch.equal(computed(name, -x), -computed(name, x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_number(name: str) -> None:
    x = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e-42, 3e38, nan, 1.0])
    found, right = computed(name, x), FUNCTIONS[name](x)
    torch.testing.assert_close(found, right, equal_nan=True)
    assert torch.equal(found.signbit()[1:5], right.signbit()[1:5])
