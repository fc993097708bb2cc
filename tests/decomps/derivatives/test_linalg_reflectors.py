"""Products of reflectors, of LU factors and of three, where PyTorch's operator database does not
come: against autograd of plain products, and by the number of their operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass.decomps.registry import decompositions, rules
from normpass.decomps.table.binding import jvp, vjp

if TYPE_CHECKING:
    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
aten = torch.ops.aten
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)


# --- reflectors


def unrolled(input: Tensor, tau: Tensor) -> Tensor:
    """The whole product, one reflector after the other."""
    m = input.shape[-2]
    product = torch.eye(m, dtype=input.dtype)
    for i in range(tau.shape[-1]):
        v = input[..., i : i + 1].tril(-1 - i) + torch.eye(m, dtype=input.dtype)[:, i : i + 1]
        product = product - product @ v @ (tau[..., i, None, None] * v.mH)
    return product


def reflectors(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Small, of which the first is none, as its tau is zero, and the second has no inverse."""
    input, tau = torch.randn(shape, dtype=dtype) / 2, torch.randn(*shape[:-2], k, dtype=dtype)
    if k > 1:
        v = input[..., 2:, 1]
        tau[..., 0] = 0
        tau[..., 1] = 1 / (1 + (v * v.conj()).sum(-1))
    return input, tau


SHAPES = [((5, 3), 2), ((5, 3), 3), ((4, 4), 4), ((2, 3, 5, 4), 3), ((4, 2), 0), ((0, 5, 3), 2)]
by_shape = pytest.mark.parametrize(("shape", "k"), SHAPES, ids=str)


def pulled(f: Any, xs: tuple[Tensor, ...], g: Tensor, h: tuple[Tensor, ...]) -> Any:
    """Gradients, and the gradients of these in a direction."""
    xs = tuple(x.detach().requires_grad_() for x in xs)
    first = f(xs, g)
    nothing = 0 * sum(x.sum() for x in xs)
    again = torch.autograd.grad([v + nothing for v in first], xs, h)
    return first, again


@by_dtype
@by_shape
def test_householder_product(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    """To second order, at reflectors of which PyTorch's own formula makes NaN or nothing."""
    xs = reflectors(shape, k, dtype)
    n, g = shape[-1], torch.randn(shape, dtype=dtype)
    h = tuple(map(torch.randn_like, xs))
    y = torch.linalg.householder_product(*xs)
    assert_close(y, unrolled(*xs)[..., :n].expand(shape), **TIGHT)

    def ours(xs: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, ...]:
        return ops.householder_product_backward(g, y, *xs)

    def loop(xs: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, ...]:
        y = unrolled(*xs)[..., :n].expand(shape) + 0 * xs[1].sum() + 0 * xs[0].sum()
        return torch.autograd.grad(y, xs, g, create_graph=True)

    assert_close(pulled(ours, xs, g, h), pulled(loop, xs, g, h), **TIGHT)
    assert ops.householder_product_backward(None, y, *xs) == (None, None)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(xs, h, strict=True)]
        expected = forward_ad.unpack_dual(unrolled(*duals)[..., :n].expand(shape)).tangent
    found = ops.householder_product_jvp(*h, y, *xs)
    assert_close(found, torch.zeros_like(y) if expected is None else expected, **TIGHT)


def test_pytorchs_gradient_at_a_reflector_without_an_inverse() -> None:
    """Is not a number: it divides by what is zero there."""
    input, tau = torch.ones(3, 2, dtype=torch.float64), torch.tensor([0.5, 0.5]).double()
    leaves = input.requires_grad_(), tau.requires_grad_()
    y = torch.linalg.householder_product(*leaves)
    theirs = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert any(not v.isfinite().all() for v in theirs)
    args = {"input": input.detach(), "tau": tau.detach()}
    found = vjp(aten.linalg_householder_product)((torch.ones_like(y),), args, y.detach())
    expected = torch.autograd.grad(unrolled(*leaves)[:, :2], leaves, torch.ones_like(y))
    assert_close(tuple(found.values()), expected, **TIGHT)


