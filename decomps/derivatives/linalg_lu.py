"""A = P L U, and systems that are solved with it.

Of L only what is below the diagonal is free, of U what is not. A matrix X is tril(X, -1) + triu(X).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.linalg import lu_factor, solve_triangular

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Size, Tangent, manual


def _grown(x: Tensor, rows: int, columns: int) -> Tensor:
    """With so many rows and columns of zeros after its own."""
    if absent(x) or not (rows or columns):
        return x
    return torch.nn.functional.pad(x, (0, columns, 0, rows))


# --- the factors ---------------------------------------------------------------------------------


@manual(
    "L_grad: *b s min(s,n), U_grad: *b min(s,n) n, P: *b s s, L: *b s min(s,n), U: *b min(s,n) n "
    "-> dA: *b s n",
    of="linalg_lu",
)
def linalg_lu_backward(
    L_grad: Gradient, U_grad: Gradient, P: Tensor, L: Tensor, U: Tensor, pivot: bool
) -> Tensor:
    """tall, L: (L1; L2) with a square L1:  gX = gL + L1^-H triu(gU U^H - L^H gL),
    gA = P gX U^-H;  wide:  gX = gU + tril(L^H gL - gU U^H, -1) U1^-H,  gA = P L^-H gX
    """
    m, k, n = *L.shape[-2:], U.shape[-1]
    gL, gU = L_grad.tril(-1), U_grad.triu()
    both = gU @ U.mH - L.mH @ gL
    if m >= n:
        gD = _unit_adjoint(L[..., :k, :], both.triu())
        gA = solve_triangular(U.mH, gL + _grown(gD, m - k, 0), upper=False, left=False)
    else:
        gD = solve_triangular(U[..., :k].mH, -both.tril(-1), upper=False, left=False)
        gA = _unit_adjoint(L, gU + _grown(gD, 0, n - k))
    return P @ gA if pivot else gA


def _unit_adjoint(L: Tensor, X: Tensor) -> Tensor:
    """L^-H X"""
    return solve_triangular(L.mH, X, upper=True, unitriangular=True)


@manual(
    "dA: *b s n, P: *b s s, L: *b s min(s,n), U: *b min(s,n) n "
    "-> dL: *b s min(s,n), dU: *b min(s,n) n",
    of="linalg_lu",
)
def linalg_lu_jvp(
    dA: Tangent, P: Tensor, L: Tensor, U: Tensor, pivot: bool
) -> tuple[Tensor, Tensor]:
    """tall:  X = P^T dA U^-1,  D = triu(L1^-1 X1),  dL = X - L D,  dU = D U
    wide:  X = L^-1 P^T dA,  D = tril(X1 U1^-1, -1),  dL = L D,  dU = X - D U
    """
    k = L.shape[-1]
    X = P.mT @ dA if pivot else dA
    if L.shape[-2] >= U.shape[-1]:
        X = solve_triangular(U, X, upper=True, left=False)
        D = solve_triangular(L[..., :k, :], X[..., :k, :], upper=False, unitriangular=True).triu()
        return (X - L @ D).tril(-1), D @ U
    X = solve_triangular(L, X, upper=False, unitriangular=True)
    D = solve_triangular(U[..., :k], X[..., :k], upper=True, left=False).tril(-1)
    return L @ D, (X - D @ U).triu()


# --- the factors in one matrix -------------------------------------------------------------------


def _of_factors(LU: Tensor) -> tuple[Any, Any]:
    """Where L and U are: the first columns, the first rows."""
    k = min(LU.shape[-2:])
    return (..., slice(k)), (..., slice(k), slice(None))


@manual("grad: *b s n, LU: *b s n, pivs: *b min(s,n) -> dA: *b s n", of="linalg_lu_factor_ex")
def lu_factor_ex_backward(grad: Gradient, LU: Tensor, pivs: Tensor, pivot: bool) -> Tensor:
    """tril(LU, -1) + I = L,  triu(LU) = U:  as of L and of U"""
    in_L, in_U = _of_factors(LU)
    P, L, U = torch.lu_unpack(LU, pivs, unpack_pivots=pivot)
    return linalg_lu_backward(grad[in_L], grad[in_U], P, L, U, pivot)


@manual("dA: *b s n, LU: *b s n, pivs: *b min(s,n) -> dLU: *b s n", of="linalg_lu_factor_ex")
def lu_factor_ex_jvp(dA: Tangent, LU: Tensor, pivs: Tensor, pivot: bool) -> Tensor:
    """LU = L - I + U:  dLU = dL + dU"""
    P, L, U = torch.lu_unpack(LU, pivs, unpack_pivots=pivot)
    dL, dU = linalg_lu_jvp(dA, P, L, U, pivot)
    return _packed(dL, dU, *LU.shape[-2:])


@manual(
    "L_grad: *b s min(s,n), U_grad: *b min(s,n) n -> dLU_data: *b s n",
    of="lu_unpack",
    sample=lambda LU_data: {"LU_pivots": lu_factor(LU_data)[1]},
)
def lu_unpack_backward(L_grad: Gradient, U_grad: Gradient, m: Size, n: Size) -> Tensor:
    """L = tril(LU, -1) + I,  U = triu(LU):  gLU = tril(gL, -1) + triu(gU)"""
    return _packed(L_grad.tril(-1), U_grad.triu(), m, n)


def _packed(L: Tensor, U: Tensor, m: int, n: int) -> Tensor:
    k = min(m, n)
    return _grown(L, 0, n - k) + _grown(U, m - k, 0)


# --- systems -------------------------------------------------------------------------------------


def _factored(LU: Tensor) -> dict[str, Tensor]:
    """Of a matrix without small eigenvalues, with a right-hand side."""
    packed, pivots = lu_factor(LU @ LU.mH + torch.eye(LU.shape[-1], dtype=LU.dtype))
    return {"LU": packed, "pivots": pivots, "B": torch.randn_like(LU)}


def _as_columns(left: bool, adjoint: bool, *sides: Tensor) -> tuple[bool, list[Tensor]]:
    """X A = B is A^H X^H = B^H, X A^H = B is A X^H = B^H."""
    return adjoint == left, [x if left else x.mH for x in sides]


@manual(
    "gX: *b n n, LU: *b n n, pivots: *b n, X: *b n n -> dLU: *b n n",
    of="linalg_lu_solve",
    sample=_factored,
)
def linalg_lu_solve_LU(
    gX: Gradient, LU: Tensor, pivots: Tensor, X: Tensor, left: bool, adjoint: bool
) -> Tensor:
    """A X = B:  G = A^-H gX,  gA = -G X^H;  A^H X = B:  G = A^-1 gX,  gA = -X G^H
    gLU = tril(P^T gA U^H, -1) + triu(L^H P^T gA)
    """
    G = torch.linalg.lu_solve(LU, pivots, gX, left=left, adjoint=not adjoint)
    adjoint, (G, X) = _as_columns(left, adjoint, G, X)
    if adjoint:
        G, X = X, G
    P, L, U = torch.lu_unpack(LU, pivots)
    G = P.mT @ G
    return -(G @ (U @ X).mH).tril(-1) - (L.mH @ G @ X.mH).triu()


@manual(
    "X: *b n n, LU: *b n n, pivots: *b n, dLU: *b n n, dB: *b n n -> dX: *b n n",
    of="linalg_lu_solve",
    sample=_factored,
)
def linalg_lu_solve_jvp(
    X: Tensor, LU: Tensor, pivots: Tensor, dLU: Tangent, dB: Tangent, left: bool, adjoint: bool
) -> Tensor:
    """A X = B:  dX = A^-1 (dB - dA X),  dA = P (dL U + L dU);  A^H X = B:  with dA^H"""
    if not absent(dLU):
        flipped, (Y,) = _as_columns(left, adjoint, X)
        P, L, U = torch.lu_unpack(LU, pivots)
        dL, dU = dLU.tril(-1), dLU.triu()
        if flipped:
            Y = P.mT @ Y
            Y = U.mH @ (dL.mH @ Y) + dU.mH @ (L.mH @ Y)
        else:
            Y = P @ (dL @ (U @ Y) + L @ (dU @ Y))
        dB = dB - (Y if left else Y.mH)
    return torch.linalg.lu_solve(LU, pivots, dB, left=left, adjoint=adjoint)
