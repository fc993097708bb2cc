"""as_strided: what reads a storage at places of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normpass.decomps.conventions import working
from normpass.decomps.manual import Gradient, Ints, manual

aten = torch.ops.aten


class _Storage:
    """The part of a storage that a tensor and a view of it read, from the first place on.

    size   how long it is
    input  where in it the elements of the tensor are, in their order
    view   where those of the view are
    """

    def __init__(self, x: Tensor, sizes: Ints, strides: Ints, offset: int | None) -> None:
        at = x.storage_offset()
        to = at if offset is None else offset
        start = torch.sym_min(at, to)
        geometries = (x.shape, x.stride(), at - start), (sizes, strides, to - start)
        self.size = torch.sym_max(*(_end(*geometry) for geometry in geometries))
        places = torch.arange(self.size, device=x.device)
        self.input, self.view = (places.as_strided(*g).reshape(-1) for g in geometries)


def _end(sizes: Ints, strides: Ints, offset: int) -> int:
    if 0 in sizes:
        return offset
    return offset + 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def _may_overlap(x: Tensor) -> bool:
    """Whether two elements of x may share a place: some axis does not step over the shorter."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@manual(
    "grad: m k, input_geometry: n d -> dself: n d",
    sample=lambda grad: {
        "sym_sizes": list(grad.shape),
        "sym_strides": [1, 2],
        "sym_storage_offset_": 1,
    },
    of=lambda self, sym_sizes, sym_strides, sym_storage_offset_: aten.as_strided(
        self, sym_sizes, sym_strides, sym_storage_offset_
    ),
    as_given=True,
    why="input_geometry is the tensor itself, of which no more is asked than sizes, strides and "
    "offset. As upstream, elements of an input that share a place have equal parts of its "
    "gradient, and what the view reads where the input has no element is a constant",
)
def as_strided_backward(
    grad: Gradient,
    input_geometry: Tensor,
    sym_sizes: Ints,
    sym_strides: Ints,
    sym_storage_offset_: int | None,
) -> Tensor:
    """y_k = storage[p(k)],  x_i = storage[q(i)]:

    dx_i = sum_{p(k) = q(i)}(grad_k) / count_{q(j) = q(i)}(j)
    """
    if grad.numel() == 0 or input_geometry.numel() == 0:
        return grad.new_zeros(input_geometry.shape)
    places = _Storage(input_geometry, sym_sizes, sym_strides, sym_storage_offset_)
    terms = grad.reshape(-1).to(working(grad.dtype))
    storage = terms.new_zeros(places.size).index_add(0, places.view, terms)
    if _may_overlap(input_geometry):
        ones = torch.ones_like(places.input)
        count = ones.new_zeros(places.size).index_add(0, places.input, ones)
        storage = storage / count.clamp(min=1)
    return storage[places.input].view(input_geometry.shape)


_PLACE = {"strides": [1, 2], "storage_offset": 1}


def _with_zeros(self: Tensor, sizes: Ints, strides: Ints, storage_offset: int) -> Tensor:
    places = torch.arange(math.prod(self.shape)).as_strided(sizes, strides, storage_offset)
    return self.flatten().index_fill(0, places.flatten(), 0).view(self.shape)


@manual(
    "grad: n d, input_geometry: n d, src_geometry: m k -> dself: n d",
    sample=lambda src_geometry: {**_PLACE, "sizes": list(src_geometry.shape)},
    of=_with_zeros,
    as_given=True,
    why="upstream keeps of the gradient what is at the places of src, and nothing where self is",
)
def as_strided_scatter_backward(
    grad: Gradient,
    input_geometry: Tensor,
    src_geometry: Tensor,
    sizes: Ints,
    strides: Ints,
    storage_offset: int | None,
) -> Tensor:
    """y = x, but src at some places:  dx = grad, zero at those places"""
    places = _Storage(input_geometry, sizes, strides, storage_offset)
    written = torch.zeros(places.size, dtype=torch.bool, device=grad.device)
    written = written.index_fill(0, places.view, True)
    return grad.masked_fill(written[places.input].view(grad.shape), 0)
