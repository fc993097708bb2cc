"""Cumulative products and logarithms of sums of exponentials, against sums over all pairs."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass.decomps.registry import decompositions, rules
from normpass.decomps.table.binding import jvp, vjp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops, aten = torch.ops.normpass, torch.ops.aten
TIGHT = {"rtol": 1e-11, "atol": 1e-13}
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)
INF = math.inf


def products(x: Tensor) -> Tensor:
    """cumprod by multiplications"""
    parts = [x[..., 0]]
    for part in x.unbind(-1)[1:]:
        parts.append(parts[-1] * part)
    return torch.stack(parts, -1)


def directional(function: Callable[..., Tensor], order: int) -> Callable[..., Tensor]:
    """The derivative of this order along a direction."""

    def along(x: Tensor, step: Tensor) -> Tensor:
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        found = function(x + t * step).real
        for _ in range(order):
            (found,) = torch.autograd.grad(found.sum(), t, create_graph=True)
        return found

    return along


@by_dtype
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("zeros", [(), (0,), (2, 3), (0, 1, 4, 5, 6), tuple(range(7))], ids=str)
def test_cumprods_derivatives_are_right_to_order_four(
    zeros: tuple[int, ...], order: int, dtype: torch.dtype
) -> None:
    """At zeros too: of multiplications, by way of the formulas of the reverse and of the tangent"""
    x = torch.randn(2, 7, dtype=dtype).index_fill_(1, torch.tensor(zeros, dtype=torch.int64), 0)
    g, t, step = (torch.randn_like(x) for _ in range(3))

    def gradient(x: Tensor) -> Tensor:
        return ops.cumprod_backward(g, x, 1, x.cumprod(1))

    def tangent(x: Tensor) -> Tensor:
        return ops.cumprod_jvp(t, x, x.cumprod(1), 1)

    def by_steps(x: Tensor) -> Tensor:
        at = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(products(at), at, g, create_graph=True)[0]

    def tangent_by_steps(x: Tensor) -> Tensor:
        return torch.func.jvp(products, (x,), (t,))[1]

    for ours, theirs in ((gradient, by_steps), (tangent, tangent_by_steps)):
        assert_close(ours(x), theirs(x), **TIGHT)
        found = directional(ours, order)(x, step)
        assert_close(found, directional(theirs, order)(x, step), rtol=1e-9, atol=1e-10)


def test_cumprod_of_a_number_and_of_an_empty_row() -> None:
    for x in (torch.tensor(3.0), torch.ones(2, 0), torch.full((2, 1), 2.0)):
        g = torch.randn_like(x)
        assert torch.equal(ops.cumprod_backward(g, x, -1, x), g)
        assert torch.equal(ops.cumprod_jvp(g, x, x, -1), g)
        assert torch.equal(ops.logcumsumexp_backward(g, x, x, -1), g)
        assert torch.equal(ops.logcumsumexp_jvp(x, g, -1), g)


def test_the_tangent_has_the_dtype_that_cumprod_is_asked_for() -> None:
    x, t = torch.randn(5), torch.randn(5)
    y = x.cumprod(0, dtype=torch.float64)
    assert ops.cumprod_jvp(t, x, y, 0).dtype is torch.float64
    (found,) = jvp(aten.cumprod)({"self": t}, {"self": x, "dim": 0, "dtype": torch.float64}, y)
    _, expected = torch.func.jvp(products, (x.double(),), (t.double(),))
    assert_close(found, expected, **TIGHT)


# --- logcumsumexp ---------------------------------------------------------------------------------


def shares(x: Tensor) -> Tensor:
    """exp(x_j - y_i) for j <= i: of each pair, without a scan. Where all so far are -inf: one, and
    nothing of those before.
    """
    i = torch.arange(x.shape[-1])
    y = x.logcumsumexp(-1)
    scaled = (x.unsqueeze(-2) - y.unsqueeze(-1)).nan_to_num(0, 0)
    return torch.where(i.unsqueeze(-1) >= i, scaled.exp(), 0)


@pytest.mark.parametrize(
    ("dtype", "spread"),
    # From a spread of hundreds on complex sums are NaN.
    [*product([torch.float64], [1, 30, 1000, 1e4]), *product([torch.complex128], [1, 30])],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9, 37, 300])
def test_logcumsumexps_derivatives_are_those_of_all_pairs(
    size: int, dtype: torch.dtype, spread: float
) -> None:
    x = torch.randn(3, size, dtype=dtype)
    x = torch.complex(x.real * spread, x.imag) if dtype.is_complex else x * spread
    g = torch.randn_like(x)
    y, weights = x.logcumsumexp(-1), shares(x)
    found = ops.logcumsumexp_backward(g, x, y, 1)
    assert_close(found, (weights.mH @ g.unsqueeze(-1)).squeeze(-1), rtol=1e-9, atol=1e-12)
    found = ops.logcumsumexp_jvp(x, g, 1)
    assert_close(found, (weights @ g.unsqueeze(-1)).squeeze(-1), rtol=1e-9, atol=1e-12)


ENDS = {
    "within": [1.0, -INF, 0.5, -INF, -INF, 2.0],
    "at first": [-INF, 1.0, 0.5, -1.0, 2.0, 0.0],
    "at last": [1.0, 0.0, 0.5, -1.0, 2.0, -INF],
    "infinite": [1.0, INF, 0.5, -INF, 2.0, 0.0],
}


@pytest.mark.parametrize("row", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_logcumsumexp_at_infinity(row: list[float], order: int) -> None:
    """What is -inf has no part; the rest is as if it were not there; what is inf has all."""
    x = torch.tensor(row, dtype=torch.float64)
    there = x > -INF
    some, g = x[there], torch.randn_like(x)
    step = torch.where(x.isfinite(), torch.randn_like(x), 0)

    def gradient(x: Tensor) -> Tensor:
        return ops.logcumsumexp_backward(g * there, x, x.logcumsumexp(0).detach(), 0)

    def alone(some: Tensor) -> Tensor:
        at = some.logcumsumexp(0).detach()
        last = there.cumsum(0)
        mixed = torch.zeros_like(some).index_add(0, last[there] - 1, g[there])
        return ops.logcumsumexp_backward(mixed, some, at, 0)

    def tangent(x: Tensor) -> Tensor:
        return ops.logcumsumexp_jvp(x, g * there, 0)[there]

    def tangent_alone(some: Tensor) -> Tensor:
        return ops.logcumsumexp_jvp(some, g[there], 0)

    if order == 0:
        found = gradient(x)
        assert_close(found[there], alone(some), **TIGHT)
        assert not found[~there].any()
        assert_close(tangent(x), tangent_alone(some), **TIGHT)
        return
    for ours, theirs in ((gradient, alone), (tangent, tangent_alone)):
        found = directional(ours, order)(x, step)
        assert_close(found, directional(theirs, order)(some, step[there]), rtol=1e-9, atol=1e-11)


def test_a_first_element_is_its_own_sum() -> None:
    """At -inf too, where PyTorch's gradient is NaN and its tangent zero."""
    x, g = torch.tensor([-INF, 1.0], dtype=torch.float64), torch.tensor([2.0, 0.0]).double()
    y = x.logcumsumexp(0)
    assert_close(vjp(aten.logcumsumexp)((g,), (x, 0), y)["self"], g, rtol=0, atol=0)
    (found,) = jvp(aten.logcumsumexp)({"self": g}, (x, 0), y)
    assert_close(found, g, rtol=0, atol=0)
    at = x.clone().requires_grad_()
    assert torch.autograd.grad(at.logcumsumexp(0), at, g)[0].isnan().any()


