"""Sums of many numbers are as exact as torch.sum, which adds in a cascade: ten million of them on a
CPU, in each form that a loop over them takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from compiled import compile_fused, count_fused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LAST = torch.channels_last
# What torch.sum's own cascade comes to in these cases, which lane and level it hits being chance.
CASCADE = 1.5
# Shape, axes that are summed, memory format.
CASES: dict[str, tuple[tuple[int, ...], list[int], torch.memory_format]] = {
    "one row": ((1, 10_000_000), [1], torch.contiguous_format),
    "whole tensor": ((100, 100, 1000), [0, 1, 2], torch.contiguous_format),
    "many short rows": ((1_250_000, 8), [0], torch.contiguous_format),
    "columns": ((10, 500_000, 2), [1], torch.contiguous_format),
    "channels": ((10, 2, 1000, 500), [0, 2, 3], torch.contiguous_format),
    "channels in short pieces": ((100_000, 2, 7, 7), [0, 2, 3], torch.contiguous_format),
    "channels of channels_last": ((10, 4, 500, 500), [0, 2, 3], LAST),
    "images": ((2, 4, 1000, 1000), [2, 3], torch.contiguous_format),
    "images of channels_last": ((2, 4, 1000, 1000), [2, 3], LAST),
}


def error(found: Tensor, right: Tensor) -> float:
    """The largest relative error, in units of float32's rounding."""
    worst = ((found.double() - right) / right).abs().max()
    return float(worst / torch.finfo(torch.float32).eps)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_as_exact_as_torch_sum(name: str, dynamic: bool) -> None:
    shape, dims, memory_format = CASES[name]
    x = (torch.rand(shape) + 1).contiguous(memory_format=memory_format)

    def scaled(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
        total = x.sum(dims, keepdim=True)
        return total, x * total

    compiled = compile_fused(scaled, inner="eager", dynamic=dynamic)
    found, _ = compiled(x, dims)
    assert count_fused() == 1
    right = x.double().sum(dims, keepdim=True)
    assert error(found, right) <= max(error(x.sum(dims, keepdim=True), right), CASCADE)


def test_infinity_and_nan_stay_what_they_are() -> None:
    """What is carried along for lost digits must not turn infinity into NaN."""
    x = torch.rand(3, 2_000_000)
    x[0, 5] = torch.inf
    x[1, 1_500_000] = -torch.inf
    x[2, 7] = torch.nan
    compiled = compile_fused(lambda x: (s := x.sum(1, keepdim=True), x * 0 + s), inner="eager")
    total, _ = compiled(x)
    assert count_fused() == 1
    torch.testing.assert_close(total, x.sum(1, keepdim=True), equal_nan=True)


def test_rows_keep_infinity_too() -> None:
    """The same for columns, whose sums lie in arrays."""
    x = torch.rand(200_000, 3)
    x[5, 0], x[150_000, 1], x[7, 2] = torch.inf, -torch.inf, torch.nan
    compiled = compile_fused(lambda x: (s := x.sum(0, keepdim=True), x * 0 + s), inner="eager")
    total, _ = compiled(x)
    assert count_fused() == 1
    torch.testing.assert_close(total, x.sum(0, keepdim=True), equal_nan=True)
