"""A region evaluated with eager PyTorch ops: slow, and needs neither compiler nor generator.

The path that is left when a kernel cannot be built, and the one for devices without a generator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.program.pointwise import POINTWISE
from normpass.backend.run.layouts import Layout, outputs_in, pieces
from normpass.passes.region import Buffer, Op, Region, product

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor


def evaluate(region: Region, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """The region's outputs: inputs as its text describes them, sizes its run-time sizes."""
    extents, device = region.extents(sizes), inputs[0].device
    results = [Layout.of_result(region, each, extents).empty(device) for each in region.results]
    tensors = outputs_in(results, pieces(region, extents), torch.as_strided)
    for tensor, value in zip(tensors, _outputs(region, inputs, extents), strict=True):
        tensor.copy_(value)
    return results


def out_of_place(
    region: Region, inputs: Sequence[Tensor], sizes: Sequence[int]
) -> Iterator[Tensor]:
    """The same values, wherever they lie, by operators that write over nothing."""
    values = _outputs(region, inputs, region.extents(sizes))
    for result in region.results:
        parts = [next(values).to(buffer.dtype) for buffer in result.buffers]
        if not result.is_joined:
            yield from parts
        elif result.in_turn:
            yield torch.stack(parts, result.dim + 1).flatten(result.dim, result.dim + 1)
        else:
            yield torch.cat(parts, result.dim)


def _outputs(
    region: Region, inputs: Sequence[Tensor], extents: Mapping[str, int]
) -> Iterator[Tensor]:
    """The values of the outputs, in order, in the shapes of their tensors."""
    axes = [axis.name for axis in region.axes]
    values: dict[str, Tensor] = {}
    for buffer, tensor in zip(region.inputs, inputs, strict=True):
        values[buffer.name] = _over_axes(tensor, buffer, axes, extents, region.compute_dtype)
    device = inputs[0].device
    for op in region.ops:
        values[op.name] = _apply(op, values, axes, extents, region.compute_dtype, device)
    for output in region.outputs:
        value = _over_dims(values[output.value], output.buffer, axes, extents)
        yield value.reshape(region.shape(output.buffer, extents))


def _over_axes(
    tensor: Tensor,
    buffer: Buffer,
    axes: Sequence[str],
    extents: Mapping[str, int],
    compute: torch.dtype,
) -> Tensor:
    """[dims of the buffer] -> [one dimension an axis], of size one where the tensor does not vary
    over it.
    """
    order = [axis for dim in buffer.dims for axis in dim]
    split = tensor.reshape([extents[axis] for axis in order])
    present = [axis for axis in axes if axis in order]
    split = split.permute([order.index(axis) for axis in present])
    split = split.reshape([extents[axis] if axis in order else 1 for axis in axes])
    for k, axis in enumerate(axes):
        if axis in order and axis not in buffer.axes:  # expanded: one element stands for all
            split = split[(slice(None),) * k + (slice(0, 1),)]
    return split if buffer.dtype is torch.bool else split.to(compute)


def _apply(
    op: Op,
    values: Mapping[str, Tensor],
    axes: Sequence[str],
    extents: Mapping[str, int],
    compute: torch.dtype,
    device: torch.device,
) -> Tensor:
    if op.fn == "numel":
        count = product(extents[axis] for axis in op.axes)
        return torch.full([1] * len(axes), count, dtype=compute, device=device)
    if op.is_reduction:
        return _reduce(op, values[str(op.args[0])].to(compute), axes)
    row = POINTWISE[op.fn]
    args = []
    for k, arg in enumerate(op.args):
        dtype = torch.bool if str(k) in row.truth else compute
        if isinstance(arg, str):
            args.append(values[arg].to(dtype))
        else:  # at once in this dtype: a number's own is float32
            args.append(torch.full([], arg, dtype=dtype, device=device))
    return row.eager(*args)


def _reduce(op: Op, value: Tensor, axes: Sequence[str]) -> Tensor:
    dims = [axes.index(axis) for axis in op.axes]
    if op.fn == "prod":
        for dim in dims:
            value = value.prod(dim, keepdim=True)
        return value
    reduce: Any = {"sum": torch.sum, "amax": torch.amax, "amin": torch.amin}[op.fn]
    return reduce(value, dims, keepdim=True)


def _over_dims(
    value: Tensor, buffer: Buffer, axes: Sequence[str], extents: Mapping[str, int]
) -> Tensor:
    """[one dimension an axis] -> [one for each axis of an output's dims], and of size one."""
    order = [axis for dim in buffer.dims for axis in dim]
    value = value.expand([extents[a] if a in order else 1 for a in axes])
    rest = [k for k, axis in enumerate(axes) if axis not in order]
    return value.permute([*(axes.index(axis) for axis in order), *rest])
