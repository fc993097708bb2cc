"""Reading with tensors of indices, and embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.conventions import Result, absent, like
from normpass.decomps.manual import Gradient, manual
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


def _indexed(zeros_like_self: Tensor, indices: Sequence[Tensor]) -> dict[str, Any]:
    """One index, of the first axis, that reads some places twice and others never."""
    size, (index, *_) = len(zeros_like_self), indices
    places = torch.arange(index.numel(), device=index.device) % max(size - 1, 1)
    return {
        "zeros_like_self": torch.zeros_like(zeros_like_self),
        "indices": [places.reshape(index.shape)],
    }


@formula(
    "vjp",
    "index_backward(Tensor zeros_like_self, Tensor?[] indices, Tensor? grad) -> Tensor",
    source=f"{MANUAL}: index_backward",
    shapes="zeros_like_self: d *s, indices: *n, grad: *n *s -> dself: d *s",
    results=(Result(like("zeros_like_self"), None),),
    zeros=("grad",),
    sample=_indexed,
    of=lambda self, indices: self[tuple(indices)],
)
def index_backward(zeros_like_self: Tensor, indices: Sequence[Tensor], grad: Tensor) -> Tensor:
    """y = x[indices]:  dself[indices] += grad, a place as often as it was read"""
    if absent(grad):
        return grad
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
    if absent(grad):
        return grad
    nothing = torch.zeros_like(self).reshape(-1)
    return nothing.index_put((indices,), grad, accumulate=True).view(self.shape)


def _words(grad_output: Tensor) -> dict[str, Any]:
    """Four of five words, some of them twice."""
    shape = grad_output.shape[:-1]
    count = torch.arange(math.prod(shape), device=grad_output.device).reshape(shape)
    return {"num_weights": 5, "indices": count % 4}


@formula(
    "double_backward",
    "embedding_dense_double_backward(Tensor? grad, Tensor indices, SymInt padding_idx) -> Tensor",
    source=f"{MANUAL}: embedding_dense_double_backward_symint",
    shapes="grad: d m, indices: *n -> dgrad_output: *n m",
    results=(Result(like("grad"), None),),
    zeros=("grad",),
    of="embedding_dense_backward",
    sample=_words,
)
def embedding_dense_double_backward(grad: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """dW[indices] += g, but where indices are the padding:  dg = grad[indices], zero there"""
    if absent(grad):
        return grad
    found = grad.index_select(0, indices.reshape(-1)).view(*indices.shape, grad.shape[1])
    return found.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
