"""Nested tensors: several of different sizes in one.

Their sizes are a tensor, in whose numbers a formula has to look where a gradient is not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normpass.decomps.conventions import Arguments, absent
from normpass.decomps.manual import Gradient, Gradients, Ints, Tensors, manual


def _told(given: Arguments) -> torch.dtype:
    return given["dtype"]


def _nested(parts: Tensors) -> Tensor:
    return torch._nested_tensor_from_tensor_list(list(parts))


@manual("grad: n *s, input: n *s -> dinput: n *s", as_given=True)
def _nested_from_padded_backward(grad: Gradient, input: Tensor, do_transform_0213: bool) -> Tensor:
    """y = x without its padding:  dx = grad, with zeros for it;  0213: x: n h s d -> n s (h d)"""
    if not do_transform_0213:
        return grad.to_padded_tensor(0.0, input.shape)
    n, h, s, d = input.shape
    padded = grad.to_padded_tensor(0.0, (n, s, h * d))
    return padded.unflatten(-1, (h, d)).transpose(1, 2)


@manual("grads: *n, nt_sizes: k d -> dself: k *n", dtype=_told, as_given=True)
def unbind_backward_nested(grads: Gradients, nt_sizes: Tensor, dim: int, **options: Any) -> Tensor:
    """x_1, x_2, .. = x:  dx = (dx_1, dx_2, ..), with zeros for what is not there"""
    sizes = nt_sizes.tolist() if any(map(absent, grads)) else [None] * len(grads)
    pairs = zip(grads, sizes, strict=True)
    return _nested([torch.zeros(size, **options) if absent(g) else g for g, size in pairs])


@manual("grads: *n, self: k *n -> dself: k *n", as_given=True)
def unbind_backward_nested_jagged(grads: Gradients, self: Tensor, dim: int) -> Tensor:
    """x_1, x_2, .. = x:  dx = (dx_1, dx_2, ..), in a buffer like that of x, zeros elsewhere"""
    if dim != 0:
        raise ValueError(f"expected a jagged tensor to be unbound along dim 0; found {dim}")
    x: Any = self
    axis, values, offsets = x._ragged_idx - 1, x.values(), x.offsets()
    starts = [*offsets[:-1].tolist(), values.shape[axis]]
    pieces = []
    for k, (grad, part) in enumerate(zip(grads, x.unbind(), strict=True)):
        piece = torch.zeros_like(part) if absent(grad) else grad
        rest = list(part.shape)
        rest[axis] = starts[k + 1] - starts[k] - rest[axis]
        pieces += [piece, piece.new_zeros(rest)]
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(pieces, axis), offsets, x.lengths(), jagged_dim=axis + 1
    )


@manual("grads: k *n, nt_sizes: k d -> dself: k *n", dtype=_told, as_given=True)
def _nested_split_with_sizes_backward(
    grads: Gradients, split_sizes: Ints, dim: int, nt_sizes: Tensor, **options: Any
) -> Tensor:
    """x_1, x_2, .. = split(x):  dx = cat(dx_1, dx_2, ..), with zeros for what is not there"""
    dim = dim % (nt_sizes.shape[1] + 1)

    def zeros(length: int) -> Tensor:
        each = ((*size[: dim - 1], length, *size[dim:]) for size in nt_sizes.tolist())
        return _nested([torch.zeros(size, **options) for size in each])

    pairs = zip(grads, split_sizes, strict=True)
    return torch.cat([zeros(length) if absent(g) else g for g, length in pairs], dim)
