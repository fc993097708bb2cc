"""What selects among values: maxima, minima, medians. Equal values share a gradient, unless the
operator says with an index which of them it has taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normpass.decomps.axes import put_back, reduced
from normpass.decomps.manual import Gradient, Ints, Tangent, manual

aten = torch.ops.aten

# --- shared by equal values ---------------------------------------------------------------------


@manual("grad: , input: *d, value: -> dself: *d", of="max", compared=("input", "value"))
def evenly_distribute_backward(grad: Gradient, input: Tensor, value: Tensor) -> Tensor:
    """y = one of x:  dx = grad / count, at those elements, count in number, that are y

    Where y is NaN it is those that are NaN.
    """
    chosen = (input == value) | (input.isnan() & value.isnan())
    return (grad / chosen.sum()).masked_fill(~chosen, 0)


@manual("fw_grad: *d, input: *d, value: -> value_t: ", of="max", compared=("input", "value"))
def evenly_read_jvp(fw_grad: Tangent, input: Tensor, value: Tensor) -> Tensor:
    """y = one of x:  dy = the mean of dx at those elements that are y"""
    chosen = input == value
    return fw_grad.masked_fill(~chosen, 0).sum() / chosen.sum()


@manual("grad: *n 1, mask: *n d -> dself: *n d", of="amax")
def scale_grad_by_count(grad: Gradient, mask: Tensor, dims: Ints) -> Tensor:
    """y = max_d(x), with its axes:  dx = grad / count_d(mask), at the mask: where x = y"""
    return grad / mask.sum(list(dims), keepdim=True) * mask


@manual("x: *n d, dx: *n d, result: *n -> result_t: *n", of="amax", compared=("x", "result"))
def amaxamin_jvp(x: Tensor, dx: Tangent, result: Tensor, dim: Ints, keepdim: bool) -> Tensor:
    """y = max_d(x):  dy = the mean along d of dx, where x = y"""
    axes = reduced(x, dim)
    mask = x == (result if keepdim else put_back(result, axes))
    total = dx.masked_fill(~mask, 0).sum(axes, keepdim=keepdim)
    return total / mask.sum(axes, keepdim=keepdim)


@manual(
    "self: *n d, grad_min: *n, grad_max: *n, min: *n, max: *n -> dself: *n d",
    sample=lambda self, dim: {"min": self.amin(dim), "max": self.amax(dim)},
    of=aten.aminmax.default,
    compared=("self", "min", "max"),
)
def aminmax_backward(
    self: Tensor,
    dim: int | None,
    keepdim: bool,
    grad_min: Gradient,
    grad_max: Gradient,
    min: Tensor,
    max: Tensor,
) -> Tensor:
    """The gradients of both ends, each shared by the elements that are there"""
    axes = reduced(self, None if dim is None else [dim])

    def share(grad: Tensor, end: Tensor) -> Tensor:
        if not keepdim:
            grad, end = put_back(grad, axes), put_back(end, axes)
        return scale_grad_by_count(grad, end == self, axes)

    return share(grad_min, min) + share(grad_max, max)


@manual(
    "self_p: *n d, self_t: *n d, result: *n -> result_t: *n",
    sample=lambda self_p, dim: {"result": self_p.amax(dim)},
    of=aten.amax.default,
    compared=("self_p", "result"),
)
def aminmax_jvp(
    self_p: Tensor, self_t: Tangent, result: Tensor, dim: int | None, keepdim: bool
) -> Tensor:
    """y = max_d(x) or min_d(x):  dy = the mean along d of dx, where x = y"""
    return amaxamin_jvp(self_p, self_t, result, [] if dim is None else [dim], keepdim)


# --- told by an index ---------------------------------------------------------------------------


@manual("input: *n d, indices: *n -> values_t: *n", of="max.dim")
def gather_with_keepdimed_indices(
    input: Tangent, dim: int, indices: Tensor, keepdim: bool
) -> Tensor:
    """y_n = x_(n, i_n):  dy_n = dx_(n, i_n)"""
    found = input.gather(dim, indices if keepdim else indices.unsqueeze(dim))
    return found if keepdim else found.squeeze(dim)


def _unpooled(self: Tensor) -> dict[str, Any]:
    """An image twice as high and wide, each value at the lower right corner of its square."""
    high, wide = self.shape[-2:]
    rows = torch.arange(high, device=self.device).unsqueeze(-1) * 2 + 1
    places = rows * 2 * wide + torch.arange(wide, device=self.device) * 2 + 1
    return {"indices": places.expand(self.shape), "output_size": [2 * high, 2 * wide]}


@manual("grad: *n 2c 2k, indices: *n c k -> dself: *n c k", of="max_unpool2d", sample=_unpooled)
def max_pool_double_backward(grad: Gradient, indices: Tensor, dim: int) -> Tensor:
    """dx_(i_k) = dy_k, i numbers within the last dim axes:  its transpose, grad_(i_k)"""
    places = indices.flatten(-dim)
    return grad.flatten(-dim).gather(-1, places).view(indices.shape)
