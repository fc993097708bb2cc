"""examples/train_vit.py: it trains as eager does, in float64, and learns to read the digits."""

from __future__ import annotations

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager

from normpass.examples import train_vit

SIZES = {"width": 16, "depth": 1, "batch": 16}


@pytest.mark.parametrize("inner", INNER)
def test_training_is_eagers(inner: str) -> None:
    assert_trains_as_eager(train_vit.Training, inner, fullgraph=True, dtype=torch.float64, **SIZES)


@pytest.mark.parametrize("inner", INNER)
def test_losses_in_bfloat16_are_near(inner: str) -> None:
    """bfloat16 has 8 bits, and rounds at other places when it is compiled."""
    near = {"rtol": 0.02, "atol": 0.0}
    assert_trains_as_eager(train_vit.Training, inner, bfloat16=True, **near, **SIZES)


def test_it_learns() -> None:
    """A guess is right once in ten times."""
    step = train_vit.Training(lambda module: module, width=32, depth=1, batch=64)
    for _ in range(150):
        step()
    assert step.accuracy() > 0.7
