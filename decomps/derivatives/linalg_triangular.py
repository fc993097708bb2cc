"""Systems with a triangular matrix: nothing but its triangle is read, or has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from normpass.decomps.manual import Gradient, Mask, Tangent, manual


def _triangle(x: Tensor, upper: bool, unitriangular: bool) -> Tensor:
    """What a solver reads of a matrix, but for a diagonal of ones."""
    return x.triu(int(unitriangular)) if upper else x.tril(-int(unitriangular))


def _solve(A: Tensor, B: Tensor, upper: bool, left: bool, unitriangular: bool) -> Tensor:
    return solve_triangular(A, B, upper=upper, left=left, unitriangular=unitriangular)


def _large(A: Tensor) -> Tensor:
    """With a diagonal that is not small."""
    return A + 4 * torch.eye(A.shape[-1], dtype=A.dtype)


def _solved(
    A: Tensor, B: Tensor, upper: bool, left: bool, unitriangular: bool
) -> dict[str, Tensor]:
    return {"A": _large(A), "X": _solve(_large(A), B, upper, left, unitriangular)}


@manual("grad: *b n k, A: *b n n, X: *b n k -> dA: *b n n, dB: *b n k", sample=_solved, of=_solve)
def linalg_solve_triangular_backward(
    grad: Gradient,
    A: Tensor,
    X: Tensor,
    upper: bool,
    left: bool,
    unitriangular: bool,
    output_mask: Mask,
) -> tuple[Tensor, Tensor]:
    """A X = B:  gB = A^-H gX,  gA = the triangle of -gB X^H;  X A = B:  gX A^-H,  -X^H gB"""
    gB = _solve(A.mH, grad, not upper, left, unitriangular)
    gA = gB @ X.mH if left else X.mH @ gB
    return -_triangle(gA, upper, unitriangular), gB


@manual("A_t: *b n n, B_t: *b n k, A: *b n n, X: *b n k -> X_t: *b n k", sample=_solved, of=_solve)
def linalg_solve_triangular_forward_AD(
    A_t: Tangent, B_t: Tangent, A: Tensor, X: Tensor, upper: bool, left: bool, unitriangular: bool
) -> Tensor:
    """A X = B:  dX = A^-1 (dB - dA X),  dA the triangle of it;  X A = B:  (dB - X dA) A^-1"""
    dA = _triangle(A_t, upper, unitriangular)
    dB = B_t - (dA @ X if left else X @ dA)
    return _solve(A, dB, upper, left, unitriangular)


# --- triangular_solve, which transposes ----------------------------------------------------------


def _op(A: Tensor, transpose: bool) -> Tensor:
    A = A if A.layout == torch.strided else A.to_dense()
    return A.mT if transpose else A


def _solution(B: Tensor, A: Tensor, upper: bool, transpose: bool, unitriangular: bool) -> Tensor:
    """triangular_solve's, which warns that it is deprecated."""
    upper = upper != transpose
    return _solve(_op(A, transpose), B, upper, True, unitriangular)


def _with_solution(names: str, B: Tensor, A: Tensor, *flags: bool) -> dict[str, Tensor]:
    return dict(zip(names, (_large(A), _solution(B, _large(A), *flags)), strict=True))


@manual(
    "grad_x: *b n k, grad_m: *b n n, b: *b n k, a: *b n n, x: *b n k -> db: *b n k, da: *b n n",
    sample=lambda b, a, upper, transpose, unitriangular: _with_solution(
        "ax", b, a, upper, transpose, unitriangular
    ),
    of=lambda b, a, upper, transpose, unitriangular: (
        _solution(b, a, upper, transpose, unitriangular),
        a.clone(),
    ),
)
def triangular_solve_backward(
    grad_x: Gradient,
    grad_m: Gradient,
    b: Tensor,
    a: Tensor,
    x: Tensor,
    upper: bool,
    transpose: bool,
    unitriangular: bool,
    output_mask: Mask,
) -> tuple[Tensor, Tensor]:
    """op(A) X = B, and a copy of A:  as linalg_solve_triangular, gA = op(its gA) + grad_m"""
    mask, A, upper = output_mask[::-1], _op(a, transpose), upper != transpose
    gA, gB = linalg_solve_triangular_backward(grad_x, A, x, upper, True, unitriangular, mask)
    return gB, (gA.transpose(-2, -1) if transpose else gA) + grad_m


@manual(
    "X: *b n k, A: *b n n, dA: *b n n, dB: *b n k -> dX: *b n k",
    sample=lambda B, A, upper, transpose, unitriangular: _with_solution(
        "AX", B, A, upper, transpose, unitriangular
    ),
    of=_solution,
    why="upstream's is wrong where A is transposed, and for a dA that is not triangular",
)
def triangular_solve_jvp(
    X: Tensor,
    A: Tensor,
    dA: Tangent,
    dB: Tangent,
    upper: bool,
    transpose: bool,
    unitriangular: bool,
) -> Tensor:
    """op(A) X = B:  dX = op(A)^-1 (dB - op(dA) X)"""
    dA, upper = dA.transpose(-2, -1) if transpose else dA, upper != transpose
    A = _op(A, transpose)
    return linalg_solve_triangular_forward_AD(dA, dB, A, X, upper, True, unitriangular)
