"""Sparse tensors. What a sparse result has no element for has no gradient; one that is there twice
counts twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normpass.decomps.manual import Gradient, Ints, Mask, Number, manual
from normpass.decomps.neutral import ZERO


def _times(x: Tensor, factor: Number) -> Tensor:
    return x if factor == 1 else x * factor.conjugate()


def _adjoint(x: Tensor) -> Tensor:
    """x^H; sparse tensors have no mH."""
    return x.t().conj() if x.layout == torch.strided else x.conj().t()


@manual("grad: n m, mat1: n k, mat2: k m -> dmat1: n k", as_given=True)
def mm_mat1_sparse_backward(grad: Gradient, mat1: Tensor, mat2: Tensor, alpha: Number) -> Tensor:
    """Y = alpha A B:  dA = conj(alpha) grad B^H, where A has elements"""
    if mat1.layout == torch.sparse_csr:
        alpha = alpha.conjugate()
        return torch.sparse.sampled_addmm(mat1, grad, _adjoint(mat2), beta=0, alpha=alpha)
    product = _times(grad.mm(_adjoint(mat2)), alpha)
    return product if mat1.layout == torch.strided else product.sparse_mask(mat1.coalesce())


@manual(
    "grad: n m, self: n m, mat1: n k, mat2: k m -> dself: n m, dmat1: n k, dmat2: k m",
    as_given=True,
)
def sparse_sampled_addmm_backward(
    grad: Gradient,
    self: Tensor,
    mat1: Tensor | None,
    mat2: Tensor | None,
    alpha: Number,
    beta: Number,
    grad_input_mask: Mask,
) -> tuple[Tensor, ...]:
    """Y = beta C + alpha A B, where C has elements:  the gradient is taken there"""
    there = grad.sparse_mask(self)
    return (
        _times(grad, beta),
        ZERO if mat2 is None else _times(there @ _adjoint(mat2), alpha),
        ZERO if mat1 is None else _times(_adjoint(mat1) @ there, alpha),
    )


@manual("grad: *n, mask: *n -> dself: *n", as_given=True)
def sparse_mask_backward(grad: Gradient, mask: Tensor, self_layout: torch.layout) -> Tensor:
    """y = x, where the mask has elements, as often as it has them:  so dx is of the gradient"""
    found = grad.sparse_mask(mask)
    return found.to_dense() if self_layout == torch.strided else found


@manual("grad: n m, a: n k, b: k m -> da: n k", as_given=True)
def sparse_sparse_matmul_backward(grad: Gradient, a: Tensor, b: Tensor, grad_order: int) -> Tensor:
    """Y = A B:  dA = grad B^H, where A has elements;  of order 1:  dB = A^H grad, where B has"""
    if grad_order not in (0, 1):
        raise ValueError(f"expected grad_order to be 0, of a, or 1, of b; found {grad_order}")
    if grad_order == 0:
        return torch.sparse.mm(grad, _adjoint(b)).sparse_mask(a.coalesce())
    return torch.sparse.mm(_adjoint(a), grad).sparse_mask(b.coalesce())


# --- conversions ---------------------------------------------------------------------------------


@manual("grad: *n -> dself: *n", as_given=True)
def to_sparse_backward(
    grad: Gradient, self_layout: torch.layout, self_blocksize: Ints | None
) -> Tensor:
    """y = x in another layout:  dx = grad, in the layout of x"""
    if self_layout == torch.strided:
        return grad.to_dense()
    blocks = None if self_blocksize is None else tuple(self_blocksize)
    return grad.to_sparse(layout=self_layout, blocksize=blocks)


@manual("grad: *m, self: *n -> dself: *n", as_given=True)
def values_backward(grad: Gradient, self: Tensor) -> Tensor:
    """y = the elements of x:  dx has elements grad at the places of those of x"""
    # The places are those of a tensor: they need no second look.
    if self.layout == torch.sparse_coo:
        places = self.indices()
        return torch.sparse_coo_tensor(
            places, grad, self.shape, check_invariants=False, is_coalesced=True
        )
    if self.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed, plain = self.crow_indices(), self.col_indices()
    elif self.layout in (torch.sparse_csc, torch.sparse_bsc):
        compressed, plain = self.ccol_indices(), self.row_indices()
    else:
        raise NotImplementedError(f"the elements of a tensor of layout {self.layout}")
    return torch.sparse_compressed_tensor(
        compressed, plain, grad, self.shape, layout=self.layout, check_invariants=False
    )
