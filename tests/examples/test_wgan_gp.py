"""examples/wgan_gp.py: it trains as eager does, in float64."""

from __future__ import annotations

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager
from higher_order_cases import IGNORED

from normpass.examples import wgan_gp

pytestmark = IGNORED


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_training_is_eagers(norm: str, inner: str) -> None:
    assert_trains_as_eager(wgan_gp.training, inner, norm, batch=8, dtype=torch.float64)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("norm", [pytest.param("group", marks=pytest.mark.sweep), "layer"])
def test_the_loss_as_a_whole(norm: str, inner: str) -> None:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        sizes = {"whole": True, "batch": 8, "dtype": torch.float64}
        assert_trains_as_eager(wgan_gp.training, inner, norm, **sizes)
