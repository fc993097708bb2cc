"""examples/per_sample_gradients.py: it trains as eager does, in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager

for package in ("opacus", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed (the extra `examples`)")

pytestmark = [
    # opacus's advice, once an engine, for what is more than an experiment
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    # torch's, about the hook that opacus puts on the first layer
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when:UserWarning"),
]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("mode", ["no_op", "functorch"])
def test_training_is_eagers(mode: str, inner: str) -> None:
    example = importlib.import_module("normpass.examples.per_sample_gradients")
    sizes = {"width": 8, "batch": 32, "dtype": torch.float64}
    near = {"rtol": 0.0, "atol": 1e-10}
    assert_trains_as_eager(example.training, inner, mode, steps=4, fullgraph=True, **near, **sizes)


def test_both_modes_find_the_same_gradients() -> None:
    example = importlib.import_module("normpass.examples.per_sample_gradients")
    sizes = {"width": 8, "batch": 32, "noise": 0.0, "dtype": torch.float64}
    ours, opacus = (
        example.training(lambda function: function, mode, **sizes)
        for mode in ("no_op", "functorch")
    )
    torch.manual_seed(0)
    expected = [ours() for _ in range(4)]
    torch.manual_seed(0)
    found = [opacus() for _ in range(4)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
