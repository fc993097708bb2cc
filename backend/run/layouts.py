"""Tensors as a kernel was planned for: shape, strides and dtype, copies where they differ, and the
outputs that are parts of one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

# What Inductor's own code calls for each tensor: ten times cheaper than the same in Python.
from torch._C._dynamo.guards import assert_size_stride

from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from normpass.passes.region import Buffer, Region, Result


class Layout(NamedTuple):
    """What a tensor of a region looks like for given sizes: the arguments of empty_strided."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, region: Region, buffer: Buffer, extents: Mapping[str, int]) -> Layout:
        return cls(region.shape(buffer, extents), region.strides(buffer, extents), buffer.dtype)

    @classmethod
    def of_result(cls, region: Region, result: Result, extents: Mapping[str, int]) -> Layout:
        first, shape = result.buffers[0], region.whole_shape(result, extents)
        return cls(shape, region.whole_strides(result, extents), first.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """New memory of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class Work(NamedTuple):
    """How much a launch works on. elements: of all axes together. traffic: bytes of its tensors."""

    elements: int
    traffic: int

    @classmethod
    def of(cls, region: Region, extents: Mapping[str, int]) -> Work:
        inputs = (Layout.of(region, buffer, extents) for buffer in region.inputs)
        results = (Layout.of_result(region, each, extents) for each in region.results)
        traffic = sum(product(x.shape) * x.dtype.itemsize for x in (*inputs, *results))
        return cls(product(extents[axis.name] for axis in region.axes), traffic)


def reads_what_is_not_there(region: Region, extents: Mapping[str, int]) -> bool:
    """Whether a tensor has no elements and a kernel would read some: it repeats them along an axis
    that is empty, and a kernel reads them once, in front of the loop.
    """
    return any(
        0 in region.shape(buffer, extents) and all(extents[axis] for axis in buffer.axes)
        for buffer in region.inputs
    )


class Piece(NamedTuple):
    """Where an output lies: in which result, and from which of its elements on."""

    result: int
    layout: Layout
    offset: int


def pieces(region: Region, extents: Mapping[str, int]) -> tuple[Piece, ...]:
    """Where each output of a region lies."""
    found: list[Piece] = []
    for k, result in enumerate(region.results):
        offset = 0
        for buffer in result.buffers:
            layout = Layout.of(region, buffer, extents)
            found.append(Piece(k, layout, offset))
            if result.is_joined:
                count = 1 if result.in_turn else layout.shape[result.dim]
                offset += count * layout.strides[result.dim] // result.stride_of_parts
    return tuple(found)


def outputs_in(
    results: Sequence[Tensor], pieces: Sequence[Piece], view: Callable[..., Tensor]
) -> list[Tensor]:
    """The outputs of a region as parts of its results. view: torch.as_strided, or what does it."""
    return [
        results[k]
        if results[k].shape == layout.shape
        else view(results[k], layout.shape, layout.strides, offset)
        for k, layout, offset in pieces
    ]


class Laid(NamedTuple):
    """Where all tensors of a region lie for given sizes. pieces: its outputs, where some of them
    are parts of results. is_there: whether all that a kernel would read is; else it cannot be
    launched.
    """

    inputs: tuple[Layout, ...]
    results: tuple[Layout, ...]
    pieces: tuple[Piece, ...]
    is_there: bool

    @classmethod
    def of(cls, region: Region, sizes: Sequence[int]) -> Laid:
        extents = region.extents(sizes)
        return cls(
            tuple(Layout.of(region, buffer, extents) for buffer in region.inputs),
            tuple(Layout.of_result(region, each, extents) for each in region.results),
            pieces(region, extents) if region.joins else (),
            not reads_what_is_not_there(region, extents),
        )


def lie_as_planned(inputs: Sequence[Tensor], planned: Sequence[Layout]) -> bool:
    """Whether the tensors lie in memory as the kernel expects them."""
    if len(inputs) != len(planned):
        return False
    try:
        for tensor, want in zip(inputs, planned, strict=True):
            if tensor.dtype is not want.dtype:
                return False
            assert_size_stride(tensor, want.shape, want.strides)
    except AssertionError:
        return False
    return True


def relaid_out(region: Region, inputs: Sequence[Tensor], planned: Sequence[Layout]) -> list[Tensor]:
    """The tensors as the kernel was planned for; copies only where elements really lie elsewhere.

    Raises:
        ValueError: if they are other tensors altogether, with what was expected and found.
    """
    if len(inputs) != len(planned):
        raise ValueError(
            f"region {region.name}: expected {len(planned)} tensors, found {len(inputs)}"
        )
    for buffer, tensor, want in zip(region.inputs, inputs, planned, strict=True):
        if tensor.shape != want.shape or tensor.dtype is not want.dtype:
            raise ValueError(
                f"region {region.name}: expected {buffer.name} of shape {want.shape} and "
                f"{want.dtype}, found shape {tuple(tensor.shape)} and {tensor.dtype}"
            )
    return [_relaid_out(tensor, want) for tensor, want in zip(inputs, planned, strict=True)]


def _relaid_out(tensor: Tensor, want: Layout) -> Tensor:
    if lie_as_planned([tensor], [want]):
        return tensor
    return copied(tensor, want.strides)


def copied(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy that lies so in new memory. Where elements share a place one of them stands for all:
    there is no memory to copy the others to.
    """
    shape = tensor.shape
    for dim, step in enumerate(strides):
        if step == 0 and shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor).expand(shape)
