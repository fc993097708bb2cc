"""Images read between their pixels: the second derivatives of grid_sampler.

    y = sum_k(w_k(c) * x_k),  w_k(c) = product over the axes of u_k(c)

with the pixels k around the place c that a point of the grid names, and along each axis the
polynomials u of an interpolation. Their derivatives are polynomials too, so that all of this can be
differentiated again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, manual
from normpass.decomps.torch_versions import GRID_SAMPLER_TWICE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NEAREST, BICUBIC = 1, 2
ZEROS, REFLECTION = 0, 2
A = -0.75  # of cubic convolution

_SHAPES = {
    "2": "ggI: n c d s, ggGrid: n b m 2, grad_output: n c b m, input: n c d s, grid: n b m 2 "
    "-> dgrad_output: n c b m, dinput: n c d s, dgrid: n b m 2",
    "3": "ggI: n c d s k, ggGrid: n b m k 3, grad_output: n c b m k, input: n c d s k, "
    "grid: n b m k 3 -> dgrad_output: n c b m k, dinput: n c d s k, dgrid: n b m k 3",
}

# Interpolation -> which pixel is the first, and of each pixel the polynomial of how far the place
# is beyond the one before it: its coefficients, the constant first.
POLYNOMIALS: dict[int, tuple[int, tuple[tuple[float, ...], ...]]] = {
    0: (0, ((1, -1), (0, 1))),
    NEAREST: (0, ((1,),)),
    BICUBIC: (
        -1,
        ((0, A, -2 * A, A), (1, 0, -A - 3, A + 2), (0, -A, 2 * A + 3, -A - 2), (0, 0, A, -A)),
    ),
}


def _values(polynomials: Sequence[Sequence[float]], t: Tensor, order: int) -> Tensor:
    """t: *s -> *s k: the derivatives of so many polynomials, of this order."""

    def value(coefficients: Sequence[float]) -> Tensor:
        found = torch.zeros_like(t)
        for p in range(len(coefficients) - 1, order - 1, -1):
            found = found * t + coefficients[p] * math.perm(p, order)
        return found

    return torch.stack([value(coefficients) for coefficients in polynomials], -1)


# --- along one axis -----------------------------------------------------------------------------


def _padded(c: Tensor, size: int, padding: int, align: bool) -> tuple[Tensor, Tensor]:
    """A place brought into the image, at its border or by reflection; and the slope of that."""
    slope = torch.ones_like(c)
    if padding == REFLECTION:
        low, span = (0.0, torch.sym_max(size - 1, 1)) if align else (-0.5, size)
        slope = torch.where(c < low, -1.0, slope)
        away = (c - low) * slope
        turns = (away / span).floor()
        away = away - turns * span
        odd = turns % 2 == 1
        c, slope = low + torch.where(odd, span - away, away), torch.where(odd, -slope, slope)
    inside = (c > 0) & (c < size - 1)
    return torch.where(inside, c, (c > 0) * (size - 1)), slope * inside


@dataclass(frozen=True)
class _Axis:
    """The pixels around each place along one axis.

    weights  for each order the derivatives of their weights by the place: *s k
    pixels   their numbers, in the image: *s k
    seen     which of them are in the image: *s k
    size     the image's
    slope    the derivative of the place by the point of the grid
    """

    weights: tuple[Tensor, Tensor, Tensor]
    pixels: Tensor
    seen: Tensor
    size: int
    slope: Tensor

    @classmethod
    def of(cls, point: Tensor, size: int, mode: int, padding: int, align: bool) -> _Axis:
        span = size - 1 if align else size
        place = (point + 1) * span / 2 - (0 if align else 0.5)
        slope: Tensor = torch.ones_like(place)
        if padding != ZEROS and mode != BICUBIC:
            place, slope = _padded(place, size, padding, align)
        first, polynomials = POLYNOMIALS[mode]
        before = place.round() if mode == NEAREST else place.floor()
        weights = [_values(polynomials, place - before, order) for order in range(3)]
        shifts = torch.arange(first, first + len(polynomials), device=point.device)
        pixels = before.unsqueeze(-1) + shifts
        if padding != ZEROS and mode == BICUBIC:
            pixels, _ = _padded(pixels, size, padding, align)
        seen = (pixels >= 0) & (pixels <= size - 1)
        pixels = torch.where(seen, pixels, 0).long()
        return cls((*weights,), pixels, seen, size, slope * (span / 2))  # type: ignore[arg-type]


def _outer(a: Tensor, b: Tensor, of: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Tensor:
    """a: *s k, b: *s l -> *s (k l), of every pair."""
    return of(a.unsqueeze(-1), b.unsqueeze(-2)).flatten(-2)


def _dual(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The products of weights, and their derivatives along one direction."""
    return _outer(a[0], b[0]), _outer(a[0], b[1]) + _outer(a[1], b[0])


