"""examples/train_decoder.py: it trains as eager does, in float64, and learns what text is."""

from __future__ import annotations

import math

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager

from normpass.examples import train_decoder

SIZES = {"width": 16, "depth": 1, "length": 12, "batch": 4, "dtype": torch.float64}


@pytest.mark.parametrize("inner", INNER)
def test_training_is_eagers(inner: str) -> None:
    assert_trains_as_eager(train_decoder.Training, inner, fullgraph=True, **SIZES)


def test_the_norm_is_torchs() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    norm = train_decoder.RMSNorm(8).double()
    torch.nn.init.normal_(norm.weight)
    right = torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), right, rtol=0, atol=1e-14)


def test_rotated_features_see_distances_alone() -> None:
    """The product of a query and a key is that of another pair as far apart."""
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 6, 8) for _ in range(2))
    products = train_decoder.rotated(q)[0, 0] @ train_decoder.rotated(k)[0, 0].T
    for distance in range(-5, 6):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-13)
    assert products[0].unique().numel() == 6


def test_it_learns() -> None:
    step = train_decoder.Training(lambda function: function, width=32, depth=1, length=32)
    losses = [step().item() for _ in range(60)]
    assert losses[-1] < 0.75 * math.log(len(step.alphabet))
    assert len(step.written("The ", letters=40)) == 44
