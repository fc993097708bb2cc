"""Systems of linear equations."""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Mask, Tangent, manual
from normpass.decomps.neutral import ZERO
from normpass.decomps.operators import is_concrete, is_differentiated

aten = torch.ops.aten


def _is_vector(A: Tensor, X: Tensor) -> bool:
    """Whether X is one right-hand side, or a batch of them, without an axis of columns."""
    return X.dim() == 1 or (X.dim() == A.dim() - 1 and X.shape == A.shape[:-1])


def _columns(X: Tensor, vector: bool) -> Tensor:
    return X.unsqueeze(-1) if vector else X


def _solved(A: Tensor, B: Tensor, left: bool) -> dict[str, Tensor]:
    """A system whose matrix has no small eigenvalues, with its factors and its solution."""
    A = A @ A.mH + torch.eye(A.shape[-1], dtype=A.dtype)
    LU, pivots = torch.linalg.lu_factor(A)
    return {"A": A, "LU": LU, "pivots": pivots, "X": torch.linalg.solve(A, B, left=left)}


@manual(
    "gX: *b n k, X: *b n k, A: *b n n, LU: *b n n, pivots: *b n -> gA: *b n n, gB: *b n k",
    sample=_solved,
    of=aten.linalg_solve.default,
    why="LU is that of A, as torch's _linalg_solve_ex returns it since 2.13 for real A too; it is "
    "used in eager mode where no further derivative is asked for, since none goes through it. As "
    "upstream, the gradients have the batch axes of X; and gA is always computed, where upstream "
    "reads A.requires_grad",
)
def linalg_solve_backward(
    gX: Gradient,
    X: Tensor,
    A: Tensor,
    LU: Tensor,
    pivots: Tensor,
    left: bool,
    B_requires_grad: bool,
) -> tuple[Tensor, Tensor]:
    """A X = B:  gB = A^-H gX,  gA = -gB X^H        left
    X A = B:  gB = gX A^-H,  gA = -X^H gB
    """
    vector = _is_vector(A, X)
    X, gX = _columns(X, vector), _columns(gX, vector)
    if is_differentiated((gX, X, A)) or not is_concrete(A):
        gB = torch.linalg.solve_ex(A.mH, gX, left=left).result
    else:
        gB = torch.linalg.lu_solve(LU, pivots, gX, left=left, adjoint=True)
    gA = -(gB @ X.mH if left else X.mH @ gB)
    gB = gB.squeeze(-1) if vector else gB
    return gA, gB if B_requires_grad else ZERO


@manual(
    "dA: *b n n, dB: *b n k, X: *b n k, LU: *b n n, pivots: *b n -> dX: *b n k",
    sample=_solved,
    of=aten.linalg_solve.default,
    why="LU is that of A, as torch's _linalg_solve_ex returns it since 2.13 for real A too",
)
def linalg_solve_jvp(
    dA: Tangent, dB: Tangent, X: Tensor, LU: Tensor, pivots: Tensor, left: bool
) -> Tensor:
    """A X = B:  dX = A^-1 (dB - dA X)        left
    X A = B:  dX = (dB - X dA) A^-1
    """
    vector = _is_vector(LU, X)
    X, dB = _columns(X, vector), _columns(dB, vector)
    dB = dB - (dA @ X if left else X @ dA)
    dX = torch.linalg.lu_solve(LU, pivots, dB, left=left)
    return dX.squeeze(-1) if vector else dX


@manual(
    "X: *b n k, A: *b n n, dA: *b n n, dB: *b n k -> dX: *b n k",
    sample=lambda A, B: {name: _solved(A, B, True)[name] for name in ("A", "X")},
    of=aten.linalg_solve.default,
)
def solve_jvp(X: Tensor, A: Tensor, dA: Tangent, dB: Tangent) -> Tensor:
    """A X = B:  dX = A^-1 (dB - dA X)"""
    vector = _is_vector(A, X)
    dX = _columns(dB, vector) - dA @ _columns(X, vector)
    dX = torch.linalg.solve_ex(A, dX).result
    return dX.squeeze(-1) if vector else dX


# --- pseudo-inverses and least squares -----------------------------------------------------------


@manual(
    "grad: *b n s, pinvA: *b n s, A: *b s n -> dself: *b s n", of="linalg_pinv.atol_rtol_tensor"
)
def pinv_backward(grad: Gradient, pinvA: Tensor, A: Tensor) -> Tensor:
    """P = A^+, of constant rank:

    dA = (1 - A P) g^H P P^H + P^H P g^H (1 - P A) - P^H g P^H
    """
    if A.shape[-2] > A.shape[-1]:  # the products by way of the smaller side: (A^H)^+ = P^H
        return pinv_backward(grad.mH, pinvA.mH, A.mH).mH
    g, Ph = grad.mH, pinvA.mH
    K = g @ pinvA
    right = K @ Ph
    return right - A @ (pinvA @ right) + Ph @ pinvA @ (g - K @ A) - (pinvA @ K).mH


