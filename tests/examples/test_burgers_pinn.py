"""examples/burgers_pinn.py: it trains as eager does with right derivatives, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager

import normpass
from normpass.examples import burgers_pinn

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("float64", "right_derivatives")


@pytest.fixture
def right_derivatives() -> Iterator[None]:
    """With the rules in eager mode too, where third derivatives are wrong."""
    with normpass.registered(eager=True), torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("whole", [False, True], ids=["network", "residual"])
def test_training_is_eagers(whole: bool, inner: str) -> None:
    assert_trains_as_eager(burgers_pinn.training, inner, whole, points=32, width=16, depth=1)
