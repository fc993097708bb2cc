"""Products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Gradients, Ints, Mask, Number, manual
from normpass.decomps.neutral import ZERO

aten = torch.ops.aten


def _by_columns(sizes: Ints, strides: Ints) -> bool:
    """Whether a matrix of these sizes and strides is stored so."""
    return strides[-2] == 1 and strides[-1] == sizes[-2]


def _times(product: Tensor, alpha: Number) -> Tensor:
    return product if alpha == 1 else product * alpha.conjugate()


@manual(
    "grad: n m, mat2: k m -> dmat1: n k",
    of=lambda mat1, mat2, alpha: mat1.mm(mat2) * alpha,
    as_given=True,
    why="mm itself sums halves in float32; a mat1 stored by columns has its gradient so too",
)
def mm_mat1_backward(
    grad: Gradient,
    mat2: Tensor,
    mat1_sizes: Ints,
    mat1_strides: Ints,
    mat1_layout: torch.layout,
    alpha: Number,
) -> Tensor:
    """Y = alpha * A B:  dA = conj(alpha) * grad B^H"""
    strided = torch.strided == mat1_layout == grad.layout == mat2.layout
    if strided and _by_columns(mat1_sizes, mat1_strides):
        return _times(mat2.conj().mm(grad.t()).t(), alpha)
    return _times(grad.mm(mat2.t().conj()), alpha)


@manual(
    "grad: n m, mat1: n k -> dmat2: k m",
    sample=lambda grad: {"strides": [grad.shape[1], 1], "layout": torch.strided},
    of=lambda mat1, mat2, alpha: mat1.mm(mat2) * alpha,
    as_given=True,
    why="mm itself sums halves in float32; a mat2 stored by columns has its gradient so too",
)
def mm_mat2_backward(
    grad: Gradient, mat1: Tensor, sizes: Ints, strides: Ints, layout: torch.layout, alpha: Number
) -> Tensor:
    """Y = alpha * A B:  dB = conj(alpha) * A^H grad"""
    strided = torch.strided == layout == grad.layout == mat1.layout
    if strided and _by_columns(sizes, strides):
        return _times(grad.t().mm(mat1.conj()).t(), alpha)
    return _times(mat1.t().conj().mm(grad), alpha)


# --- products of three, and of a linear layer ----------------------------------------------------


@manual("grad: n d, i1: n c, i2: d c m, i3: n m -> di1: n c, di2: d c m, di3: n m", of="_trilinear")
def _trilinear_backward(
    grad: Gradient,
    i1: Tensor | None,
    i2: Tensor | None,
    i3: Tensor | None,
    expand1: Ints,
    expand2: Ints,
    expand3: Ints,
    sumdim: Ints,
    grad_mask: Mask,
) -> tuple[Tensor, ...]:
    """Y = sum_sumdim(A B C), each repeated along the axes that it lacks:  dA = sum(grad conj(B C))
    along the axes that A lacks, and so on. A factor that is not needed is None.
    """
    rank = grad.dim() + len(sumdim)
    present, *axes = (
        [axis for axis in range(rank) if axis not in {n % rank for n in lacking}]
        for lacking in (sumdim, expand1, expand2, expand3)
    )

    def of(k: int) -> Tensor:
        others = [(x, axes[j]) for j, x in enumerate((i1, i2, i3)) if j != k and x is not None]
        if len(others) < 2 or not grad_mask[k]:
            return ZERO
        (small, first), (large, second) = sorted(others, key=lambda other: len(other[1]))
        kept = [n for n in range(rank) if n in {*present, *first} & {*second, *axes[k]}]
        partial = torch.einsum(grad, present, small.conj(), first, kept)
        return torch.einsum(partial, kept, large.conj(), second, axes[k])

    return of(0), of(1), of(2)


def _linear_backward(self: Tensor, grad_output: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    outer = _rows(grad_output).mT @ _rows(self)
    return grad_output @ weight, outer, _rows(grad_output).sum(0)


def _rows(x: Tensor) -> Tensor:
    """All axes but the last as one."""
    return x.unsqueeze(0).flatten(0, -2)


@manual(
    "grads: *n c, self: *n c, grad_output: *n d, weight: d c "
    "-> dself: *n c, dgrad_output: *n d, dweight: d c",
    sample=lambda self, grad_output, weight: {
        "grads": list(map(torch.randn_like, _linear_backward(self, grad_output, weight)))
    },
    of=_linear_backward,
)
def linear_double_backward(
    grads: Gradients, self: Tensor, grad_output: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """gx = g W,  gW = g^T x,  gb = sum(g):  dx = g dgW,  dW = g^T dgx,
    dg = dgx W^T + x dgW^T + dgb
    """
    of_x, of_weight, of_bias = grads
    through = of_x @ weight.mT + of_bias.expand(grad_output.shape)
    if not absent(of_weight):
        through = through + self @ of_weight.mT
    of_rows = of_x if absent(of_x) else _rows(of_x)
    return grad_output @ of_weight, through, _rows(grad_output).mT @ of_rows


# --- in groups ------------------------------------------------------------------------------------


def _grouped(
    left: Tensor, right: Tensor, offs: Tensor | None, sizes: Ints, strides: Ints, alpha: Number
) -> Tensor:
    """alpha^* A_g B_g, stored by columns where a matrix of these sizes and strides is."""
    if _by_columns(sizes, strides):
        return _times(aten._grouped_mm(right.mT, left.mT, offs).mT, alpha)
    return _times(aten._grouped_mm(left, right, offs), alpha)


@manual("grad: n m, mat2: b k m, offs: b -> dmat1: n k", of="_grouped_mm", as_given=True)
def _grouped_mm_mat1_backward(
    grad: Gradient,
    mat2: Tensor,
    mat1_sizes: Ints,
    mat1_strides: Ints,
    mat1_layout: torch.layout,
    offs: Tensor | None,
    alpha: Number,
) -> Tensor:
    """Y_g = alpha * A_g B_g, g a part of an axis that ends in offs:  dA_g = alpha^* grad_g B_g^T

    The kernel multiplies matrices that have one, and batches, by each other in every mix. A
    gradient that is repeated, which it refuses, is copied.
    """
    return _grouped(grad.contiguous(), mat2.mT, offs, mat1_sizes, mat1_strides, alpha)


@manual("grad: n m, mat1: n k, offs: b -> dmat2: b k m", of="_grouped_mm", as_given=True)
def _grouped_mm_mat2_backward(
    grad: Gradient,
    mat1: Tensor,
    sizes: Ints,
    strides: Ints,
    layout: torch.layout,
    offs: Tensor | None,
    alpha: Number,
) -> Tensor:
    """Y_g = alpha * A_g B_g:  dB_g = alpha^* A_g^T grad_g"""
    return _grouped(mat1.mT, grad.contiguous(), offs, sizes, strides, alpha)
