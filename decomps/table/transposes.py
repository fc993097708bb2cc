"""One mode of derivatives from the other.

J t is the derivative of g -> J^H g along t, and J^H g the gradient along g of t -> J t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.torch_internals import enable_inplace_requires_grad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def transposed(
    linear: Callable[..., list[Tensor]], like: Sequence[Tensor], along: Sequence[Tensor]
) -> list[Any]:
    """The transpose of a linear function of tensors like these, applied to one of each value.

    By the tape, and not by a transform: this may run within a level of torch.func's.
    """
    create = torch.is_grad_enabled()
    with torch.enable_grad(), enable_inplace_requires_grad(True):
        at = [torch.zeros_like(value).requires_grad_() for value in like]
        values = linear(*at)
    pairs = [(v, t) for v, t in zip(values, along, strict=True) if v.requires_grad]
    if not pairs:
        return [None] * len(at)
    ends, tangents = zip(*pairs, strict=True)
    return list(torch.autograd.grad(ends, at, tangents, create_graph=create, allow_unused=True))
