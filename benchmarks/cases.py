"""What is measured: norms, their shapes, a float64 oracle for each, and the least traffic.

A norm is a module, an independent reference written from primitives, and the extents that the
traffic formula needs. A case is a norm at a shape, in a dtype, in a phase.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from normpass.benchmarks.models import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Shape = tuple[int, ...]
PHASES = ("backward", "forward+backward")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EPS = 1e-5


class Extents(NamedTuple):
    """What the traffic of a norm depends on.

    Attributes:
        elements: elements of x.
        rows: groups of elements that share one mean or one rstd.
        statistics: how many numbers are saved per row, 0, 1 or 2.
        weights: elements of the weight, 0 without one.
    """

    elements: int
    rows: int
    statistics: int
    weights: int


@dataclass(frozen=True)
class Norm:
    """A norm to measure: module, oracle, and the shapes that its figures are given for.

    channels_last: whether x lies in that memory format; dy is as y lies.
    """

    name: str
    module: Callable[[Shape], nn.Module]
    reference: Callable[..., Tensor]
    extents: Callable[[Shape], Extents]
    shapes: tuple[Shape, ...]
    channels_last: bool = False


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


# References: float64 in, float64 out, from primitives alone. x is *n d, n c h w or *n t.


def standardized(x: Tensor, dims: list[int]) -> Tensor:
    """(x - mean) / sqrt(var + eps) over dims, the variance centred and biased."""
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + EPS).sqrt()


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = standardized_d(x) * weight + bias"""
    return standardized(x, [-1]) * weight + bias


def rms_norm_reference(x: Tensor, weight: Tensor) -> Tensor:
    """y = x / sqrt(mean_d(x^2) + eps) * weight"""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def group_norm_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = standardized over each group of channels and all pixels, then per channel"""
    grouped = x.reshape(x.shape[0], GROUPS, -1)
    scale = [1, -1] + [1] * (x.dim() - 2)
    y = standardized(grouped, [-1]).reshape(x.shape)
    return y * weight.reshape(scale) + bias.reshape(scale)


def batch_norm_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = standardized over examples and pixels, then per channel"""
    dims = [0, *range(2, x.dim())]
    scale = [1, -1] + [1] * (x.dim() - 2)
    return standardized(x, dims) * weight.reshape(scale) + bias.reshape(scale)


def instance_norm_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = standardized over the pixels of each example's channel, then per channel"""
    return standardized(x, [2, 3]) * weight.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)


def image_norm_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = standardized over all of each example, then per element"""
    return standardized(x, [1, 2, 3]) * weight + bias


def token_norm_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y = layer norm of the channels of each pixel: n c h w -> n (h w) c"""
    return layer_norm_reference(x.flatten(2).transpose(1, 2), weight, bias)


