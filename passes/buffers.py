"""How a region's text describes the tensors that enter and leave it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy

from normpass.passes.domain import extent_of, step_of
from normpass.passes.region import Buffer, Stride

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from normpass.passes.domain import Dims, Domain


class Buffers:
    """Descriptions of tensors over the named axes of a domain. sizes: names of the strides that are
    known at run time, which the region is given.
    """

    def __init__(self, domain: Domain, axis_names: Mapping[int, str]) -> None:
        self.domain = domain
        self.axis_names = axis_names
        self.sizes: dict[sympy.Expr, str] = {}

    def buffer(self, name: str, tensor: torch.Tensor, dims: Dims) -> Buffer:
        """A tensor of these dimensions."""
        return Buffer(name, tensor.dtype, self.named(dims), self.strides(tensor))

    def piece(
        self, name: str, dtype: torch.dtype, dims: Dims, steps: Sequence[int | torch.SymInt]
    ) -> Buffer:
        """A part of a tensor that has these dimensions and strides."""
        strides = tuple(self.stride(step_of(step)) for step in steps)
        return Buffer(name, dtype, self.named(dims), strides)

    def named(self, dims: Dims) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(self.axis_names[axis] for axis in self.domain.resolve(dim)) for dim in dims
        )

    def strides(self, tensor: torch.Tensor) -> tuple[Stride, ...] | None:
        """None for a contiguous tensor; else numbers, or names of sizes known at run time."""
        contiguous: sympy.Expr = sympy.Integer(1)
        same = True
        for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
            extent = extent_of(size)
            gap = sympy.expand(step_of(stride) - contiguous)
            same = same and (extent == 1 or gap == 0)
            contiguous = contiguous * extent
        return None if same else tuple(self.stride(step_of(s)) for s in tensor.stride())

    def stride(self, step: sympy.Expr) -> Stride:
        """A stride as a number, or as the name of a size that is known at run time."""
        if step.is_Integer:
            return int(step)
        return self.sizes.setdefault(step, f"t{len(self.sizes)}")
