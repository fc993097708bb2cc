"""The norms that are measured: module, oracle, shapes, and what their traffic depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from normpass.benchmarks.models import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable

Shape = tuple[int, ...]
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


class RotaryNorm(nn.Module):
    """RMSNorm of heads and rotary embedding of them, as queries and keys of transformers have it:
    n t h d -> n h t d.

    pairs: whether neighbours are the two parts of a complex number (Flux, GLM) or halves of a head
    are (Qwen 3, Gemma 3).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, width: int, *, pairs: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.pairs = pairs
        angles = rotary_angles(length, width)
        angles = angles.repeat_interleave(2, -1) if pairs else torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis and rotate it."""
        y = self.norm(x).transpose(1, 2)
        return y * self.cos + self.turned(y) * self.sin

    def turned(self, y: Tensor) -> Tensor:
        """i times the complex numbers."""
        if self.pairs:
            real, imaginary = y.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([-imaginary, real], -1).flatten(-2)
        real, imaginary = y.chunk(2, -1)
        return torch.cat([-imaginary, real], -1)


def rotary_angles(length: int, width: int) -> Tensor:
    """The angle of each position and complex number, in radians: length width/2."""
    frequencies = 1e4 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequencies


def rotary_reference(*, pairs: bool) -> Callable[..., Tensor]:
    """y = rms_norm(x) as complex numbers, times e^(i angle), of which a table is in float32"""

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm_reference(x, weight).transpose(1, 2)
        split = (-1, 2) if pairs else (2, -1)
        real, imaginary = y.unflatten(-1, split).unbind(-1 if pairs else -2)
        angles = rotary_angles(x.shape[1], x.shape[3]).to(x.device)
        table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        rotated = torch.complex(real, imaginary) * table
        return torch.stack([rotated.real, rotated.imag], -1 if pairs else -2).flatten(-2)

    return reference


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

ROTARY: tuple[Shape, ...] = ((2, 1024, 16, 128), (1, 4096, 8, 64))

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
            "rms_norm_rotary",
            lambda shape: RotaryNorm(shape[1], shape[-1], pairs=False),
            rotary_reference(pairs=False),
            _last_axis(1, True),
            ROTARY,
        ),
        Norm(
            "rms_norm_rotary_pairs",
            lambda shape: RotaryNorm(shape[1], shape[-1], pairs=True),
            rotary_reference(pairs=True),
            _last_axis(1, True),
            ROTARY,
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