@by_dtype
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("transpose", [True, False], ids=["adjoint", "plain"])
@by_shape
def test_ormqr(
    shape: tuple[int, ...], k: int, transpose: bool, left: bool, dtype: torch.dtype
) -> None:
    input, tau = reflectors((*shape[:-1], k), k, dtype)
    m = shape[-2]
    other = torch.randn(*shape[:-2], *((m, 3) if left else (3, m)), dtype=dtype)
    xs, g = (input, tau, other), torch.randn_like(other)
    h = tuple(map(torch.randn_like, xs))

    def product(input: Tensor, tau: Tensor, other: Tensor) -> Tensor:
        Q = unrolled(input, tau)
        Q = Q.mH if transpose else Q
        return (Q @ other if left else other @ Q) + 0 * (tau.sum() + input.sum())

    def ours(xs: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, ...]:
        return ops.ormqr_backward(g, g, *xs, left, transpose, [True] * 3)

    def loop(xs: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(product(*xs), xs, g, create_graph=True)

    assert_close(pulled(ours, xs, g, h), pulled(loop, xs, g, h), **TIGHT)
    assert ops.ormqr_backward(None, g, *xs, left, transpose, [True] * 3) == (None,) * 3


def test_the_graph_does_not_grow_with_the_number_of_reflectors() -> None:
    def nodes(f: Any, *args: Tensor) -> int:
        return len(make_fx(f, decompositions())(*args).graph.nodes)

    def gradients(g: Tensor, input: Tensor, tau: Tensor) -> Any:
        return vjp(aten.linalg_householder_product)((g,), (input, tau), g)

    def tangent(t: Tensor, input: Tensor, tau: Tensor) -> Any:
        return jvp(aten.linalg_householder_product)((t, tau), (input, tau), t)

    def of_ormqr(g: Tensor, input: Tensor, tau: Tensor) -> Any:
        return vjp(aten.ormqr)((g,), (input, tau, g), g)

    for function in (gradients, tangent, of_ormqr):
        few, many = ((torch.randn(9, k), torch.randn(9, k), torch.randn(k)) for k in (2, 8))
        assert nodes(function, *few) == nodes(function, *many) < 60


# --- LU


@by_dtype
@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (2, 3, 5), (0, 0), (3, 0), (0, 3)], ids=str)
def test_lu_without_pivots(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Which only GPUs compute: as with pivots, of the matrix in the order that they say."""
    A, k = torch.randn(shape, dtype=dtype), min(shape[-2:])
    P, L, U = torch.linalg.lu(A)
    packed, pivots = torch.linalg.lu_factor(P.mT @ A)
    none = A.new_empty(0)
    gL, gU, dA = torch.randn_like(L), torch.randn_like(U), torch.randn_like(A)
    for grads in ((gL, gU), (gL, None), (None, gU)):
        expected = ops.linalg_lu_backward(*grads, P, L, U, True)
        found = ops.linalg_lu_backward(*grads, none, L, U, False)
        assert_close(P @ found, expected, **TIGHT)
    assert ops.linalg_lu_backward(None, None, P, L, U, True) is None
    expected = ops.linalg_lu_jvp(P @ dA, P, L, U, True)
    assert_close(ops.linalg_lu_jvp(dA, none, L, U, False), expected, **TIGHT)
    g = torch.randn_like(A)
    found = ops.lu_factor_ex_backward(g, packed, pivots, False)
    assert_close(found, ops.linalg_lu_backward(g[..., :k], g[..., :k, :], P, L, U, False), **TIGHT)
    found = ops.lu_factor_ex_jvp(dA, packed, pivots, False)
    dL, dU = (torch.zeros_like(A) for _ in range(2))
    dL[..., :k], dU[..., :k, :] = expected
    assert_close(found, dL + dU, **TIGHT)


# --- other solves and products


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("transpose", [False, True])
def test_triangular_solve_with_a_sparse_matrix(transpose: bool) -> None:
    A = torch.tensor([[2.0, 1, 0], [0, 3, 1], [0, 0, 4]], dtype=torch.float64)
    B, g = (torch.randn(3, 2, dtype=torch.float64) for _ in range(2))
    flags = (True, transpose, False)
    args = (B, A.to_sparse_csr(), *flags)
    X, _ = aten.triangular_solve(B, A, *flags)
    expected = vjp(aten.triangular_solve)((g, None), (B, A, *flags), (X, A))
    assert_close(vjp(aten.triangular_solve)((g, None), args, (X, A)), expected, **TIGHT)


@by_dtype
def test_solve_jvp_of_one_right_hand_side(dtype: torch.dtype) -> None:
    A, b = torch.randn(2, 3, 3, dtype=dtype) + 4 * torch.eye(3), torch.randn(2, 3, dtype=dtype)
    x, tangents = torch.linalg.solve(A, b), (torch.randn_like(A), torch.randn_like(b))
    _, expected = torch.func.jvp(torch.linalg.solve, (A, b), tangents)
    assert_close(ops.solve_jvp(x, A, *tangents), expected, **TIGHT)
    assert ops.solve_jvp(x, A, None, None) is None


@by_dtype
def test_a_bilinear_layer(dtype: torch.dtype) -> None:
    """PyTorch has no derivative of a complex one."""
    factors = [torch.randn(s, dtype=dtype).requires_grad_() for s in ((3, 4), (5, 4, 2), (3, 2))]
    axes = ([1, 3], [0], [1, 2], [2, 3])
    y = torch.einsum("ni,oij,nj->no", *factors)
    g = torch.randn_like(y)
    expected = torch.autograd.grad(y, factors, g)
    assert_close(ops._trilinear_backward(g, *factors, *axes, [True] * 3), expected, **TIGHT)
    for k in range(3):
        given = [None if j == k else x for j, x in enumerate(factors)]
        alone = ops._trilinear_backward(g, *given, *axes, [j == k for j in range(3)])
        assert_close(alone[k], expected[k], **TIGHT)
        assert alone[k - 1] is alone[k - 2] is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)], ids=str)
def test_linear_double_backward(shape: tuple[int, ...]) -> None:
    """Of a row, of several, of a batch: each gradient alone too."""
    x, g = torch.randn(*shape, 4).double(), torch.randn(*shape, 2).double()
    xs = tuple(v.requires_grad_() for v in (x, g, torch.randn(2, 4).double()))
    results = (
        g @ xs[2],
        torch.einsum("...o,...i->oi", g, x),
        g.sum(tuple(range(len(shape)))) if shape else g * 1,
    )
    hs = [torch.randn_like(r) for r in results]
    for there in ([0, 1, 2], [0], [1], [2]):
        given = [h if k in there else None for k, h in enumerate(hs)]
        expected = torch.autograd.grad(
            [results[k] for k in there],
            xs,
            [hs[k] for k in there],
            retain_graph=True,
            allow_unused=True,
        )
        found = ops.linear_double_backward(given, *xs)
        assert_close(found, expected, **TIGHT)
    assert ops.linear_double_backward([None] * 3, *xs) == (None,) * 3


def test_a_distance_of_nothing() -> None:
    """Has a gradient of zero, and so have its gradients."""
    x1 = torch.randn(3, 2, dtype=torch.float64)
    x2 = torch.stack([x1[0], x1[2] + 1])
    g, res = torch.randn(3, 2, dtype=torch.float64), torch.cdist(x1, x2)
    leaves = [v.requires_grad_() for v in (g, x1, x2, res)]
    found = ops._euclidean_dist_backward(*leaves)
    again = torch.autograd.grad(found, leaves, [torch.ones_like(v) for v in found])
    assert res[0, 0] == 0
    assert all(v.isfinite().all() for v in (*found, *again))
    assert again[0][0, 0] == again[3][0, 0] == 0
