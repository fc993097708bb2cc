"""The derivatives of matrix products, solves and factorizations, against autograd's own."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass.decomps.registry import decompositions, rules

if TYPE_CHECKING:
    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
aten = torch.ops.aten
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)


# --- products


@by_dtype
@pytest.mark.parametrize("by_columns", [False, True], ids=["by rows", "by columns"])
@pytest.mark.parametrize("alpha", [1, 0.5, 2 + 1j])
@pytest.mark.parametrize("shape", [(3, 4, 2), (1, 4, 2), (3, 1, 1), (0, 2, 3), (2, 3, 0)], ids=str)
def test_mm_mat1_backward_is_autograds_own(
    shape: tuple[int, int, int], alpha: complex, by_columns: bool, dtype: torch.dtype
) -> None:
    """In its layout too."""
    if isinstance(alpha, complex) and not dtype.is_complex:
        return
    n, k, m = shape
    A = torch.randn(k, n, dtype=dtype).t() if by_columns else torch.randn(n, k, dtype=dtype)
    A, B = A.requires_grad_(), torch.randn(k, m, dtype=dtype)
    g = torch.randn(n, m, dtype=dtype)
    Y = torch.addmm(torch.zeros(n, m, dtype=dtype), A, B, alpha=alpha)
    (expected,) = torch.autograd.grad(Y, A, g)
    found = ops.mm_mat1_backward(g, B, A.shape, A.stride(), A.layout, alpha)
    assert_close(found, expected, **TIGHT)
    assert found.stride() == expected.stride()
    assert ops.mm_mat1_backward(None, B, A.shape, A.stride(), A.layout, alpha) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_mm_of_halves_is_left_to_mm(dtype: torch.dtype) -> None:
    g, B = torch.randn(3, 4).to(dtype), torch.randn(5, 4).to(dtype)

    def call(g: Tensor, B: Tensor) -> Tensor:
        return ops.mm_mat1_backward(g, B, [3, 5], [5, 1], torch.strided, 1)

    found = call(g, B)
    assert found.dtype == dtype
    assert torch.equal(found, g.mm(B.t()))
    traced = make_fx(call, decompositions())(g, B)
    assert not any("to_copy" in str(node.target) for node in traced.graph.nodes)


# --- solves

SYSTEMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "columns": ((3, 3), (3, 2), True),
    "rows": ((3, 3), (2, 3), False),
    "a vector": ((3, 3), (3,), True),
    "a batch": ((2, 3, 3), (2, 3, 2), True),
    "a batch of rows": ((2, 3, 3), (2, 4, 3), False),
    "a batch of vectors": ((2, 3, 3), (2, 3), True),
    "nothing": ((0, 0), (0, 2), True),
}
by_system = pytest.mark.parametrize(("a", "b", "left"), SYSTEMS.values(), ids=SYSTEMS)
by_order = pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])


def system(
    a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    A = torch.randn(a, dtype=dtype) + 3 * torch.eye(a[-1])
    return (A.mT.contiguous().mT if transposed else A), torch.randn(b, dtype=dtype)


@by_system
@by_dtype
@by_order
def test_linalg_solve_backward_is_autograds_own(
    a: tuple[int, ...], b: tuple[int, ...], left: bool, dtype: torch.dtype, transposed: bool
) -> None:
    """With the LU that this torch keeps, and without, where a further derivative is asked for."""
    A, B = system(a, b, dtype, transposed)
    leaves = A.requires_grad_(), B.requires_grad_()
    X = torch.linalg.solve(A, B, left=left)
    LU, pivots = torch.linalg.lu_factor(A.detach())
    gX = torch.randn_like(X)
    expected = torch.autograd.grad(X, leaves, gX)
    for given in (A, A.detach()):
        gA, gB = ops.linalg_solve_backward(gX, X.detach(), given, LU, pivots, left, True)
        assert_close((gA, gB), expected, **TIGHT)
        gA, gB = ops.linalg_solve_backward(gX, X.detach(), given, LU, pivots, left, False)
        assert_close(gA, expected[0], **TIGHT)
        assert gB is None
    assert ops.linalg_solve_backward(None, X, A, LU, pivots, left, True) == (None, None)


@by_dtype
@by_order
def test_the_lu_that_torch_keeps_is_that_of_a(dtype: torch.dtype, transposed: bool) -> None:
    """What the rules rely on. A torch for which this fails needs its own."""
    A, B = system((3, 3), (3, 2), dtype, transposed)
    _, LU, pivots, _ = aten._linalg_solve_ex(A, B)
    P, L, U = torch.lu_unpack(LU, pivots)
    assert_close(P @ L @ U, A, **TIGHT)


@by_system
@by_dtype
def test_linalg_solve_backward_has_its_own_derivative(
    a: tuple[int, ...], b: tuple[int, ...], left: bool, dtype: torch.dtype
) -> None:
    """Through A: none goes through the LU."""
    A, B = (v.requires_grad_() for v in system(a, b, dtype))
    X = torch.linalg.solve(A, B, left=left)
    gX = torch.randn_like(X).requires_grad_()
    h = torch.randn_like(A), torch.randn_like(B)
    first = torch.autograd.grad(X, (A, B), gX, create_graph=True)
    saved = (t.detach() for t in torch.linalg.lu_factor(A))
    found = ops.linalg_solve_backward(gX, X, A, *saved, left, True)
    second = (torch.autograd.grad(v, (A, B, gX), h, retain_graph=True) for v in (found, first))
    assert_close(*second, **TIGHT)


@by_system
@by_dtype
@pytest.mark.parametrize("given", list(product([True, False], repeat=2)), ids=str)
def test_linalg_solve_jvp_is_autograds_own(
    a: tuple[int, ...],
    b: tuple[int, ...],
    left: bool,
    dtype: torch.dtype,
    given: tuple[bool, bool],
) -> None:
    A, B = system(a, b, dtype)
    tangents = [
        torch.randn_like(v) if there else None for v, there in zip((A, B), given, strict=True)
    ]
    X = torch.linalg.solve(A, B, left=left)
    found = ops.linalg_solve_jvp(*tangents, X, *torch.linalg.lu_factor(A), left)
    if not any(given):
        assert found is None
        return
    with forward_ad.dual_level():
        duals: list[Any] = [
            v if t is None else forward_ad.make_dual(v, t)
            for v, t in zip((A, B), tangents, strict=True)
        ]
        expected = forward_ad.unpack_dual(torch.linalg.solve(*duals, left=left)).tangent
    assert_close(found, expected, **TIGHT)


# --- factorizations


@by_dtype
@pytest.mark.parametrize("upper", [False, True], ids=["lower", "upper"])
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (2, 3, 3), (0, 0)], ids=str)
def test_cholesky_backward_is_autograds_own_to_second_order(
    shape: tuple[int, ...], upper: bool, dtype: torch.dtype
) -> None:
    M = torch.randn(shape, dtype=dtype)
    A = (M @ M.mH + torch.eye(shape[-1])).requires_grad_()
    L = torch.linalg.cholesky(A, upper=upper)
    gL = torch.randn_like(L).requires_grad_()
    expected = torch.autograd.grad(L, A, gL, create_graph=True)[0]
    found = ops.cholesky_backward(gL, upper, L)
    assert_close(found, expected, **TIGHT)
    v = torch.randn_like(A)
    second = (torch.autograd.grad(r, (A, gL), v, retain_graph=True) for r in (found, expected))
    assert_close(*second, **TIGHT)
    assert ops.cholesky_backward(None, upper, L) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_halves_are_solved_in_float32(dtype: torch.dtype) -> None:
    """Which LAPACK cannot do with them."""
    L, gL = (torch.randn(3, 3).tril() + 3 * torch.eye(3)).to(dtype), torch.randn(3, 3).to(dtype)
    found = ops.cholesky_backward(gL, False, L)
    assert found.dtype == dtype
    expected = ops.cholesky_backward(gL.double(), False, L.double())
    assert_close(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
