"""Determinants and their logarithms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normpass.decomps.activation.levels import constant
from normpass.decomps.conventions import Result, absent, like, real
from normpass.decomps.derivatives.linalg_spectra import diagonal, imaginary
from normpass.decomps.manual import Gradient, Tangent, manual
from normpass.decomps.operators import is_differentiated, is_recorded_apart

aten = torch.ops.aten


def _any(rows: int, columns: int, like: Tensor) -> Tensor:
    """Numbers between -1 and 1 without a structure."""
    count = torch.arange(1, rows * columns + 1, dtype=like.dtype.to_real(), device=like.device)
    return count.square().sin().reshape(rows, columns).to(like.dtype)


def _size(A: Tensor) -> Tensor:
    """The greatest absolute value of a matrix's elements, one of a matrix of zeros."""
    size = A.abs().amax((-2, -1), keepdim=True)
    return size.masked_fill(size == 0, 1)


def _bordered(A: Tensor) -> Tensor:
    """[[A, C], [R, J]], of constants for which it is hardly worse conditioned than A itself, or
    than what is left of A without its two smallest singular values: C and R are what inverse
    iteration finds for these, and J has the sign of -R A^-1 C.

    A third that is zero is not covered: A is then changed, by less than half its digits.
    """
    known, n, eps = constant(A), A.shape[-1], torch.finfo(A.dtype).eps
    size = _size(known)
    noise, unit = size * _any(n, n, A), known / size
    LU, pivots, _ = torch.linalg.lu_factor_ex(unit + eps**0.5 * noise / size)
    left, _ = torch.linalg.qr(torch.linalg.lu_solve(LU, pivots, _any(n, 2, A), adjoint=True))
    right, T = torch.linalg.qr(torch.linalg.lu_solve(LU, pivots, left))
    scale = size * (1 + torch.linalg.vector_norm(unit, dim=-1).mean(-1)[..., None, None])
    few = (diagonal(LU).abs() < 1e3 * eps**0.5).sum(-1) > 2
    A = A + few[..., None, None] * eps**0.75 * noise
    below = torch.cat([right.mH, -diagonal(T).sgn().diag_embed()], -1)
    return torch.cat([torch.cat([A, scale * left], -1), scale * below], -2)


def _of_factors(LU: Tensor, pivots: Tensor) -> Tensor:
    """det(A), of P A = L U: for autograd LU is a function of A, as slogdet's is not."""
    swaps = (pivots != torch.arange(1, LU.shape[-1] + 1, device=LU.device)).sum(-1)
    return diagonal(LU).prod(-1) * (1 - 2 * (swaps % 2))


