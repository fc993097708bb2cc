"""What the tests of examples/ share: runs of a program, compiled and in eager mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from higher_order_cases import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Training = Callable[..., Callable[[], Tensor]]

# Inductor takes minutes for the larger ones: `make examples` runs all.
INNER = ["eager", pytest.param("inductor", marks=pytest.mark.sweep)]


def assert_trains_as_eager(training: Training, inner: str, *args: Any, **sizes: Any) -> None:
    """The losses of the first steps, by which the second and third see what training has done."""

    def losses(compile: Callable[[Any], Any]) -> Tensor:
        step = training(compile, *args, **sizes)
        return torch.stack([step() for _ in range(3)])

    right = losses(lambda function: function)
    found = losses(lambda function: compiled(function, inner=inner))
    assert right.unique().numel() == len(right)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
