"""The derivatives of sums, products, logsumexp and vector norms, against autograd's own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db

from normpass.decomps.registry import derivative, rules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
DTYPES = [torch.float64, torch.complex128]
SHAPES_AND_DIMS: list[tuple[tuple[int, ...], list[int]]] = [
    ((), []),
    ((), [0]),
    ((5,), [-1]),
    ((3, 4), []),
    ((3, 4), [0]),
    ((2, 3, 4), [2, 0]),
    ((2, 3, 4), [0, 1, -1]),
]
by_dim = pytest.mark.parametrize(("shape", "dim"), SHAPES_AND_DIMS, ids=str)
by_keepdim = pytest.mark.parametrize("keepdim", [False, True], ids=["reduced", "keepdim"])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["real", "complex"])
by_p = pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 2.5, 3, None, math.inf, -1, -math.inf])


def vjp(y: Tensor, x: Tensor, g: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, g, retain_graph=True)[0]


def tangent(function: Any, x: Tensor, t: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, t))).tangent


def infos(name: str, dtype: torch.dtype) -> list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]:
    """The differentiable samples of an operator in torch's own tests."""
    found = [info for info in op_db if info.full_name == name]
    assert found, name
    return [
        (sample.input, sample.args, sample.kwargs)
        for info in found
        for sample in info.sample_inputs("cpu", dtype, requires_grad=True)
        if sample.kwargs.get("dtype") is None
    ]


@by_dtype
def test_sum_backward_is_autograds_own(dtype: torch.dtype) -> None:
    for x, args, kwargs in infos("sum", dtype):
        dim, keepdim = kwargs.get("dim", args[0] if args else None), kwargs.get("keepdim", False)
        y = x.sum(*args, **kwargs)
        g = torch.randn_like(y)
        dim = [dim] if isinstance(dim, int) else dim
        found = ops.sum_backward(g, x.shape, dim, keepdim)
        assert_close(found, vjp(y, x, g), **TIGHT)
        assert found.untyped_storage().data_ptr() != g.untyped_storage().data_ptr()


@by_dtype
def test_logsumexp_and_its_tangent_are_autograds_own(dtype: torch.dtype) -> None:
    for x, args, kwargs in infos("logsumexp", dtype):
        keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
        dim = [args[0]] if isinstance(args[0], int) else args[0]
        y = x.logsumexp(dim, keepdim)
        g, t, detached = torch.randn_like(y), torch.randn_like(x), x.detach()
        found = ops.logsumexp_backward(g, detached, y.detach(), dim, keepdim)
        assert_close(found, vjp(y, x, g), **TIGHT)
        expected = tangent(lambda x, d=dim, k=keepdim: x.logsumexp(d, k), detached, t)
        # Complex exponentials may nearly cancel.
        assert_close(ops.logsumexp_jvp(detached, t, dim, keepdim), expected, rtol=1e-8, atol=1e-9)


def test_a_large_x_has_a_finite_logsumexp_jvp() -> None:
    x, t = torch.tensor([[900.0, 899.0, -900.0]]).double(), torch.randn(1, 3).double()
    assert_close(ops.logsumexp_jvp(x, t, [1], False), (x.softmax(1) * t).sum(1), **TIGHT)


# --- products ------------------------------------------------------------------------------------


def holed(shape: Sequence[int], dtype: torch.dtype, zeros: int) -> Tensor:
    """Normal numbers, of which the last `zeros` of every row are zero, in an order of its own."""
    x = torch.randn(shape, dtype=dtype)
    if zeros and x.dim():
        x[..., -zeros:] = 0
        x = x[..., torch.tensor([2, 0, 4, 1, 3])[: x.shape[-1]].argsort()]
    return x.requires_grad_()


def product(x: Tensor, dim: int | None) -> Tensor:
    """By multiplications."""
    if dim is None or x.dim() == 0:
        x, dim = x.reshape(-1), 0
    y = torch.ones_like(x.sum(dim))
    for part in x.unbind(dim):
        y = y * part
    return y