def _without_zeros(LU: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors whose zero pivots are as small as their rounding; their determinant, whose product
    with their inverse is the adjugate but for that; whether there were any.
    """
    nothing = diagonal(LU) == 0
    small = torch.finfo(LU.dtype).eps * _size(LU).squeeze(-1) if LU.numel() else 1
    LU = LU + (nothing * small).to(LU.dtype).diag_embed()
    return LU, _of_factors(LU, pivots), nothing.any(-1)


def _adjugate(A: Tensor) -> Tensor:
    """det(A) A^-1, where A has no inverse too. Of W = B^-1,  B = [[A, .], [., .]]:

    det(A) = det(B) det(W22),  adj(A) = det(B) (det(W22) W11 - W12 adj(W22) W21)
    """
    n = A.shape[-1]
    if n < 2:
        return torch.ones_like(A)
    B = _bordered(A)
    W = torch.linalg.inv_ex(B).inverse
    det_B = _of_factors(*torch.linalg.lu_factor_ex(B)[:2])
    (W11, W12), (W21, W22) = (rows.split([n, 2], -1) for rows in W.split([n, 2], -2))
    (a, b), (c, d) = (row.unbind(-1) for row in W22.unbind(-2))
    det, trace = a * d - b * c, a + d
    inner = det[..., None, None] * W11 - W12 @ (trace[..., None, None] * W21 - W22 @ W21)
    return det_B[..., None, None] * inner


@manual(
    "grad: *b, det: *b, A: *b n n, LU: *b n n, pivots: *b n -> dA: *b n n",
    results=(Result(like("A")),),  # contiguous, however it is computed
    of="_linalg_det",
    why="exact to any order where the rank is n - 2 at least, and to the second where it is not. "
    "Upstream's, of a singular matrix: zero if no further derivative is asked for, else by an svd "
    "that has none where singular values are equal",
)
def linalg_det_backward(
    grad: Gradient, det: Tensor, A: Tensor, LU: Tensor, pivots: Tensor
) -> Tensor:
    """y = det(A):  dA = grad * adj(A)^H"""
    if is_differentiated((grad, A)) or is_recorded_apart():
        return grad[..., None, None] * _adjugate(A).mH
    LU, pivots, _ = torch.linalg.lu_factor_ex(A)
    LU, product, _ = _without_zeros(LU, pivots)
    one = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
    inverse = torch.linalg.lu_solve(LU, pivots, one, adjoint=True)
    return (grad * product.conj())[..., None, None] * inverse


def _factored(A: Tensor) -> dict[str, Any]:
    """A matrix without small eigenvalues, its determinants, LU of its transpose if it is real."""
    A = A + 4 * torch.eye(A.shape[-1], dtype=A.dtype)
    det, LU, pivots = torch.ops.aten._linalg_det(A)
    sign = torch.linalg.slogdet(A).sign
    factors = {"LU": LU, "pivots": pivots, "use_A_T": not A.is_complex()}
    return {"A": A, "det": det, "sign": sign, **factors}


@manual(
    "dA: *b n n, det: *b, LU: *b n n, pivots: *b n -> ddet: *b",
    sample=_factored,
    of=aten.linalg_det.default,
    why="a pivot that is zero is made as small as its rounding, and the determinant with it: their "
    "product is adj(A), where upstream's is zero. No further derivative goes through LU: our "
    "row does without (own_rows.py)",
)
def linalg_det_jvp(dA: Tangent, det: Tensor, LU: Tensor, pivots: Tensor, use_A_T: bool) -> Tensor:
    """dy = det(A) tr(A^-1 dA)"""
    LU, product, nothing = _without_zeros(LU, pivots)
    det = torch.where(nothing, product, det)
    return det * diagonal(torch.linalg.lu_solve(LU, pivots, dA, adjoint=use_A_T)).sum(-1)


@manual(
    "grad_sign: *b, grad_logabsdet: *b, A: *b n n, signdet: *b, LU: *b n n, pivots: *b n -> "
    "dA: *b n n",
    of="_linalg_slogdet",
    sample=lambda A: {"A": A + 4 * torch.eye(A.shape[-1], dtype=A.dtype)},
)
def slogdet_backward(
    grad_sign: Gradient,
    grad_logabsdet: Gradient,
    A: Tensor,
    signdet: Tensor,
    LU: Tensor,
    pivots: Tensor,
) -> Tensor:
    """y = log(|det(A)|),  s = det(A) / |det(A)|:  dA = (gy - i Im(conj(gs) s)) A^-H"""
    grad = grad_logabsdet - imaginary(grad_sign.conj() * signdet)
    return grad if absent(grad) else grad[..., None, None] * torch.linalg.inv_ex(A).inverse.mH


@manual(
    "LU: *b n n, pivots: *b n, dA: *b n n, sign: *b -> dsign: *b, dlogabsdet: *b",
    results=(Result(like("sign"), None), Result(real("sign"), None)),
    sample=_factored,
    of=aten.linalg_slogdet.default,
    why="no further derivative goes through LU: our row does without (own_rows.py)",
)
def slogdet_jvp(
    LU: Tensor, pivots: Tensor, dA: Tangent, sign: Tensor, use_A_T: bool
) -> tuple[Tensor, Tensor]:
    """t = tr(A^-1 dA):  dy = Re(t),  ds = i Im(t) s"""
    trace = diagonal(torch.linalg.lu_solve(LU, pivots, dA, adjoint=use_A_T)).sum(-1)
    return imaginary(trace) * sign, trace