@by_dtype
@pytest.mark.parametrize("order", [1, 2, 3])
def test_logcumsumexps_derivatives_by_differences(order: int, dtype: torch.dtype) -> None:
    """With gradients and tangents that are zero in places, where PyTorch's second is NaN."""
    x, g, step = (torch.randn(6, dtype=dtype) for _ in range(3))
    g[1:4] = 0

    def gradient(x: Tensor) -> Tensor:
        return ops.logcumsumexp_backward(g, x, x.logcumsumexp(0), 0)

    def tangent(x: Tensor) -> Tensor:
        return ops.logcumsumexp_jvp(x, g, 0)

    for function in (gradient, tangent):
        at = torch.zeros((), dtype=torch.float64, requires_grad=True)

        def along(t: Tensor, function: Any = function) -> Tensor:
            return directional(function, order - 1)(x + t * step, step) + 0 * t

        assert gradcheck(along, at, atol=1e-6)


def test_pytorchs_second_derivative_at_a_zero_gradient() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    for first, wrong in (
        (torch.autograd.grad(x.logcumsumexp(0), x, g, create_graph=True)[0], True),
        (ops.logcumsumexp_backward(g, x, x.logcumsumexp(0), 0), False),
    ):
        second = torch.autograd.grad(first.sum(), (x, g))
        assert any(v.isnan().any() for v in second) == wrong


def test_pytorchs_tangent_where_a_row_ends_far_above_its_start() -> None:
    """It scales by the largest of the whole row, and adds 1e-13."""
    x = torch.tensor([0.0, 1.0, 40.0], dtype=torch.float64)
    t = torch.ones_like(x)
    (found,) = jvp(aten.logcumsumexp)({"self": t}, (x, 0), x.logcumsumexp(0))
    assert_close(found, t, **TIGHT)
    with forward_ad.dual_level():
        theirs = forward_ad.unpack_dual(forward_ad.make_dual(x, t).logcumsumexp(0)).tangent
    assert theirs is not None
    assert theirs[0] < 0.01


# --- graphs ---------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cumprod_backward": lambda g, x: ops.cumprod_backward(g, x, -1, x.cumprod(-1)),
    "cumprod_jvp": lambda t, x: ops.cumprod_jvp(t, x, x.cumprod(-1), -1),
    "logcumsumexp_backward": lambda g, x: ops.logcumsumexp_backward(g, x, x.logcumsumexp(-1), -1),
    "logcumsumexp_jvp": lambda t, x: ops.logcumsumexp_jvp(x, t, -1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_graph_grows_with_the_logarithm_of_the_size(call: Any) -> None:
    def nodes(size: int) -> int:
        x = torch.randn(2, size)
        return len(make_fx(call, decompositions())(x, x).graph.nodes)

    small, twice, large = (nodes(size) for size in (64, 128, 4096))
    assert nodes(3) < 45
    assert large - small == 6 * (twice - small)
    assert twice - small < 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_graph_of_a_symbolic_size_holds_for_every_size(call: Any) -> None:
    example = [torch.randn(2, 6, dtype=torch.float64) for _ in range(2)]
    traced = make_fx(call, decompositions(), tracing_mode="symbolic")(*example)
    for size, offset in product((2, 3, 257, 1030), (0, 1)):
        g, x = torch.randn(2, 2, size + offset, dtype=torch.float64)
        assert_close(traced(g, x), call(g, x), **TIGHT)
