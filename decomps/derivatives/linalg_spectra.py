"""Singular values, eigenvalues and the matrix exponential.

Vectors are determined up to a factor of absolute value one, which is what a complex loss must not
depend on; where two values are equal they are not determined, and have no derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from normpass.decomps.conventions import absent, like
from normpass.decomps.manual import Gradient, Tangent, manual
from normpass.decomps.neutral import ZERO
from normpass.decomps.operators import is_concrete


def _spread(A: Tensor) -> Tensor:
    """A sample whose values are not near one another."""
    m, n = A.shape[-2:]
    return A + 6 * torch.eye(m, n, dtype=A.dtype) * torch.arange(n)


def imaginary(X: Tensor) -> Tensor:
    """i Im(X)"""
    return ZERO if absent(X) or not X.is_complex() else (X - X.conj()) / 2


def diagonal(X: Tensor) -> Tensor:
    return X.diagonal(dim1=-2, dim2=-1)


def _sym(X: Tensor) -> Tensor:
    return X + X.mH


def _skew(X: Tensor) -> Tensor:
    return X - X.mH


def _over_gaps(X: Tensor, L: Tensor) -> Tensor:
    """X_ij / (L_j - L_i), zero on the diagonal"""
    if absent(X):
        return X
    same = torch.eye(L.shape[-1], dtype=torch.bool, device=L.device)
    gaps = L.unsqueeze(-2) - L.unsqueeze(-1)
    return X.masked_fill(same, 0) / gaps.masked_fill(same, 1)


def _check_phases(turned: Tensor, message: str) -> None:
    """Raises RuntimeError where a gradient is along a change of phases; a trace cannot ask."""
    if absent(turned) or not is_concrete(turned):
        return
    if not torch.allclose(turned, torch.zeros_like(turned), rtol=1e-2, atol=1e-2):
        raise RuntimeError(message)


# --- singular values -----------------------------------------------------------------------------

_SVD_PHASES = (
    "svd_backward: The singular vectors in the complex case are specified up to multiplication by "
    "e^{i phi}. The specified loss function depends on this phase term, making it ill-defined."
)


@manual(
    "gU: *b s min(s,n), gS: *b min(s,n), gVh: *b min(s,n) n, "
    "U: *b s min(s,n), S: *b min(s,n), Vh: *b min(s,n) n -> dA: *b s n",
    dtype=like("U"),
    of="_linalg_svd",
    sample=lambda A: {"A": _spread(A)},
)
def svd_backward(
    gU: Gradient, gS: Gradient, gVh: Gradient, U: Tensor, S: Tensor, Vh: Tensor
) -> Tensor:
    """A = U S V^H,  E_ij = S_j^2 - S_i^2,  X = skew(U^H gU),  Y = skew(V^H gV):

    dA = U (gS + (X S + S Y) / E + diag(X - Y) / (4 S)) V^H
         + (1 - U U^H) gU S^-1 V^H + U S^-1 gV^H (1 - V V^H)
    """
    X, Y = _skew(U.mH @ gU), _skew(Vh @ gVh.mH)
    x, y = imaginary(diagonal(X)), imaginary(diagonal(Y))
    _check_phases(x + y, _SVD_PHASES)
    inner = _over_gaps(X * S.unsqueeze(-2) + S.unsqueeze(-1) * Y, S * S)
    inner = inner + ((x - y) / (4 * S)).diag_embed()
    left: Tensor = ZERO
    right = gS.unsqueeze(-1) * Vh + inner @ Vh
    if U.shape[-2] > S.shape[-1]:
        over = gU / S.unsqueeze(-2)
        left = (over - U @ (U.mH @ over)) @ Vh
    if Vh.shape[-1] > S.shape[-1]:
        over = gVh / S.unsqueeze(-1)
        right = right + over - (over @ Vh.mH) @ Vh
    return U @ right + left


@manual(
    "dA: *b s n, U: *b s min(s,n), S: *b min(s,n), Vh: *b min(s,n) n "
    "-> dU: *b s min(s,n), dS: *b min(s,n), dVh: *b min(s,n) n",
    of="_linalg_svd",
    sample=lambda A: {"A": _spread(A)},
)
def linalg_svd_jvp(
    dA: Tangent, U: Tensor, S: Tensor, Vh: Tensor, full_matrices: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """P = U^H dA V,  dS = Re(diag(P)),  D = i Im(diag(P)) / (2 S):

    dU   = U (sym(P S) / E + D) + (1 - U U^H) dA V S^-1
    dV^H = (D - sym(S P) / E) V^H + S^-1 U^H dA (1 - V V^H)

    with E as above. Those of `full_matrices` are not determined, and get zeros.
    """
    (m, n), k = dA.shape[-2:], S.shape[-1]
    U, Vh = U.narrow(-1, 0, k), Vh.narrow(-2, 0, k)
    left, right = U.mH @ dA, dA @ Vh.mH
    P = left @ Vh.mH
    turn = (imaginary(diagonal(P)) / (2 * S)).diag_embed()
    dU = U @ (_over_gaps(_sym(P * S.unsqueeze(-2)), S * S) + turn)
    dVh = (turn - _over_gaps(_sym(S.unsqueeze(-1) * P), S * S)) @ Vh
    if m > k:
        over = right / S.unsqueeze(-2)
        dU = dU + over - U @ (U.mH @ over)
    if n > k:
        over = left / S.unsqueeze(-1)
        dVh = dVh + over - (over @ Vh.mH) @ Vh
    if full_matrices:
        dU, dVh = pad(dU, (0, m - k)), pad(dVh, (0, 0, 0, n - k))
    return dU, diagonal(P), dVh


# --- eigenvalues ---------------------------------------------------------------------------------

_EIG_PHASES = (
    "{}: The eigenvectors in the complex case are specified up to multiplication by e^{{i phi}}. "
    "The specified loss function depends on this quantity, so it is ill-defined."
)


@manual(
    "gL: *b n, gV: *b n n, L: *b n, V: *b n n -> dA: *b n n",
    dtype=like("V"),
    of="_linalg_eigh",
    sample=lambda A: {"A": _spread(A) + _spread(A).mH},
)
def linalg_eig_backward(
    gL: Gradient,
    gV: Gradient,
    L: Tensor,
    V: Tensor,
    is_hermitian: bool,
    symeig_eigenvectors: bool = True,
) -> Tensor:
    """A V = V L,  |V_j| = 1,  E_ij = conj(L_j - L_i):

    dA = V^-H (gL + X / E) V^H,  X = V^H (gV - V Re(diag(V^H gV)))
    Hermitian:  V^-H = V,        X = skew(V^H gV) / 2
    """
    if not symeig_eigenvectors:
        raise RuntimeError(
            "linalg_eig_backward: torch.symeig(A, eigenvectors=False) is not differentiable. Use "
            "torch.linalg.eigvalsh(A) instead."
        )
    X = V.mH @ gV
    along = diagonal(X)
    _check_phases(imaginary(along), _EIG_PHASES.format(f"linalg_eig{'h' * is_hermitian}_backward"))
    across = _skew(X) / 2
    if not is_hermitian:
        across = X - V.mH @ (V * (along - imaginary(along)).unsqueeze(-2))
    inner = gL.unsqueeze(-1) * V.mH + _over_gaps(across, L.conj()) @ V.mH
    if is_hermitian:
        return V @ inner
    return torch.linalg.solve(V.mH, inner)


@manual(
    "dA: *b n n, L: *b n, V: *b n n -> dL: *b n, dV: *b n n",
    of="_linalg_eigh",
    sample=lambda A: {"A": _spread(A) + _spread(A).mH},
)
def linalg_eig_jvp(dA: Tangent, L: Tensor, V: Tensor, is_hermitian: bool) -> tuple[Tensor, Tensor]:
    """A V = V L,  |V_j| = 1,  E_ij = L_j - L_i,  P = V^-1 dA V:

    dL = diag(P),  dV = X - V Re(diag(V^H X)),  X = V (P / E)
    Hermitian:  V^-1 = V^H,  diag(V^H X) = 0
    """
    P = V.mH @ dA @ V if is_hermitian else torch.linalg.solve(V, dA @ V)
    dV = V @ _over_gaps(P, L)
    if not is_hermitian:
        along = (V.conj() * dV).sum(-2, keepdim=True)
        dV = dV - V * (along - imaginary(along))
    return diagonal(P), dV


# --- the exponential -----------------------------------------------------------------------------


@manual("self: *b n n, grad: *b n n -> dself: *b n n", of="linalg_matrix_exp")
def linalg_matrix_exp_differential(self: Tensor, grad: Gradient, adjoint: bool) -> Tensor:
    """exp([[A, dA], [0, A]]) = [[exp(A), dexp(A)], [0, exp(A)]];  the adjoint is that at A^H"""
    A, n = self.mH if adjoint else self, self.shape[-1]
    block = torch.cat([torch.cat([A, grad], -1), pad(A, (n, 0))], -2)
    return torch.linalg.matrix_exp(block).narrow(-2, 0, n).narrow(-1, n, n)
