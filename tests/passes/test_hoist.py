"""What a region leaves to be computed once, before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from tracing import functions as named
from tracing import fused

from normpass.passes import hoist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WINDOWS, ROWS, WIDTH = 32, 6, 40
X = torch.randn(WINDOWS, ROWS, WIDTH)
BIAS, WEIGHT = torch.randn(ROWS, WIDTH), torch.randn(WIDTH)


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoist, "LEAST_EVALUATIONS", 1)


def functions(*args: Tensor, of: Callable[..., Tensor], dynamic: bool = False) -> set[str]:
    """The functions in the one region of a function's graph; its numbers are checked."""
    (region,) = fused(of, *args, dynamic=dynamic)
    return named(region)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bias_of_every_window_is_computed_once(dynamic: bool) -> None:
    def f(x: Tensor, bias: Tensor) -> Tensor:
        return (x + 16 * bias.sigmoid()).softmax(-1)

    assert "sigmoid" not in functions(X, BIAS, of=f, dynamic=dynamic)


def test_behind_a_permutation_as_well() -> None:
    def f(x: Tensor, bias: Tensor) -> Tensor:
        return (x + 16 * bias.t().sigmoid()).softmax(-1)

    assert "sigmoid" not in functions(X, BIAS.t().contiguous(), of=f)


def test_a_weight_that_is_an_exponential() -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)) * weight.exp()

    assert "exp" not in functions(X, WEIGHT, of=f)


def test_what_the_expensive_part_feeds_goes_along() -> None:
    def f(x: Tensor, bias: Tensor) -> Tensor:
        return (x + (bias.sigmoid() * 16 - bias).abs()).softmax(-1)

    assert functions(X, BIAS, of=f).isdisjoint({"sigmoid", "abs"})


# ---- near misses


def test_cheap_functions_stay_inside() -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)) * (1 + weight)

    (region,) = fused(f, X, WEIGHT)
    assert [op.fn for op in region.ops].count("add") == 2  # eps, and 1 + weight


def test_a_few_windows_do_not_pay() -> None:
    def f(x: Tensor, bias: Tensor) -> Tensor:
        return (x + 16 * bias.sigmoid()).softmax(-1)

    assert "sigmoid" in functions(X[:4], BIAS, of=f)


def test_few_evaluations_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, bias: Tensor) -> Tensor:
        return (x + 16 * bias.sigmoid()).softmax(-1)

    monkeypatch.setattr(hoist, "LEAST_EVALUATIONS", X.numel() + 1)
    assert "sigmoid" in functions(X, BIAS, of=f)


def test_one_number_a_row_is_computed_once_a_row() -> None:
    """In a loop of its own around the row: no more often than outside."""

    def f(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale.exp()).softmax(-1)

    (region,) = fused(f, X, torch.randn(WINDOWS, ROWS, 1))
    assert [op.fn for op in region.ops].count("exp") == 2


def test_what_depends_on_a_sum_stays_inside() -> None:
    def f(x: Tensor) -> Tensor:
        return x * x.mean(0, keepdim=True).sigmoid()

    assert "sigmoid" in functions(X, of=f)