def modulated_norm_reference(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """y = standardized_d(x) * (1 + scale) + shift, with a scale and a shift for each example"""
    return standardized(x, [-1]) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TokenNorm(nn.LayerNorm):
    """Layer norm of an image's pixels, as vision transformers make tokens: n c h w -> n (h w) c."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the channels."""
        return super().forward(x.flatten(2).transpose(1, 2))


class ModulatedNorm(nn.Module):
    """Layer norm scaled and shifted by numbers of each example, as in diffusion transformers.

    x: n t d, scale and shift: n d -> y: n t d.
    """

    def __init__(self, examples: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(examples, width))
        self.shift = nn.Parameter(torch.zeros(examples, width))
        self.norm = nn.LayerNorm(width, eps=EPS, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        return self.norm(x) * (1 + self.scale.unsqueeze(1)) + self.shift.unsqueeze(1)


def softmax_reference(x: Tensor) -> Tensor:
    """y = exp(x - max_d(x)) / sum_d(exp(x - max_d(x)))"""
    shifted = (x - x.detach().amax(-1, keepdim=True)).exp()
    return shifted / shifted.sum(-1, keepdim=True)


GROUPS = 32


def _last_axis(statistics: int, weights: bool) -> Callable[[Shape], Extents]:
    def extents(shape: Shape) -> Extents:
        elements = math.prod(shape)
        return Extents(elements, elements // shape[-1], statistics, shape[-1] if weights else 0)

    return extents


def _groups(shape: Shape) -> Extents:
    return Extents(math.prod(shape), shape[0] * GROUPS, 2, shape[1])


def _channels(shape: Shape) -> Extents:
    return Extents(math.prod(shape), shape[1], 2, shape[1])


def _instances(shape: Shape) -> Extents:
    return Extents(math.prod(shape), shape[0] * shape[1], 2, shape[1])


def _examples(shape: Shape) -> Extents:
    return Extents(math.prod(shape), shape[0], 2, math.prod(shape[1:]))


def _pixels(shape: Shape) -> Extents:
    return Extents(math.prod(shape), math.prod(shape) // shape[1], 2, shape[1])


def _modulated(shape: Shape) -> Extents:
    return Extents(math.prod(shape), math.prod(shape[:-1]), 2, shape[0] * shape[-1])


ROWS: tuple[Shape, ...] = (
    (4096, 1024),
    (512, 8192),
    (16384, 256),
    (128, 32768),
    (32, 197, 768),
)
SMALL: tuple[Shape, ...] = (
    (64, 64),
    (256, 128),
    (512, 128),
    (1024, 128),
    (128, 1024),
    (1024, 256),
)

NORMS = {
    norm.name: norm
    for norm in (
        Norm(
            "layer_norm",
            lambda shape: nn.LayerNorm(shape[-1], eps=EPS),
            layer_norm_reference,
            _last_axis(2, True),
            ROWS,
        ),
        Norm(
            "rms_norm",
            lambda shape: nn.RMSNorm(shape[-1], eps=EPS),
            rms_norm_reference,
            _last_axis(1, True),
            ROWS,
        ),
        Norm(
            "rms_norm_by_hand",
            lambda shape: RMSNorm(shape[-1], eps=EPS),
            rms_norm_reference,
            _last_axis(1, True),
            ROWS,
        ),
        # Up to 1 MiB a tensor: where calls cost more than the work, normpass should decline.
        Norm(
            "layer_norm_small",
            lambda shape: nn.LayerNorm(shape[-1], eps=EPS),
            layer_norm_reference,
            _last_axis(2, True),
            SMALL,
        ),
        Norm(
            "group_norm",
            lambda shape: nn.GroupNorm(GROUPS, shape[1], eps=EPS),
            group_norm_reference,
            _groups,
            ((8, 256, 32, 32),),
        ),
        Norm(
            "batch_norm",
            lambda shape: nn.BatchNorm2d(shape[1], eps=EPS),
            batch_norm_reference,
            _channels,
            ((16, 64, 56, 56),),
        ),
        Norm(
            "group_norm_channels_last",
            lambda shape: nn.GroupNorm(GROUPS, shape[1], eps=EPS),
            group_norm_reference,
            _groups,
            ((4, 320, 64, 64), (2, 128, 256, 256)),
            channels_last=True,
        ),
        Norm(
            "batch_norm_channels_last",
            lambda shape: nn.BatchNorm2d(shape[1], eps=EPS),
            batch_norm_reference,
            _channels,
            ((16, 64, 56, 56), (8, 16, 224, 224)),
            channels_last=True,
        ),
        Norm(
            "instance_norm",
            lambda shape: nn.InstanceNorm2d(shape[1], eps=EPS, affine=True),
            instance_norm_reference,
            _instances,
            ((16, 64, 56, 56), (2, 32, 384, 384)),
        ),
        Norm(
            "instance_norm_channels_last",
            lambda shape: nn.InstanceNorm2d(shape[1], eps=EPS, affine=True),
            instance_norm_reference,
            _instances,
            ((16, 64, 56, 56), (2, 32, 384, 384)),
            channels_last=True,
        ),
        Norm(
            "layer_norm_of_images",
            lambda shape: nn.LayerNorm(shape[1:], eps=EPS),
            image_norm_reference,
            _examples,
            ((16, 64, 56, 56), (4, 16, 256, 256)),
        ),
        Norm(
            "layer_norm_of_pixels",
            lambda shape: TokenNorm(shape[1], eps=EPS),
            token_norm_reference,
            _pixels,
            ((32, 768, 14, 14), (8, 96, 56, 56)),
        ),
        Norm(
            "modulated_norm",
            lambda shape: ModulatedNorm(shape[0], shape[-1]),
            modulated_norm_reference,
            _modulated,
            ((2, 1024, 1152), (16, 256, 1152), (64, 197, 768)),
        ),
        Norm(
            "softmax",
            lambda shape: nn.Softmax(-1),
            softmax_reference,
            _last_axis(0, False),
            ((4096, 1024), (64, 8, 256, 256)),
        ),
    )
}


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
