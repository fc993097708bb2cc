"""A region's kernel beside its oracle: the same tensors for both, and how far apart they may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from oracles import assert_no_less_accurate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from triton_cases import Case

    from normpass.backend.run.gpu_kernel import GpuKernel
    from normpass.passes.region import Region


def make_inputs(case: Case, region: Region, extents: Mapping[str, int]) -> dict[str, Tensor]:
    """Tensors of the region's shapes and strides, the same in every run."""
    generator = torch.Generator().manual_seed(sum(map(ord, case.name)) + sum(extents.values()))
    tensors = {}
    for buffer in region.inputs:
        shape, strides = region.shape(buffer, extents), region.strides(buffer, extents)
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        values = torch.randn(last + 1 if all(shape) else 0, generator=generator)
        if buffer.name == "rstd":
            values = values.abs() + 0.5
        for k, value in enumerate(case.special.get(buffer.name, ())):
            values[k] = value
        values = values > 0 if buffer.dtype is torch.bool else values.to(buffer.dtype)
        tensors[buffer.name] = values.as_strided(shape, strides)
    return tensors


def compare(
    case: Case,
    kernel: GpuKernel,
    sizes: tuple[int, ...],
    device: str,
    oracle: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Raises AssertionError if what a kernel of a case's region computes is further from the oracle
    than it may be.
    """
    region = kernel.region
    extents = region.extents(sizes)
    inputs = make_inputs(case, region, extents)
    found = kernel([tensor.to(device) for tensor in inputs.values()], sizes)
    assert not kernel._failed, "the kernel could not be built"
    reference = oracle(**{k: raised(v, torch.float64) for k, v in inputs.items()})
    working = oracle(**{k: raised(v, region.compute_dtype) for k, v in inputs.items()})
    for output, ours, exact, rounded in zip(region.outputs, found, reference, working, strict=True):
        what = f"{output.buffer.name} for sizes {sizes}"
        assert ours.dtype is output.buffer.dtype, what
        shape, strides = (
            region.shape(output.buffer, extents),
            region.strides(output.buffer, extents),
        )
        assert (ours.shape, ours.stride()) == (shape, strides), what
        exact, rounded = exact.reshape(shape), rounded.reshape(shape).to(ours.dtype)
        if ours.dtype is torch.bool:
            assert torch.equal(ours.cpu(), rounded), what
        else:
            assert_no_less_accurate(ours.cpu(), rounded, exact.double(), what)


def raised(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is torch.bool else tensor.to(dtype)
