"""Systems of linear equations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.conventions import Result, absent, like
from normpass.decomps.neutral import ZERO
from normpass.decomps.operators import is_differentiated
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


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


@formula(
    "vjp",
    "linalg_solve_backward(Tensor? gX, Tensor X, Tensor A, Tensor LU, Tensor pivots, bool left, "
    "bool B_requires_grad) -> (Tensor, Tensor)",
    source=f"{MANUAL}: linalg_solve_backward",
    shapes="gX: *b n k, X: *b n k, A: *b n n, LU: *b n n, pivots: *b n -> gA: *b n n, gB: *b n k",
    results=(Result(like("A"), None), Result(like("gX"), None)),
    zeros=("gX",),
    sample=_solved,
    of=lambda A, B, left: torch.linalg.solve(A, B, left=left),
    why="LU is that of A, as torch's _linalg_solve_ex returns it since 2.13 for real A too; it is "
    "used where no further derivative is asked for, since none goes through it. As upstream, the "
    "gradients have the batch axes of X; and gA is always computed, where upstream reads "
    "A.requires_grad",
)
def linalg_solve_backward(
    gX: Tensor,
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
    if absent(gX):
        return gX, gX
    vector = _is_vector(A, X)
    X, gX = _columns(X, vector), _columns(gX, vector)
    if is_differentiated((gX, X, A)):
        gB = torch.linalg.solve(A.mH, gX, left=left)
    else:
        gB = torch.linalg.lu_solve(LU, pivots, gX, left=left, adjoint=True)
    gA = -(gB @ X.mH if left else X.mH @ gB)
    if not B_requires_grad:
        return gA, ZERO  # type: ignore[return-value]
    return gA, gB.squeeze(-1) if vector else gB


@formula(
    "jvp",
    "linalg_solve_jvp(Tensor? dA, Tensor? dB, Tensor X, Tensor LU, Tensor pivots, bool left) "
    "-> Tensor",
    source=f"{MANUAL}: linalg_solve_jvp",
    shapes="dA: *b n n, dB: *b n k, X: *b n k, LU: *b n n, pivots: *b n -> dX: *b n k",
    results=(Result(like("X"), None),),
    zeros=("dA", "dB"),
    sample=_solved,
    of=lambda A, B, left: torch.linalg.solve(A, B, left=left),
    why="LU is that of A, as torch's _linalg_solve_ex returns it since 2.13 for real A too",
)
def linalg_solve_jvp(
    dA: Tensor, dB: Tensor, X: Tensor, LU: Tensor, pivots: Tensor, left: bool
) -> Tensor:
    """A X = B:  dX = A^-1 (dB - dA X)        left
    X A = B:  dX = (dB - X dA) A^-1
    """
    vector = _is_vector(LU, X)
    X, dB = _columns(X, vector), _columns(dB, vector)
    if not absent(dA):
        dB = dB - (dA @ X if left else X @ dA)
    if absent(dB):
        return dB
    dX = torch.linalg.lu_solve(LU, pivots, dB, left=left)
    return dX.squeeze(-1) if vector else dX
