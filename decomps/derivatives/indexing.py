"""Reading with tensors of indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.conventions import Result, absent, like
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
