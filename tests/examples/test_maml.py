"""examples/maml.py: it trains as eager does, in float64."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass.examples import maml

if TYPE_CHECKING:
    from collections.abc import Iterator


# Dynamo's own, where it looks at weights that are not leaves
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_training_is_eagers() -> None:
    def losses(compile: Any) -> torch.Tensor:
        step = maml.training(compile, filters=4, tasks=1, inner_steps=2)
        return torch.stack([step() for _ in range(3)])

    expected = losses(lambda function: function)
    found = losses(partial(torch.compile, backend="normpass"))
    assert expected.unique().numel() == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
