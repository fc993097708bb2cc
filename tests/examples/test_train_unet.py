"""examples/train_unet.py: it trains as eager does, in float64, and learns what noise is."""

from __future__ import annotations

import math

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager

from normpass.examples import train_unet


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels_first", "channels_last"])
def test_training_is_eagers(channels_last: bool, inner: str) -> None:
    sizes = {"width": 8, "batch": 4, "dtype": torch.float64}
    assert_trains_as_eager(train_unet.Training, inner, channels_last, fullgraph=True, **sizes)


def test_it_learns_to_take_noise_off() -> None:
    """An answer of zero has an error of 1; the images with less noise are nearer to the right."""
    step = train_unet.Training(lambda module: module, width=16, batch=32)
    before, noisy, _ = step.tried_out(math.pi / 5)
    for _ in range(60):
        step()
    after, _, cleaned = step.tried_out(math.pi / 5)
    assert before > 0.8
    assert after < 0.5
    distances = [(images - step.held_out).square().mean() for images in (noisy, cleaned)]
    assert distances[1] < 0.7 * distances[0]


def test_a_picture() -> None:
    image = torch.zeros(1, 8, 8)
    image[0, 0, :2] = torch.tensor([-1.0, 1.0])
    first, *others = train_unet.drawn(image).splitlines()
    assert first == "  @@" + 6 * "=="
    assert others == 7 * [8 * "=="]
