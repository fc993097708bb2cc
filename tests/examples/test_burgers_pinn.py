"""examples/burgers_pinn.py: it trains as eager does with right derivatives, in float64."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import normpass
from normpass.examples import burgers_pinn

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def right_derivatives() -> Iterator[None]:
    """In float64, with the rules in eager mode too, where third derivatives are wrong."""
    torch.set_default_dtype(torch.float64)
    with normpass.registered(eager=True), torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["network", "residual"]
)
def test_training_is_eagers(whole: bool) -> None:
    def losses(compile: Any) -> torch.Tensor:
        step = burgers_pinn.training(compile, whole, points=32, width=16, depth=1)
        return torch.stack([step() for _ in range(3)])

    expected = losses(lambda function: function)
    found = losses(partial(torch.compile, backend="normpass"))
    assert expected.unique().numel() == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