@by_dtype
@by_keepdim
@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((), None), ((), 0), ((5,), None), ((5,), 0), ((2, 5), -1), ((2, 5), None), ((3, 2, 5), 1)],
    ids=str,
)
def test_a_product_has_the_products_of_the_others_to_second_order(
    shape: tuple[int, ...], dim: int | None, zeros: int, keepdim: bool, dtype: torch.dtype
) -> None:
    """Where one, two and three are zero as well; of multiplications, and autograd's own."""
    x = holed(shape, dtype, zeros)
    y = product(x, dim)
    g = torch.randn_like(y).requires_grad_()
    first = torch.autograd.grad(y, x, g, create_graph=True)[0]
    v = torch.randn_like(x)
    second = torch.autograd.grad(first, (x, g), v, allow_unused=True, materialize_grads=True)
    if dim is None:
        found = ops.prod_backward(g, x, y.detach())
        own = x.prod()
    else:
        wide = keepdim and x.dim() > 0
        found = ops.prod_backward(g.unsqueeze(dim) if wide else g, x, y.detach(), dim, keepdim)
        own = x.prod(dim)
    assert_close(found, first, **TIGHT)
    assert_close(found, vjp(own, x, g), **TIGHT)
    assert_close(torch.autograd.grad(found, (x, g), v), second, **TIGHT)


@pytest.mark.parametrize(("shape", "dim"), [((0,), 0), ((2, 0), 1), ((0, 2), 1)], ids=str)
def test_a_product_of_nothing_has_an_empty_gradient(shape: tuple[int, ...], dim: int) -> None:
    x = torch.ones(shape)
    assert ops.prod_backward(x.prod(dim), x, x.prod(dim), dim, False).shape == shape
    assert ops.prod_backward(x.prod(), x, x.prod()).shape == shape


# --- norms ---------------------------------------------------------------------------------------


@by_dim
@by_keepdim
@by_dtype
@by_p
@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # torch 2.15's own norm
def test_a_norm_and_its_tangent_are_autograds_own(
    shape: tuple[int, ...], dim: list[int], keepdim: bool, dtype: torch.dtype, p: float | None
) -> None:
    x = torch.randn(shape, dtype=dtype).requires_grad_()

    def own(x: Tensor) -> Tensor:
        return torch.ops.aten.norm.ScalarOpt_dim(x, p, dim, keepdim)

    y = own(x)
    g, t = torch.randn_like(y), torch.randn_like(x)
    rest = (p, y.detach(), dim, keepdim)
    found = ops.norm_backward(g, x.detach(), *rest)
    expected = torch.autograd.grad(y, x, g, allow_unused=True)[0]
    assert (found is None) == (p == 0)
    if found is not None:
        assert_close(found, expected, **TIGHT)
    assert_close(ops.norm_jvp(x.detach(), t, *rest), tangent(own, x.detach(), t), **TIGHT)
    if not dim and not keepdim:
        rest = rest[:2]
        assert_close(ops.norm_backward(g, x.detach(), *rest), found, **TIGHT)
        assert_close(ops.norm_jvp(x.detach(), t, *rest), tangent(own, x.detach(), t), **TIGHT)


@by_p
@by_dtype
def test_zeros_nan_and_infinities_come_through_a_norm_as_in_eager(
    p: float | None, dtype: torch.dtype
) -> None:
    rows = [[0, 0, 0], [1, 0, -2], [2, -2, 1], [math.nan, 1, 0], [0, -1, 0]]
    x = torch.tensor(rows, dtype=dtype).requires_grad_()
    y = torch.ops.aten.norm.ScalarOpt_dim(x, p, [1])
    g = torch.randn_like(y)
    found = ops.norm_backward(g, x.detach(), p, y.detach(), [1], False)
    expected = torch.autograd.grad(y, x, g, allow_unused=True)[0]
    if p != 0:
        assert_close(found, expected, equal_nan=True, **TIGHT)


