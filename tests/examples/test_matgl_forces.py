"""examples/matgl_forces.py: forces train and a Hessian comes out as in eager mode, in float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager
from higher_order_cases import compiled

pytest.importorskip("matgl", reason="matgl is not installed (the extra `examples`)")

SIZES = {"atoms": 8, "units": 8, "blocks": 1, "dtype": torch.float64}
# Inductor's own lowering of aten.diagonal
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch._prims_common.check` is deprecated:FutureWarning"
)


@pytest.fixture
def example() -> Any:
    return importlib.import_module("normpass.examples.matgl_forces")


@pytest.mark.parametrize("inner", INNER)
def test_training_is_eagers(example: Any, inner: str) -> None:
    assert_trains_as_eager(example.training, inner, **SIZES)


# The potential copies the graph it is given, where Dynamo breaks its own.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.parametrize("inner", INNER)
def test_energies_and_forces_as_a_whole(example: Any, inner: str) -> None:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert_trains_as_eager(example.training, inner, whole=True, **SIZES)


@pytest.mark.parametrize("inner", INNER)
def test_the_hessian_is_eagers(example: Any, inner: str) -> None:
    right = example.hessian(lambda function: function, **SIZES)()
    step = example.hessian(lambda function: compiled(function, inner=inner), **SIZES)
    assert right.norm() > 1e-4
    for _ in range(3):
        torch.testing.assert_close(step(), right, rtol=1e-9, atol=1e-9 * right.abs().max().item())
