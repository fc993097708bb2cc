"""Reading with tensors of indices, and embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normpass.decomps.conventions import absent
from normpass.decomps.manual import FILE, Gradient, Size, Tensors, manual

if TYPE_CHECKING:
    from collections.abc import Sequence


def _indexed(zeros_like_self: Tensor, indices: Tensors) -> dict[str, Any]:
    """One index, of the first axis, that reads some places twice and others never."""
    size, (index, *_) = len(zeros_like_self), indices
    places = torch.arange(index.numel(), device=index.device) % max(size - 1, 1)
    return {
        "zeros_like_self": torch.zeros_like(zeros_like_self),
        "indices": [places.reshape(index.shape)],
    }


@manual(
    "zeros_like_self: d *s, indices: *n, grad: *n *s -> dself: d *s",
    sample=_indexed,
    of=lambda self, indices: self[tuple(indices)],
)
def index_backward(
    zeros_like_self: Tensor, indices: Sequence[Tensor | None], grad: Gradient
) -> Tensor:
    """y = x[indices]:  dself[indices] += grad, a place as often as it was read"""
    # An axis without an index is read as a whole: there None is no gradient.
    places = [None if absent(index) else index for index in indices]
    # The method takes no None.
    return torch.ops.aten.index_put.default(zeros_like_self, places, grad, True)


@manual(
    "grad: n, self: d m, indices: n -> dself: d m",
    of="take",
    sample=lambda self: {"index": torch.arange(6, device=self.device) % 4 - 2},
)
def take_backward(grad: Gradient, self: Tensor, indices: Tensor) -> Tensor:
    """y = x[indices], x as one row:  dx[indices] += grad"""
    nothing = torch.zeros_like(self).reshape(-1)
    return nothing.index_put((indices,), grad, accumulate=True).view(self.shape)


def _words(grad_output: Tensor) -> dict[str, Any]:
    """Four of five words, some of them twice."""
    shape = grad_output.shape[:-1]
    count = torch.arange(math.prod(shape), device=grad_output.device).reshape(shape)
    return {"num_weights": 5, "indices": count % 4}


@manual(
    "grad: d m, indices: *n -> dgrad_output: *n m",
    source=f"{FILE}: embedding_dense_double_backward_symint",
    sample=_words,
    of="embedding_dense_backward",
)
def embedding_dense_double_backward(grad: Gradient, indices: Tensor, padding_idx: Size) -> Tensor:
    """dW[indices] += g, but where indices are the padding:  dg = grad[indices], zero there"""
    found = grad.index_select(0, indices.reshape(-1)).view(*indices.shape, grad.shape[1])
    return found.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
