"""Factorizations of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.conventions import Result, absent, like
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


def _positive_definite(A: Tensor, upper: bool) -> dict[str, Tensor]:
    A = A @ A.mH + torch.eye(A.shape[-1], dtype=A.dtype)
    return {"A": A, "L": torch.linalg.cholesky(A, upper=upper)}


@formula(
    "vjp",
    "cholesky_backward(Tensor? gL, bool upper, Tensor L) -> Tensor",
    source=f"{MANUAL}: cholesky_backward",
    shapes="gL: *b n n, L: *b n n -> gA: *b n n",
    results=(Result(like("L"), None),),
    zeros=("gL",),
    sample=_positive_definite,
    of=lambda A, upper: torch.linalg.cholesky((A + A.mH) / 2, upper=upper),
)
def cholesky_backward(gL: Tensor, upper: bool, L: Tensor) -> Tensor:
    """A = L L^H:  P = tril(L^H gL),  S = (P + P^H - diag(P)) / 2,  gA = L^-H S L^-1

    upper: A = U^H U, with L = U^H. The gradient is Hermitian, as A is.
    """
    if absent(gL):
        return gL
    if upper:
        gL, L = gL.mH, L.mH
    projected = (L.mH @ gL).tril()
    symmetric = (projected + projected.tril(-1).mH) / 2
    half = torch.linalg.solve_triangular(L.mH, symmetric, upper=True)
    return torch.linalg.solve_triangular(L, half, upper=False, left=False)
