"""The derivative formulas of RMS norm, against primitives and against autograd of the operator.

rstd is differentiated as the function of x that it is: the formulas take it as an argument.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.testing import assert_close

from normpass.decomps.registry import rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
backward = ops.infinitely_differentiable_native_rms_norm_backward
EPS = 0.25
MASK = [True, True]
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
EVERY_CHOICE = list(itertools.product((True, False), repeat=2))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def primitives(x: Tensor, w: Tensor | None, d: Sequence[int]) -> tuple[Tensor, Tensor]:
    """y and rstd as functions of x and weight"""
    return oracles.rms_norm(x, d, w, EPS), reciprocal(x, d)


def reciprocal(x: Tensor, d: Sequence[int]) -> Tensor:
    return ((x * x).mean([*range(-len(d), 0)], keepdim=True) + EPS) ** -0.5


def stock(x: Tensor, w: Tensor | None, d: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._fused_rms_norm(x, d, w, EPS)


by_shape = pytest.mark.parametrize(
    ("shape", "d"),
    [((3, 4, 5), (5,)), ((3, 4, 5), (4, 5)), ((7,), (7,)), ((2, 3, 2, 4), (2, 4))],
    ids=str,
)
by_given = pytest.mark.parametrize("given", EVERY_CHOICE, ids=str)
affine = pytest.mark.parametrize("affine", [True, False], ids=["weight", "no weight"])
by_function = pytest.mark.parametrize("function", [primitives, stock])


def arguments(shape: Sequence[int], d: Sequence[int], affine: bool) -> tuple[Any, ...]:
    """x and weight, a tangent or gradient of each, and one of rstd"""
    w, wt = (normal(*d), normal(*d)) if affine else (None, None)
    n = [*shape[: len(shape) - len(d)], *(1,) * len(d)]
    return normal(*shape), w, normal(*shape), wt, normal(*n)


def some(given: Sequence[bool], *values: Tensor | None) -> list[Tensor | None]:
    return [v if there else None for there, v in zip(given, values, strict=True)]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, where None stands for zeros."""
    there = [v for v in (found, expected) if v is not None]
    if there:
        zeros = torch.zeros_like(there[0])
        assert_close(*(zeros if v is None else v for v in (found, expected)), **TIGHT)


@by_shape
@affine
@by_given
@by_function
def test_the_backward_takes_gradients_of_the_result_and_of_rstd(
    shape: tuple[int, ...],
    d: tuple[int, ...],
    affine: bool,
    given: tuple[bool, ...],
    function: Callable[..., Any],
) -> None:
    x, w, g, _, h = arguments(shape, d, affine)
    gradients = some(given, g, h)
    found = backward(*gradients, x, d, reciprocal(x, d), w, MASK)
    leaves = [v.clone().requires_grad_() for v in (x, w) if v is not None]
    outputs = function(leaves[0], leaves[1] if affine else None, d)
    total = 0 * leaves[0].sum() + sum(
        (y * v).sum() for y, v in zip(outputs, gradients, strict=True) if v is not None
    )
    expected = torch.autograd.grad(total, leaves, allow_unused=True)
    for ours, theirs in zip(found, (*expected, None)[:2], strict=True):
        assert_same(ours, theirs)
    if not any(given):
        assert found == (None, None)


@by_given
def test_a_mask_leaves_out_what_is_not_wanted(given: tuple[bool, ...]) -> None:
    x, w, g, _, h = arguments((3, 4), (4,), affine=True)
    masked, whole = (backward(g, h, x, [4], reciprocal(x, [4]), w, m) for m in (given, MASK))
    for wanted, m, all_of_it in zip(given, masked, whole, strict=True):
        assert (m is None) is not wanted
        assert not wanted or torch.equal(m, all_of_it)


@by_shape
@affine
@by_given
@by_function
def test_the_jvps_are_the_forward_derivatives(
    shape: tuple[int, ...],
    d: tuple[int, ...],
    affine: bool,
    given: tuple[bool, ...],
    function: Callable[..., Any],
) -> None:
    x, w, *tangents, _ = arguments(shape, d, affine)
    t, wt = some(given, *tangents)
    rstd = reciprocal(x, d)
    found = ops.rms_norm_jvp(x, t, w, wt, rstd, d), ops.rms_norm_rstd_jvp(x, t, rstd, d)
    with fwAD.dual_level():
        pairs = ((x, t), (w, wt))
        duals = [p if v is None else fwAD.make_dual(p, v) for p, v in pairs]
        for ours, result in zip(found, function(*duals, d), strict=True):
            assert_same(ours, fwAD.unpack_dual(result).tangent)
    if t is None:
        assert found[1] is None
        assert wt is not None or found[0] is None


@by_shape
def test_derivatives_of_the_backward_are_those_of_the_norm(
    shape: tuple[int, ...], d: tuple[int, ...]
) -> None:
    """The second and the third of it, in reverse and in forward mode."""
    x, w, g, vw, h = arguments(shape, d, affine=True)
    v = normal(*shape)

    def total(found: Sequence[Tensor]) -> Tensor:
        return (found[0] * v).sum() + (found[1] * vw).sum()

    def ours(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return total(backward(g, h, x, d, reciprocal(x, d), w, MASK))

    def right(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return total(torch.func.vjp(lambda x, w: primitives(x, w, d), x, w)[1]((g, h)))

    def twice(f: Callable[..., Tensor]) -> Callable[..., Any]:
        gradient = torch.func.grad(f, argnums=(0, 1, 2))
        return torch.func.grad(lambda *a: sum((u**2).sum() for u in gradient(*a)))

    for order in (torch.func.grad, torch.func.jacfwd):
        both = (order(f, argnums=(0, 1, 2))(x, w, g) for f in (ours, right))
        assert_close(*both, **TIGHT)
    assert_close(twice(ours)(x, w, g), twice(right)(x, w, g), **TIGHT)


@by_shape
def test_derivatives_of_the_jvps_are_those_of_the_norm(
    shape: tuple[int, ...], d: tuple[int, ...]
) -> None:
    x, w, t, wt, _ = arguments(shape, d, affine=True)
    s = normal(*shape)

    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = reciprocal(x, d)
        return ops.rms_norm_jvp(x, t, w, wt, rstd, d), ops.rms_norm_rstd_jvp(x, t, rstd, d)

    def right(x: Tensor) -> Any:
        return torch.func.jvp(lambda x, w: primitives(x, w, d), (x, w), (t, wt))[1]

    for order in (
        lambda f: torch.func.jvp(f, (x,), (s,))[1],
        lambda f: torch.func.grad(lambda x: sum((u**3).sum() for u in f(x)))(x),
    ):
        assert_close(order(ours), order(right), **TIGHT)


def test_results_have_the_dtypes_of_their_arguments() -> None:
    """A bfloat16 x with a float32 weight and rstd."""
    x, g = (normal(4, 3).bfloat16() for _ in range(2))
    w, rstd = normal(3).float(), reciprocal(x.float(), [3])
    found = backward(g, rstd, x, [3], rstd, w, MASK)
    assert [v.dtype for v in found] == [torch.bfloat16, torch.float32]
    assert ops.rms_norm_jvp(x, g, w, w, rstd, [3]).dtype == torch.bfloat16
    assert ops.rms_norm_rstd_jvp(x, g, rstd, [3]).dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, w, rstd = normal(*shape), normal(shape[1]), normal(shape[0], 1)
    dx, dw = backward(x, rstd, x, shape[1:], rstd, w, MASK)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
    assert not dw.any()
    assert ops.rms_norm_jvp(x, x, w, w, rstd, shape[1:]).shape == x.shape