@manual("A: *b s n, pinvA: *b n s, dA: *b s n -> dpinvA: *b n s", of="linalg_pinv.atol_rtol_tensor")
def pinv_jvp(A: Tensor, pinvA: Tensor, dA: Tangent) -> Tensor:
    """P = A^+, of constant rank:

    dP = P P^H dA^H (1 - A P) + (1 - P A) dA^H P^H P - P dA P
    """
    if A.shape[-2] > A.shape[-1]:
        return pinv_jvp(A.mH, pinvA.mH, dA.mH).mH
    d = dA.mH
    K = pinvA.mH @ d
    within = K - K @ A @ pinvA - K.mH
    return pinvA @ within + (d - pinvA @ (A @ d)) @ (pinvA.mH @ pinvA)


def _solution(A: Tensor, B: Tensor) -> dict[str, Tensor]:
    X, L, _, _ = torch.linalg.lstsq(A, B, driver="gels")
    return {"X_": X, "L": L}


@manual(
    "gX_: *b n k, gL: *b k, A: *b s n, B_: *b s k, X_: *b n k -> dA: *b s n, dB_: *b s k",
    sample=lambda A, B_: {"X_": _solution(A, B_)["X_"]},
    of=lambda A, B_: tuple(_solution(A, B_).values()),
)
def linalg_lstsq_backward(
    gX_: Gradient, gL: Gradient, A: Tensor, B_: Tensor, X_: Tensor, grad_input_mask: Mask
) -> tuple[Tensor, Tensor]:
    """X = A^+ B:  dB = P^H gX,  dA is that of P = A^+ for gX B^H

    L = sum(|r|^2),  r = A X - B, which is least at X:  dA += 2 r gL X^H,  dB -= 2 r gL
    """
    vector = _is_vector(A, B_)
    gX, X, B = _columns(gX_, vector), _columns(X_, vector), _columns(B_, vector)
    dA: Tensor = ZERO
    dB: Tensor = ZERO
    if not absent(gX):
        P = torch.linalg.pinv(A)
        dB = P.mH @ gX
        if grad_input_mask[0]:
            dA = pinv_backward(gX @ B.mH, P, A)
    if not absent(gL) and gL.numel() > 0:
        r = 2 * (A @ X - B) * gL.unsqueeze(-2)
        dA, dB = dA + r @ X.mH, dB - r
    return dA, dB.squeeze(-1) if vector else dB


@manual(
    "A: *b s n, B_: *b s k, dA: *b s n, dB_: *b s k -> dX: *b n k",
    of=lambda A, B_: _solution(A, B_)["X_"],
)
def linalg_lstsq_solution_jvp(A: Tensor, B_: Tensor, dA: Tangent, dB_: Tangent) -> Tensor:
    """X = A^+ B:  dX = dP B + P dB,  P = A^+"""
    vector = _is_vector(A, B_)
    B, dB = _columns(B_, vector), _columns(dB_, vector)
    P = torch.linalg.pinv(A)
    dX = P @ dB + pinv_jvp(A, P, dA) @ B
    return dX.squeeze(-1) if vector else dX


@manual(
    "A: *b s n, B_: *b s k, dA: *b s n, dB_: *b s k, X_: *b n k, L: *b k -> dL: *b k",
    sample=lambda A, B_: _solution(A, B_),
    of=lambda A, B_: _solution(A, B_)["L"],
)
def linalg_lstsq_residuals_jvp(
    A: Tensor, B_: Tensor, dA: Tangent, dB_: Tangent, X_: Tensor, L: Tensor
) -> Tensor:
    """L = sum(|r|^2),  r = A X - B, which is least at X:  dL = 2 Re(sum(conj(r) (dA X - dB)))"""
    vector = _is_vector(A, B_)
    X, B, dB = _columns(X_, vector), _columns(B_, vector), _columns(dB_, vector)
    change = dA @ X - dB
    if L.numel() == 0:
        return ZERO
    return 2 * ((A @ X - B).conj() * change).sum(-2)  # one for each column, of a vector too


@manual(
    "A: *b s n, B: *b s k, dA: *b s n, dB: *b s k -> dX: *b n k",
    of=lambda A, B: _solution(A, B)["X_"],
)
def linalg_lstsq_jvp(A: Tensor, B: Tensor, dA: Tangent, dB: Tangent) -> Tensor:
    """As above; no row calls it any more."""
    return linalg_lstsq_solution_jvp(A, B, dA, dB)
