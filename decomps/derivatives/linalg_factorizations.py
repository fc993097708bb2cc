"""Factorizations of matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Mask, Tangent, manual
from normpass.decomps.neutral import ZERO


def _positive_definite(A: Tensor, upper: bool) -> dict[str, Tensor]:
    A = A @ A.mH + torch.eye(A.shape[-1], dtype=A.dtype)
    return {"A": A, "L": torch.linalg.cholesky(A, upper=upper)}


@manual(
    "gL: *b n n, L: *b n n -> gA: *b n n",
    sample=_positive_definite,
    of=lambda A, upper: torch.linalg.cholesky((A + A.mH) / 2, upper=upper),
)
def cholesky_backward(gL: Gradient, upper: bool, L: Tensor) -> Tensor:
    """A = L L^H:  P = tril(L^H gL),  S = (P + P^H - diag(P)) / 2,  gA = L^-H S L^-1

    upper: A = U^H U, with L = U^H. The gradient is Hermitian, as A is.
    """
    if upper:
        gL, L = gL.mH, L.mH
    projected = (L.mH @ gL).tril()
    symmetric = (projected + projected.tril(-1).mH) / 2
    half = torch.linalg.solve_triangular(L.mH, symmetric, upper=True)
    return torch.linalg.solve_triangular(L, half, upper=False, left=False)


@manual(
    "dA: *b n n, L: *b n n -> dL: *b n n",
    of="linalg_cholesky_ex",
    sample=lambda self: {"self": self @ self.mH + torch.eye(self.shape[-1], dtype=self.dtype)},
)
def cholesky_jvp(dA: Tangent, L: Tensor, upper: bool) -> Tensor:
    """A = L L^H:  dL = L (tril(X) - diag(X) / 2),  X = L^-1 dA L^-H

    upper: A = U^H U, with L = U^H. dA is Hermitian, as A is.
    """
    if upper:
        L = L.mH
    half = torch.linalg.solve_triangular(L, dA, upper=False)
    X = torch.linalg.solve_triangular(L.mH, half, upper=True, left=False)
    dL = L @ ((X.tril() + X.tril(-1)) / 2)
    return dL.mH if upper else dL


# --- what is made of a Cholesky factor -----------------------------------------------------------


def _factor(L: Tensor, upper: bool) -> Tensor:
    """A triangle that has a small inverse."""
    L = L + 4 * torch.eye(L.shape[-1], dtype=L.dtype)
    return L.triu() if upper else L.tril()


def _inverse(L: Tensor, upper: bool) -> Tensor:
    """A^-1, of a factor; of any matrix, where the operators read one triangle alone."""
    return torch.linalg.inv(L.mH @ L if upper else L @ L.mH)


def _change(L: Tensor, dL: Tensor, upper: bool) -> Tensor:
    """dA, of A = L L^H, or U^H U"""
    half = dL.mH @ L if upper else dL @ L.mH
    return half + half.mH


def _of_factor(gA: Tensor, L: Tensor, upper: bool) -> Tensor:
    """The adjoint: dL = (gA + gA^H) L, or U (gA + gA^H)"""
    both = gA + gA.mH
    return L @ both if upper else both @ L


@manual(
    "grad: *b n n, L: *b n n, inverse: *b n n -> dL: *b n n",
    sample=lambda L, upper: {"L": _factor(L, upper), "inverse": _inverse(_factor(L, upper), upper)},
    of=lambda L, upper: _inverse(L, upper),
)
def cholesky_inverse_backward(grad: Gradient, L: Tensor, upper: bool, inverse: Tensor) -> Tensor:
    """X = A^-1,  A = L L^H:  dA = -X g X"""
    return _of_factor(-(inverse @ grad @ inverse), L, upper)


@manual(
    "F: *b n n, dF: *b n n, X: *b n n -> dX: *b n n",
    sample=lambda F, upper: {"F": _factor(F, upper), "X": _inverse(_factor(F, upper), upper)},
    of=lambda F, upper: _inverse(F, upper),
    why="upstream's is wrong: it multiplies by X L^H, where L^-1 is L^H X",
)
def cholesky_inverse_jvp(F: Tensor, dF: Tangent, X: Tensor, upper: bool) -> Tensor:
    """X = A^-1,  A = L L^H:  dX = -X dA X"""
    return -(X @ _change(F, dF, upper) @ X)


@manual(
    "grad_x: *b n k, self: *b n k, input2: *b n n, result: *b n k -> dself: *b n k, "
    "dinput2: *b n n",
    sample=lambda self, input2, upper: {
        "input2": _factor(input2, upper),
        "result": _inverse(_factor(input2, upper), upper) @ self,
    },
    of=lambda self, input2, upper: _inverse(input2, upper) @ self,
    compared=("input2",),  # of which the operator reads one triangle, and its derivatives both
)
def cholesky_solve_backward(
    grad_x: Gradient, self: Tensor, input2: Tensor, result: Tensor, upper: bool, output_mask: Mask
) -> tuple[Tensor, Tensor]:
    """A X = B,  A = L L^H:  dB = A^-1 gX,  dA = -dB X^H"""
    dB = torch.cholesky_solve(grad_x, input2, upper)
    return dB, _of_factor(-(dB @ result.mH), input2, upper) if output_mask[1] else ZERO


@manual(
    "X: *b n k, U: *b n n, dU: *b n n, dB: *b n k -> dX: *b n k",
    sample=lambda B, U, upper: {
        "U": _factor(U, upper),
        "X": _inverse(_factor(U, upper), upper) @ B,
    },
    of=lambda B, U, upper: _inverse(U, upper) @ B,
    compared=("U",),
)
def cholesky_solve_jvp(X: Tensor, U: Tensor, dU: Tangent, dB: Tangent, upper: bool) -> Tensor:
    """A X = B,  A = L L^H:  dX = A^-1 (dB - dA X)"""
    return torch.cholesky_solve(dB - _change(U, dU, upper) @ X, U, upper)


# --- QR ------------------------------------------------------------------------------------------


def _check_qr(mode: str, Q: Tensor, R: Tensor) -> None:
    if mode == "r":
        raise RuntimeError(
            "The derivative of linalg.qr depends on Q, which is not computed when mode='r'. Please "
            "use linalg.qr(A, mode='reduced') if you are going to differentiate through linalg.qr."
        )
    if mode == "complete" and Q.shape[-2] > R.shape[-1]:
        raise RuntimeError(
            "The QR decomposition is not differentiable when mode='complete' and nrows > ncols."
        )


@manual(
    "gQ: *b s min(s,n), gR: *b min(s,n) n, Q: *b s min(s,n), R: *b min(s,n) n -> dA: *b s n",
    of="linalg_qr",
)
def linalg_qr_backward(gQ: Gradient, gR: Gradient, Q: Tensor, R: Tensor, mode: str) -> Tensor:
    """A = Q R:  dA = (gQ + Q (T + T^H)) R^-H,  T = triu(M) - diag(M) / 2,  M = gR R^H - Q^H gQ

    A = [A1, A2] = Q [R1, R2], of more columns than rows: A1 as above, and R2 = Q^H A2.
    """
    _check_qr(mode, Q, R)
    k, n = Q.shape[-1], R.shape[-1]
    beyond = gR.narrow(-1, k, n - k)
    if n > k:
        gQ = gQ + Q @ (R.narrow(-1, k, n - k) @ beyond.mH)
        gR, R = gR.narrow(-1, 0, k), R.narrow(-1, 0, k)
    M = gR @ R.mH - Q.mH @ gQ
    T = (M.triu() + M.triu(1)) / 2
    dA = torch.linalg.solve_triangular(R.mH, gQ + Q @ (T + T.mH), upper=False, left=False)
    if n == k:
        return dA
    return pad(dA, (0, n - k)) if absent(beyond) else torch.cat([dA, Q @ beyond], -1)


@manual(
    "dA: *b s n, Q: *b s min(s,n), R: *b min(s,n) n -> dQ: *b s min(s,n), dR: *b min(s,n) n",
    of="linalg_qr",
)
def linalg_qr_jvp(dA: Tangent, Q: Tensor, R: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """A = Q R:  dQ = X - Q T,  dR = T R,  T = triu(S) - diag(S) / 2,  S = sym(Q^H X),  X = dA R^-1

    A = [A1, A2] = Q [R1, R2], of more columns than rows: A1 as above, and R2 = Q^H A2.
    """
    _check_qr(mode, Q, R)
    k, n = Q.shape[-1], R.shape[-1]
    R1 = R.narrow(-1, 0, k)
    X = torch.linalg.solve_triangular(R1, dA.narrow(-1, 0, k), upper=True, left=False)
    S = Q.mH @ X
    S = S + S.mH
    T = (S.triu() + S.triu(1)) / 2
    dQ, dR = X - Q @ T, T @ R1
    if n > k:
        beyond = dQ.mH @ Q @ R.narrow(-1, k, n - k) + Q.mH @ dA.narrow(-1, k, n - k)
        dR = torch.cat([dR, beyond], -1)
    return dQ, dR