@by_p
@by_dtype
def test_a_norm_of_zeros_has_zero_derivatives_of_every_order(
    p: float | None, dtype: torch.dtype
) -> None:
    """Where autograd's own second derivative is NaN."""
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    first = ops.norm_backward(y + 1, x, p, y, [1], False)
    if p == 0:
        assert first is None
        return
    t = torch.randn_like(x)
    second = torch.autograd.grad(first, (x, y), t, allow_unused=True, materialize_grads=True)
    along = ops.norm_jvp(x, t, p, y, [1], False)
    assert not any(v.any() for v in (first, *second, along))


@pytest.mark.parametrize("p", [2, 2.5, 3, 4])
def test_a_norms_second_derivative_is_right_where_an_element_is_zero(p: float) -> None:
    """(p - 1) / norm * (diag(r^(p - 2)) - s s^T),  r = |x| / norm,  s = sgn(x) * r^(p - 1).

    Autograd's own is NaN there for p = 2.5.
    """
    x = torch.tensor([1.0, 0.0, -2.0, 0.5], dtype=torch.float64)

    def first(x: Tensor) -> Tensor:
        norm = (x.abs() ** p).sum() ** (1 / p)
        return ops.norm_backward(torch.ones_like(norm), x, p, norm)

    norm = (x.abs() ** p).sum() ** (1 / p)
    r = x.abs() / norm
    s = x.sgn() * r ** (p - 1)
    expected = (p - 1) / norm * (torch.diag(r ** (p - 2)) - s.outer(s))
    assert_close(torch.func.jacrev(first)(x), expected, **TIGHT)
    assert_close(torch.func.jacfwd(first)(x), expected, **TIGHT)


def test_the_forward_derivative_of_a_norm_of_all_has_the_shape_of_the_norm() -> None:
    """Where that of aten.norm.Scalar of more axes than one fails, in torch 2.13."""
    x, t = torch.randn(2, 2, 3, dtype=torch.float64).unbind()
    found = ops.norm_jvp(x, t, 3, x.norm(3))
    assert_close(found, torch.func.jvp(lambda x: x.flatten().norm(3), (x,), (t,))[1], **TIGHT)


@by_dtype
@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, math.inf])
def test_a_norms_second_derivative_goes_through_the_norm(dtype: torch.dtype, p: float) -> None:
    """Of the formula with the norm as a function of x, by finite differences."""

    def first(x: Tensor, g: Tensor) -> Tensor:
        return ops.norm_backward(g, x, p, torch.linalg.vector_norm(x, p, 1), [1], False)

    x, g = torch.randn(2, 3, dtype=dtype), torch.randn(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(first, (x.requires_grad_(), g.requires_grad_()))


@pytest.mark.parametrize("p", [math.inf, -math.inf])
def test_three_that_are_the_largest_have_a_third_each(p: float) -> None:
    """In the precision of x: the number of them is an integer, and 1 / 3 of integers is float32."""
    x = torch.tensor([2, -2, 2], dtype=torch.float64)
    found = ops.norm_backward(torch.ones((), dtype=torch.float64), x, p, x[0], [0], False)
    assert_close(found, x / 6, rtol=1e-15, atol=0)


def test_what_is_not_given_has_no_derivative() -> None:
    x, y = torch.randn(3, 4), torch.randn(3)
    assert derivative("sum_backward")(None, [3, 4], [1], False) is None
    assert ops.logsumexp_backward(None, x, y, [1], False) is None
    assert ops.logsumexp_jvp(x, None, [1], False) is None
    assert ops.prod_backward(None, x, y[0]) is None
    assert ops.prod_backward(None, x, y, 1, False) is None
    for p in (1, 2, 3, math.inf):
        assert ops.norm_backward(None, x, p, y, [1], False) is None
        assert ops.norm_jvp(x, None, p, y, [1], False) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """The same numbers in float64, rounded once."""
    x, g = torch.rand(3, 200).to(dtype), torch.randn(3).to(dtype)
    y = x.double().norm(3, 1).to(dtype)
    found, exact = (
        ops.norm_backward(*(v.to(d) for v in (g, x)), 3, y.to(d), [1], False)
        for d in (dtype, torch.float64)
    )
    assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