# --- all axes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pixels:
    """The pixels around each place of an image: their numbers and which are in it, n *s k."""

    numbers: Tensor
    seen: Tensor

    @classmethod
    def of(cls, axes: Sequence[_Axis]) -> _Pixels:
        numbers, seen = axes[0].pixels, axes[0].seen
        for axis in axes[1:]:
            numbers = _outer(numbers * axis.size, axis.pixels, torch.add)
            seen = _outer(seen, axis.seen, torch.logical_and)
        return cls(numbers, seen)

    def _along(self, channels: int) -> Tensor:
        return self.numbers.flatten(1).unsqueeze(1).expand(-1, channels, -1)

    def read(self, image: Tensor) -> Tensor:
        """image: n c *i -> n c *s k, zero beyond it"""
        if absent(image):
            return image
        found = image.flatten(2).gather(2, self._along(image.shape[1]))
        return found.unflatten(2, self.numbers.shape[1:]).masked_fill(~self.seen.unsqueeze(1), 0)

    def write(self, values: Tensor, like: Tensor) -> Tensor:
        """values: n c *s k -> n c *i, as like: the sums of what falls on each pixel"""
        if absent(values):
            return values
        seen = values.masked_fill(~self.seen.unsqueeze(1), 0).flatten(2)
        nothing = torch.zeros_like(like).flatten(2)
        return nothing.scatter_add(2, self._along(like.shape[1]), seen).view(like.shape)


def _double_backward(
    ggI: Gradient, ggGrid: Gradient, grad_output: Tensor, input: Tensor, grid: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Of f = <grad_output, dy>, dy = y's derivative along ggI and ggGrid: its gradients

    dy = sum_k(w_k * ggI_k + v_k * x_k),  v = the derivative of w along ggGrid
    """
    mode, padding, align, _ = how
    # A point has the image's last axis first.
    axes = [
        _Axis.of(grid.select(-1, -1 - d), size, mode, padding, align)
        for d, size in enumerate(input.shape[2:])
    ]
    pixels = _Pixels.of(axes)
    if mode == NEAREST:  # the weights are constant
        return pixels.read(ggI).sum(-1), torch.zeros_like(input), torch.zeros_like(grid)
    steps = [ggGrid.select(-1, -1 - d) * axis.slope for d, axis in enumerate(axes)]

    def weights(by: int | None) -> tuple[Tensor, Tensor]:
        """w and v, or their derivatives by the place along one axis."""
        each = [
            (axis.weights[d == by], step.unsqueeze(-1) * axis.weights[1 + (d == by)])
            for d, (axis, step) in enumerate(zip(axes, steps, strict=True))
        ]
        return reduce(_dual, each)

    w, v = (each.unsqueeze(1) for each in weights(None))
    x, along = pixels.read(v if absent(v) else input), pixels.read(ggI)
    g = grad_output.unsqueeze(-1)
    met, moved = (along * g).sum(1), (x * g).sum(1)
    of_places: list[Tensor] = []
    for d, axis in enumerate(axes):
        w_d, v_d = weights(d)
        of_places.insert(0, (met * w_d + moved * v_d).sum(-1) * axis.slope)
    of_grid = of_places[0] if absent(of_places[0]) else torch.stack(of_places, -1)
    return (along * w + x * v).sum(-1), pixels.write(v * g, input), of_grid


if GRID_SAMPLER_TWICE:
    for _axes, _shapes in _SHAPES.items():
        manual(
            _shapes,
            name=f"grid_sampler_{_axes}d_double_backward",
            rest="int interpolation_mode, int padding_mode, bool align_corners, "
            "bool[3] output_mask",
            sample=lambda: {"output_mask": [True, True]},
            of=f"grid_sampler_{_axes}d_backward",
        )(_double_backward)
