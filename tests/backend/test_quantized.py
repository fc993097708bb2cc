"""Quantization after a norm: in its kernel, as in eager mode, and nothing computed in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NUMBERS = torch.Generator().manual_seed(0)
X = torch.randn(257, 1003, generator=NUMBERS)
W = torch.rand(1003, generator=NUMBERS) + 0.5


def int8_of_rows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x, w.shape, w)
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (y / scale).round().clamp(-128, 127).to(torch.int8), scale


def uint8_of_rows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """With a zero point."""
    y = F.layer_norm(x, w.shape, w)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale = (high - low) / 255
    return ((y - low) / scale).round().clamp(0, 255).to(torch.uint8), scale


def float8_of_rows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, w.shape, w)
    scale = 448 / y.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (y * scale).clamp(-448, 448).to(torch.float8_e4m3fn), 1 / scale


def float8_of_all(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x, w.shape, w)
    scale = 57344 / y.abs().amax().clamp(min=1e-12)
    return (y * scale).clamp(-57344, 57344).to(torch.float8_e5m2), 1 / scale


def compiled(f: Callable[..., Any], *args: Tensor) -> Any:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(f, backend="normpass", options={"least_bytes": 0})(*args)


@pytest.mark.parametrize(
    "f", [int8_of_rows, uint8_of_rows, float8_of_rows, float8_of_all], ids=lambda f: f.__name__
)
def test_numbers(f: Callable[..., Any]) -> None:
    """Those of float64, but for what rounding takes to the other side of a step."""
    found, scale = compiled(f, X, W)
    assert sum(counters["normpass"].values()) == 1, counters["normpass"]
    exact, exact_scale = f(X.double(), W.double())
    torch.testing.assert_close(scale, exact_scale.float())
    one, other = (t.double() for t in (found, exact))
    apart = (one - other).abs()
    eps = torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    assert bool((apart <= (1 if eps == 0 else eps * other.abs())).all())
    assert float((apart > 0).double().mean()) < 1e-4


def test_what_is_not_finite() -> None:
    """As eager mode rounds it, which has the largest number or NaN where there is no infinity."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.softmax(x, -1)
        return (x * 100).to(torch.float8_e4m3fn), (y * x * 1e6).to(torch.float8_e5m2)

    x = X.clone()
    x[3, 5], x[4, 6], x[5, 7] = torch.inf, torch.nan, 1e30
    for one, other in zip(compiled(f, x), f(x), strict=True):
        nan = other.float().isnan()
        assert torch.equal(one.float().isnan(), nan)
        assert int(nan.sum()) > 0
        assert torch.equal(one.float().isinf(), other.float().isinf())


def test_what_is_used_further_is_rounded() -> None:
    """A value that leaves as bytes and is multiplied by its scale again."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = (F.layer_norm(x, (1003,)) * 8).to(torch.int8)
        return q, q.float() / 8, (q.float() ** 2).sum(-1)

    q, again, squares = compiled(f, X)
    assert counters["normpass"]["fused layer_norm"] == 1
    assert torch.equal(again, q.float() / 8)
    assert torch.equal(squares, (q.float() ** 2).sum(-1))
    assert bool(((again * 8) == (again * 8).round()).all())


def test_nothing_is_computed_in_bytes() -> None:
    """Sums of bytes wrap around; a norm of them is of numbers."""

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = a + b
        return F.layer_norm(total.float(), (1003,)), (-total).abs()

    a, b = (torch.randint(-128, 128, X.shape, dtype=torch.int8, generator=NUMBERS) for _ in "ab")
    y, size = compiled(f, a, b)
    expected, size_expected = f(a, b)
    torch.testing.assert_close(y, expected)
    assert torch.equal(size, size_expected)


def test_norms_of_bytes() -> None:
    q, scale = int8_of_rows(X, W)

    def f(q: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(q * scale, (1003,))

    y = compiled(f, q, scale)
    assert counters["normpass"]["fused layer_norm"] == 1
    torch.testing.assert_close(y, f(q, scale))


def test_training_through_fake_quantization() -> None:
    """Straight through: the forward has rounded numbers, the backward knows nothing of them."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.rms_norm(x, w.shape, w)
        scale = (y.detach().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
        rounded = (y.detach() / scale).to(torch.float8_e4m3fn).to(y.dtype) * scale
        return y + (rounded - y.detach())

    leaves = [t.clone().requires_grad_() for t in (X, W)]
    y = compiled(f, *leaves)
    weights = torch.randn(y.shape, generator=NUMBERS)
    found = torch.autograd.grad((y * weights).sum(), leaves)
    eager = f(*leaves)
    expected = torch.autograd.grad((eager * weights).sum(), leaves)
    assert float((y - eager).abs().gt(1e-5).double().mean()) < 1e-4  # on the other side of a step
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_scale_in_float64_does_not_cost_the_norm() -> None:
    """As torchao has it for rows: what is of double precision stays outside, all of it."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.rms_norm(x, w.shape, w)
        scale = (448 / y.abs().amax(-1, keepdim=True).double().clamp(min=1e-12)).float()
        return (y * scale).clamp(-448, 448).to(torch.float8_e4m3fn), 1 / scale

    found, right = compiled(f, X, W), f(X, W)
    assert counters["normpass"]["fused rms_norm"] == 1
    torch.testing.assert_close(found[1], right[1])
    apart = (found[0].float() - right[0].float()).abs()
    assert float((apart > 0).double().mean()) < 1e-4
