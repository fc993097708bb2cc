"""What the tests of examples/ share: runs of a program, compiled and in eager mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Training = Callable[..., Callable[[], Tensor]]

# Inductor takes minutes for the larger ones: `make examples` runs all.
INNER = ["eager", pytest.param("inductor", marks=pytest.mark.sweep)]


def assert_trains_as_eager(
    training: Training,
    inner: str,
    *args: Any,
    steps: int = 3,
    fullgraph: bool = False,
    rtol: float = 1e-9,
    atol: float = 1e-9,
    **sizes: Any,
) -> None:
    """The losses of the first steps, of which all but the first see what training has done."""

    def losses(compile: Callable[[Any], Any]) -> Tensor:
        step = training(compile, *args, **sizes)
        return torch.stack([step() for _ in range(steps)])

    right = losses(lambda function: function)
    found = losses(
        lambda function: torch.compile(
            function, backend="normpass", fullgraph=fullgraph, options={"inner": inner}
        )
    )
    assert right.unique().numel() == len(right)
    torch.testing.assert_close(found, right, rtol=rtol, atol=atol)
