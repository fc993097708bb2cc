"""Products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.conventions import Result, absent, like
from normpass.decomps.manual import Gradient, Number, manual
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


@formula(
    "vjp",
    "mm_mat1_backward(Tensor? grad, Tensor mat2, SymInt[] mat1_sizes, SymInt[] mat1_strides, "
    "Layout mat1_layout, Scalar alpha) -> Tensor",
    source=f"{MANUAL}: mm_mat1_backward",
    shapes="grad: n m, mat2: k m -> dmat1: n k",
    results=(Result(like("grad"), None),),
    zeros=("grad",),
    of=lambda mat1, mat2, alpha: mat1.mm(mat2) * alpha,
    as_given=True,
    why="mm itself sums halves in float32; a mat1 stored by columns has its gradient so too",
)
def mm_mat1_backward(
    grad: Tensor,
    mat2: Tensor,
    mat1_sizes: Sequence[int],
    mat1_strides: Sequence[int],
    mat1_layout: torch.layout,
    alpha: complex,
) -> Tensor:
    """Y = alpha * A B:  dA = conj(alpha) * grad B^H"""
    if absent(grad):
        return grad
    strided = torch.strided == mat1_layout == grad.layout == mat2.layout
    if strided and mat1_strides[0] == 1 and mat1_strides[1] == mat1_sizes[0]:
        product = mat2.conj().mm(grad.t()).t()
    else:
        product = grad.mm(mat2.t().conj())
    return product if alpha == 1 else product * alpha.conjugate()


@manual(
    "grad: n m, mat1: n k -> dmat2: k m",
    results=(Result(like("grad"), None),),
    sample=lambda grad, mat1: {
        "sizes": [mat1.shape[1], grad.shape[1]],
        "strides": [grad.shape[1], 1],
        "layout": torch.strided,
    },
    of=lambda mat1, mat2, alpha: mat1.mm(mat2) * alpha,
    as_given=True,
    why="mm itself sums halves in float32; a mat2 stored by columns has its gradient so too",
)
def mm_mat2_backward(
    grad: Gradient,
    mat1: Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    layout: torch.layout,
    alpha: Number,
) -> Tensor:
    """Y = alpha * A B:  dB = conj(alpha) * A^H grad"""
    if absent(grad):
        return grad
    strided = torch.strided == layout == grad.layout == mat1.layout
    if strided and strides[0] == 1 and strides[1] == sizes[0]:
        product = grad.t().mm(mat1.conj()).t()
    else:
        product = mat1.t().conj().mm(grad)
    return product if alpha == 1 else product * alpha.conjugate()
