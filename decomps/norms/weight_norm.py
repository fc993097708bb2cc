"""Weight norm: w = g * v / norms, each slice of the weight by itself.

PyTorch's second derivative takes the norms for constants (torch 2.13: gradgradcheck fails), in
eager mode too. So the operator is differentiated as what it is made of (decomps/table/traced.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.decomps.conventions import working

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
