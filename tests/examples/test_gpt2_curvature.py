"""examples/gpt2_curvature.py: its products are eager's, in float64."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (the extra `examples`)")

SIZES = {"layers": 1, "width": 16, "length": 8, "batch": 2, "dtype": torch.float64}


@pytest.fixture
def example() -> Any:
    return importlib.import_module("normpass.examples.gpt2_curvature")


def assert_products_agree(way: Any) -> None:
    eager = way(lambda function: function, **SIZES)
    compiled = way(partial(torch.compile, backend="normpass", fullgraph=True), **SIZES)
    for _ in range(3):
        expected = eager()
        assert expected.norm() > 1e-3
        torch.testing.assert_close(compiled(), expected, rtol=0, atol=1e-12)


def test_by_double_backward(example: Any) -> None:
    assert_products_agree(example.hessian_vector)


def test_by_torch_func(example: Any) -> None:
    assert_products_agree(example.forward_over_reverse)


@pytest.mark.filterwarnings(
    # Inductor's own lowering of aten.diagonal, which torch.func.jacrev calls
    "ignore:`torch._prims_common.check` is deprecated:FutureWarning"
)
def test_by_curvlinops(example: Any) -> None:
    pytest.importorskip(
        "curvlinops", reason="curvlinops-for-pytorch is not installed (the extra `examples`)"
    )
    assert_products_agree(example.gauss_newton_vector)


def test_both_ways_to_the_hessian_agree(example: Any) -> None:
    ways = (example.hessian_vector, example.forward_over_reverse)
    by_reverse, by_forward = (way(lambda function: function, **SIZES)() for way in ways)
    torch.testing.assert_close(by_reverse, by_forward, rtol=0, atol=1e-12)
