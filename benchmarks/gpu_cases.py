"""What is measured and computed for GPUs: norms of the shapes that people train, by phase.

A case is a norm of one shape, dtype, memory format and phase. Its program is a plain function of
tensors, the same for whoever compiles it:

    forward           y of x, with what a backward needs of it
    backward          dx and the parameters' gradients of what forward has kept and dy
    both              one after the other
    double backward   of dx(x, dy, weight): the gradients at x, dy and weight for a cotangent of dx
    vmapped           every example's own gradients: VMAPPED examples share the rows
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from normpass.benchmarks.cases import spell
from normpass.benchmarks.norms import (
    EPS,
    GROUPS,
    NORMS,
    batch_norm_reference,
    group_norm_reference,
    layer_norm_reference,
    rms_norm_reference,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.benchmarks.norms import Extents, Shape

    Function = Callable[..., Tensor]

PHASES = ("forward", "backward", "both", "double backward", "vmapped")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VMAPPED = 4

ROWS: tuple[Shape, ...] = (
    (4096, 1024),
    (8192, 2048),
    (16384, 4096),
    (32768, 8192),
    (4096, 4096),
    (8192, 8192),
    (4096, 16384),
    (1024, 131072),
    (300, 12288),
)
# ConvNeXt-T at 128 images of 224 pixels: its norms run over the channels of pixels.
CONVNEXT: tuple[Shape, ...] = tuple(
    (128 * pixels**2, channels) for channels, pixels in ((96, 56), (192, 28), (384, 14), (768, 7))
)
RESNET: tuple[Shape, ...] = tuple(
    (256, channels, pixels, pixels)
    for channels, pixels in (
        (64, 112),
        (64, 56),
        (256, 56),
        (128, 28),
        (512, 28),
        (256, 14),
        (1024, 14),
        (512, 7),
        (2048, 7),
    )
)
DIFFUSION: tuple[Shape, ...] = tuple(
    (8, channels, pixels, pixels)
    for channels, pixels in ((320, 64), (640, 32), (1280, 16), (1280, 8))
)


class GpuNorm(NamedTuple):
    """A norm as a function.

    Attributes:
        function: of x and its parameters.
        reference: the same in float64, from primitives.
        parameters: how many, a weight and perhaps a bias.
        channels: the axis that they run along.
        apart: an axis along which nothing is shared but gradients of parameters.
        wide: whether the parameters stay float32 beside an x of half precision.
    """

    function: Function
    reference: Function
    parameters: int
    channels: int
    apart: int
    wide: bool = False


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


FUNCTIONS = {
    "layer_norm": GpuNorm(_layer_norm, layer_norm_reference, 2, -1, 0),
    "rms_norm": GpuNorm(_rms_norm, rms_norm_reference, 1, -1, 0),
    # Under autocast batch norm takes x as it comes, and cuDNN's wants float32 parameters.
    "batch_norm": GpuNorm(_batch_norm, batch_norm_reference, 2, 1, 1, wide=True),
    "group_norm": GpuNorm(_group_norm, group_norm_reference, 2, 1, 0),
}


@dataclass(frozen=True)
class GpuCase:
    """One row of the tables."""

    norm: str
    shape: Shape
    dtype: str
    phase: str
    channels_last: bool = False
    suite: str = "rows"

    @property
    def label(self) -> str:
        """For people: `layer_norm 4096x1024 bfloat16 backward`."""
        layout = " channels_last" if self.channels_last else ""
        return f"{self.norm} {spell(self.shape)}{layout} {self.dtype} {self.phase}"

    @property
    def extents(self) -> Extents:
        """What the traffic depends on."""
        return NORMS[self.norm].extents(self.shape)

    @property
    def size(self) -> int:
        """Bytes of x."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def spec(self) -> GpuNorm:
        """The norm's functions."""
        return FUNCTIONS[self.norm]

    @property
    def outputs(self) -> tuple[str, ...]:
        """What its program returns, in order."""
        parameters = tuple(f"d{name}" for name in ("weight", "bias")[: self.spec.parameters])
        return {
            "forward": ("y",),
            "backward": ("dx", *parameters),
            "both": ("y", "dx", *parameters),
            "double backward": ("gx", "gdy", "gweight"),
            "vmapped": ("dx", *parameters),
        }[self.phase]

    def tensors(self, device: str, seed: int = 0) -> dict[str, Tensor]:
        """x, the parameters, dy and for double backward ddx, drawn on the device: none is uniform.

        Those that share x's shape share its memory format.
        """
        generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        dtype, norm = DTYPES[self.dtype], self.spec

        def noise(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        def like_x() -> Tensor:
            drawn = noise(self.shape, dtype)
            if self.channels_last:
                drawn = drawn.contiguous(memory_format=torch.channels_last)
            return drawn

        made = {"x": like_x().mul_(2).add_(0.5)}
        width, wide = (self.shape[norm.channels],), torch.float32 if norm.wide else dtype
        made["weight"] = noise(width, wide).mul_(0.5).add_(1)
        if norm.parameters > 1:
            made["bias"] = noise(width, wide).mul_(0.5)
        if self.phase != "forward":
            made["dy"] = like_x()
        if self.phase == "double backward":
            made["ddx"] = like_x()
        return made

    def least_bytes(self) -> int:
        """The least traffic: every distinct tensor that comes in read once, every one that goes
        out written once. What a forward keeps goes out of it and comes into its backward.
        """
        e, item = self.extents, DTYPES[self.dtype].itemsize
        parameter = 4 if self.spec.wide else item
        count = self.spec.parameters
        one, of_weight = e.elements * item, e.weights * parameter
        statistics = 4 * e.rows * e.statistics
        forward = 2 * one + statistics + count * of_weight
        backward = 3 * one + statistics + (1 + count) * of_weight
        return {
            "forward": forward,
            "backward": backward,
            "both": forward + backward,
            # x, dy, ddx, weight -> gradients of x, dy and weight
            "double backward": 5 * one + 2 * of_weight,
            # x, dy, weight -> dx, and gradients of the parameters of every example
            "vmapped": 3 * one + (1 + VMAPPED * count) * of_weight,
        }[self.phase]


def backward_of(norm: GpuNorm, x: Tensor, dy: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """dx and the parameters' gradients, by torch.func: what Dynamo sees into."""
    pull = torch.func.vjp(norm.function, x, *parameters)[1]
    gradients: tuple[Tensor, ...] = pull(dy)
    return gradients


def double_backward(norm: GpuNorm, names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """The function of the tensors of those names, in order, that the phase's program is."""

    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, tensors, strict=True))
        others = [named["bias"]] if "bias" in named else []

        def dx(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
            return backward_of(norm, x, dy, weight, *others)[0]

        pull = torch.func.vjp(dx, named["x"], named["dy"], named["weight"])[1]
        gradients: tuple[Tensor, ...] = pull(named["ddx"])
        return gradients

    return program


def vmapped(norm: GpuNorm, names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """As `double_backward`, of every example's own gradients: dx, dweight and perhaps dbias, each
    with the examples first.
    """

    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, tensors, strict=True))
        parameters = [named[name] for name in ("weight", "bias") if name in named]

        def of_one(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            return backward_of(norm, x, dy, *parameters)

        x, dy = (named[name].unflatten(0, (VMAPPED, -1)) for name in ("x", "dy"))
        gradients: tuple[Tensor, ...] = torch.vmap(of_one)(x, dy)
        return gradients

    return program


# The phases whose program is one function of its tensors, made of a norm and their names.
FUNCTIONAL = {"double backward": double_backward, "vmapped": vmapped}


def listed(
    norms: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    dtypes: Sequence[str] = (),
    phases: Sequence[str] = (),
) -> list[GpuCase]:
    """The listed cases that match, in bfloat16 where no dtype is named; shapes may be new ones."""
    return [
        GpuCase(norm, shape, dtype, phase, channels_last, suite)
        for dtype in dtypes or ("bfloat16",)
        for phase in phases or PHASES
        for norm, shape, channels_last, suite in _places(norms, shapes)
        if phase != "vmapped" or is_vmapped(norm, shape)
    ]


def is_vmapped(norm: str, shape: Shape) -> bool:
    """Whether there is a vmapped phase: of rows that examples can share. torch's rule for batch
    norm under vmap takes no float32 parameters beside half precision.
    """
    return FUNCTIONS[norm].channels == -1 and shape[0] % VMAPPED == 0


def _places(norms: Sequence[str], shapes: Sequence[Shape]) -> list[tuple[str, Shape, bool, str]]:
    """Norm, shape, memory format and suite of those asked for."""
    found = [
        *((norm, shape, False, "rows") for norm in ("layer_norm", "rms_norm") for shape in ROWS),
        *(("layer_norm", shape, False, "ConvNeXt") for shape in CONVNEXT),
        *(("batch_norm", s, last, "ResNet-50") for s in RESNET for last in (False, True)),
        *(("group_norm", s, last, "Stable Diffusion") for s in DIFFUSION for last in (False, True)),
    ]
    if shapes:
        known = {(norm, shape) for norm, shape, _, _ in found}
        found = [each for each in found if each[1] in shapes]
        found += [
            (norm, shape, last, "given")
            for norm in norms or FUNCTIONS
            for shape in shapes
            if (norm, shape) not in known and takes(norm, shape)
            for last in ((False, True) if len(shape) == 4 else (False,))
        ]
    return [each for each in found if not norms or each[0] in norms]


def takes(norm: str, shape: Shape) -> bool:
    """Whether a norm is measured at shapes of so many axes: rows of one, images of the others."""
    if FUNCTIONS[norm].channels == -1:
        return len(shape) == 2
    return len(shape) == 4 and (norm != "group_norm" or shape[1] % GROUPS == 0)
