"""Weight norm: w = g * v / norms, each slice of the weight by itself.

PyTorch's second derivative takes the norms for constants (torch 2.13: gradgradcheck fails), in
eager mode too. So the operator is differentiated as what it is made of (decomps/table/traced.py).
Of PyTorch's own derivative the backward is an operator that Inductor leaves to ATen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.conventions import Result, like, working
from normpass.decomps.registry import decomposition

if TYPE_CHECKING:
    from torch import Tensor


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """w = g * v / norms,  norms = sum(v^2)^(1/2) over all axes but dim, in working precision

    aten::_weight_norm_interface; source: aten/src/ATen/native/WeightNorm.cpp: weight_norm_cpu.
    """
    others = [i for i in range(v.dim()) if i != dim % v.dim()]
    wide = v.to(working(v.dtype))
    norms = (wide * wide).sum(others, keepdim=True).sqrt()
    return (wide * (g / norms)).to(v.dtype), norms


@decomposition(
    torch.ops.aten._weight_norm_interface_backward.default,
    source="aten/src/ATen/native/cpu/WeightNormKernel.cpp: weight_norm_backward_kernel",
    shapes="gw: d n, v: d n, g: d 1, norms: d 1 -> dv: d n, dg: d 1",
    results=(Result(like("saved_v")), Result(like("saved_g"))),
    sample=lambda saved_v, saved_norms: {
        "dim": 0,
        "saved_norms": saved_norms.to(working(saved_v.dtype)),
    },
)
def weight_norm_backward(
    gw: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """w = g * v_hat,  v_hat = v / norms,  norms = sum_n(v^2)^(1/2)

    dg = sum_n(gw * v_hat)
    dv = g / norms * (gw - v_hat * dg)
    """
    others = [i for i in range(v.dim()) if i != dim % v.dim()]
    v_hat = v / norms
    dg = (gw * v_hat).sum(others, keepdim=True)
    return g / norms * (gw - v_hat * dg), dg
