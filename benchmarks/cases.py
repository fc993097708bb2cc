"""What is measured: a norm at a shape, in a dtype, in a phase, and the least traffic of that."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normpass.benchmarks.norms import NORMS, Extents, Norm, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

PHASES = ("backward", "forward+backward")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    norm: Norm
    shape: Shape
    dtype: str
    phase: str

    @property
    def label(self) -> str:
        """For people: `layer_norm 4096x1024 float32 backward`."""
        return f"{self.norm.name} {spell(self.shape)} {self.dtype} {self.phase}"

    def build(self, device: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
        """The module in training mode, x and dy: fixed random numbers, nothing uniform."""
        generator = torch.Generator().manual_seed(seed)

        def noise(shape: Shape) -> Tensor:
            return torch.randn(shape, generator=generator)

        dtype = DTYPES[self.dtype]
        module = self.norm.module(self.shape)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.5 * noise(tuple(parameter.shape)))
        module = module.to(device, dtype)
        x = (2 * noise(self.shape) + 0.5).to(device, dtype)
        if self.norm.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            y = copy.deepcopy(module)(x)  # which counts a batch
        dy = torch.empty_like(y).copy_(noise(tuple(y.shape)))
        return module, x.requires_grad_(), dy

    def bytes_least(self) -> int:
        """The least traffic of the phase: every tensor read or written once."""
        extents, itemsize = self.norm.extents(self.shape), DTYPES[self.dtype].itemsize
        if self.phase == "backward":
            return backward_bytes(extents, itemsize)
        return forward_bytes(extents, itemsize) + backward_bytes(extents, itemsize)

    def add_bytes(self) -> int:
        """The traffic of `torch.add(x, dy)`: two reads and one write of the size."""
        return 3 * math.prod(self.shape) * DTYPES[self.dtype].itemsize


def backward_bytes(extents: Extents, itemsize: int) -> int:
    """3*M*N*s + 4*M*statistics + 2*N*s: reads x, dy, statistics, weight; writes dx, dweight."""
    e = extents
    return 3 * e.elements * itemsize + 4 * e.rows * e.statistics + 2 * e.weights * itemsize


def forward_bytes(extents: Extents, itemsize: int) -> int:
    """2*M*N*s + 4*M*statistics + N*s: reads x and the weight, writes y and the statistics."""
    e = extents
    return 2 * e.elements * itemsize + 4 * e.rows * e.statistics + e.weights * itemsize


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log v)); values are positive and there is at least one."""
    if not values:
        raise ValueError("the geometric mean of no values does not exist")
    return math.exp(sum(map(math.log, values)) / len(values))


def spell(shape: Shape) -> str:
    """(4096, 1024) -> "4096x1024"."""
    return "x".join(map(str, shape))


def parse_shape(text: str) -> Shape:
    """ "4096x1024" -> (4096, 1024).

    Raises:
        ValueError: when it is not a list of positive sizes joined by x.
    """
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"expected sizes joined by x, such as 4096x1024, got {text!r}")
    return tuple(map(int, parts))


def select(
    norms: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    dtypes: Sequence[str] = (),
    phases: Sequence[str] = (),
) -> list[Case]:
    """The cases that match, everything where nothing is asked for; shapes may be new ones."""
    return [
        Case(norm, shape, dtype, phase)
        for norm in (NORMS[name] for name in norms or NORMS)
        for dtype in dtypes or DTYPES
        for phase in phases or PHASES
        for shape in shapes or norm.shapes
    ]
