"""examples/wgan_gp.py: it trains as eager does, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from normpass.examples import wgan_gp


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_training_is_eagers(norm: str) -> None:
    def losses(compile: Any) -> torch.Tensor:
        step = wgan_gp.training(compile, norm, batch=8, dtype=torch.float64)
        return torch.stack([step() for _ in range(3)])

    expected = losses(lambda function: function)
    found = losses(partial(torch.compile, backend="normpass"))
    assert expected.unique().numel() == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
