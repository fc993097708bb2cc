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
    from collections.abc import Mapping, Sequence

    from torch import Tensor


def evaluate(region: Region, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """The region's outputs: inputs as its text describes them, sizes its run-time sizes."""
    extents = region.extents(sizes)
    axes = [axis.name for axis in region.axes]
    values: dict[str, Tensor] = {}
    for buffer, tensor in zip(region.inputs, inputs, strict=True):
        values[buffer.name] = _over_axes(tensor, buffer, axes, extents, region.compute_dtype)
    device = inputs[0].device
    for op in region.ops:
        values[op.name] = _apply(op, values, axes, extents, region.compute_dtype, device)
    results = [Layout.of_result(region, each, extents).empty(device) for each in region.results]
    tensors = outputs_in(results, pieces(region, extents), torch.as_strided)
    for output, tensor in zip(region.outputs, tensors, strict=True):
        _leave(tensor, output.buffer, values[output.value], axes, extents)
    return results


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
            args.append(torch.tensor(arg, dtype=dtype, device=device))
    return row.eager(*args)


def _reduce(op: Op, value: Tensor, axes: Sequence[str]) -> Tensor:
    dims = [axes.index(axis) for axis in op.axes]
    if op.fn == "prod":
        for dim in dims:
            value = value.prod(dim, keepdim=True)
        return value
    reduce: Any = {"sum": torch.sum, "amax": torch.amax, "amin": torch.amin}[op.fn]
    return reduce(value, dims, keepdim=True)


def _leave(
    out: Tensor, buffer: Buffer, value: Tensor, axes: Sequence[str], extents: Mapping[str, int]
) -> None:
    """Writes [one dimension an axis] to an output."""
    order = [axis for dim in buffer.dims for axis in dim]
    value = value.expand([extents[a] if a in order else 1 for a in axes])
    rest = [k for k, axis in enumerate(axes) if axis not in order]
    value = value.permute([*(axes.index(axis) for axis in order), *rest])
    out.copy_(value.reshape(out.shape))
