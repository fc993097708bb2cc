"""Products of Householder reflectors H_i = I - tau_i v_i v_i^H, v_i the column i of V, which has
what the input has below the diagonal, ones on it, and nothing above.

    H_1 ... H_k = I - V T V^H,  T = W D,  W = (I + D S)^-1,  D = diag(tau),  S = triu(V^H V, 1)

W is the inverse of a triangle with ones on its diagonal: a tau may be zero, and no reflector need
have an inverse. Upstream's formulas are loops over the reflectors, each of which they undo.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import householder_product, solve_triangular
from torch.nn.functional import pad

from normpass.decomps.manual import Gradient, Mask, Tangent, manual


class _Reflectors(NamedTuple):
    """Z = (I + S D)^-1 = I - S T:  dT = W dD Z - T dS T"""

    V: Tensor
    tau: Tensor
    T: Tensor
    W: Tensor
    Z: Tensor


def _reflectors(input: Tensor, tau: Tensor) -> _Reflectors:
    m, k = input.shape[-2], tau.shape[-1]
    V = input[..., :k].tril(-1) + torch.eye(m, k, dtype=input.dtype, device=input.device)
    S, identity = (V.mH @ V).triu(1), torch.eye(k, dtype=input.dtype, device=input.device)
    W = solve_triangular(tau.unsqueeze(-1) * S, identity, upper=True, unitriangular=True)
    T = W * tau.unsqueeze(-2)
    return _Reflectors(V, tau, T, W, identity - S @ T)


def _pulled_back(of: _Reflectors, GV: Tensor, GhV: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The gradients of an input of so many columns and of tau, from that of their product, G:
    GV = G V and GhV = G^H V

    gtau = -diag(W^H V^H G V Z^H),  gS = triu(T^H V^H G V T^H, 1)
    gV = V (gS + gS^H) - G V T^H - G^H V T
    """
    inner = of.W.mH @ (of.V.mH @ GV)
    gtau = -(inner * of.Z.conj()).sum(-1)
    gS = (of.tau.conj().unsqueeze(-1) * inner @ of.T.mH).triu(1)
    gV = of.V @ (gS + gS.mH) - GV @ of.T.mH - GhV @ of.T
    return pad(gV.tril(-1), (0, columns - gV.shape[-1])), gtau


@manual(
    "grad: *b s n, result: *b s n, input: *b s n, tau: *b k -> dinput: *b s n, dtau: *b k",
    of="linalg_householder_product",
    why="upstream's has a flip_order besides, which ormqr alone gives it",
)
def householder_product_backward(
    grad: Gradient, result: Tensor, input: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor]:
    """Y = the first columns of H_1 ... H_k, whose gradient has zeros for the others"""
    of, (m, n) = _reflectors(input, tau), input.shape[-2:]
    GhV = pad(grad.mH @ of.V, (0, 0, 0, m - n))
    return _pulled_back(of, grad @ of.V[..., :n, :], GhV, n)


@manual(
    "dV: *b s n, dtau: *b k, prod: *b s n, V: *b s n, tau: *b k -> dprod: *b s n",
    sample=lambda V, tau: {"prod": householder_product(V, tau)},
    of=lambda V, tau: householder_product(V, tau),
)
def householder_product_jvp(
    dV: Tangent, dtau: Tangent, prod: Tensor, V: Tensor, tau: Tensor
) -> Tensor:
    """Y = E - V T V1^H, V1 the first rows:  dY = -(dV T + V dT) V1^H - V T dV1^H"""
    of, n = _reflectors(V, tau), V.shape[-1]
    dV = dV.narrow(-1, 0, tau.shape[-1]).tril(-1)
    overlap = of.V.mH @ dV
    dS = (overlap + overlap.mH).triu(1)
    dT = of.W @ (dtau.unsqueeze(-1) * of.Z) - of.T @ dS @ of.T
    right = (dV @ of.T + of.V @ dT) @ of.V[..., :n, :].mH
    return -right - of.V @ of.T @ dV.narrow(-2, 0, n).mH


@manual(
    "grad: *b s n, result: *b s n, self: *b s k, tau: *b k, other: *b s n "
    "-> dself: *b s k, dtau: *b k, dother: *b s n",
    sample=lambda self, tau, other, left, transpose: {
        "result": torch.ormqr(self, tau, other, left, transpose)
    },
    of=lambda self, tau, other, left, transpose: torch.ormqr(self, tau, other, left, transpose),
)
def ormqr_backward(
    grad: Gradient,
    result: Tensor,
    self: Tensor,
    tau: Tensor,
    other: Tensor,
    left: bool,
    transpose: bool,
    grad_output_mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Y = H C:  gC = H^H gY,  gH = gY C^H;  Y = H^H C:  gC = H gY,  gH = C gY^H
    Y = C H and Y = C H^H:  as Y^H = H^H C^H and Y^H = H C^H
    """
    of, adjoined = _reflectors(self, tau), transpose == left
    G, C = (grad, other) if left else (grad.mH, other.mH)
    VhG = of.V.mH @ G
    GV, GhV = G @ (of.V.mH @ C).mH, C @ VhG.mH
    if adjoined:
        GV, GhV = GhV, GV
    gC = G - of.V @ ((of.T if adjoined else of.T.mH) @ VhG)
    return *_pulled_back(of, GV, GhV, self.shape[-1]), gC if left else gC.mH
