"""Sixteen-bit numbers on their way in and out of CPU kernels, bit by bit against torch's casts."""

from __future__ import annotations

import pytest
import torch

from normpass.backend.runtime import kernel

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
by_dtype = pytest.mark.parametrize("name", DTYPES)
# Rows of 19 leave a remainder beside whole vectors; rows of 64 let stores go past the caches.
by_width = pytest.mark.parametrize("width", [19, 64])


def cast(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """What a kernel makes of x: *n when it loads one dtype and stores another."""
    text = (
        f"region cast\naxes    r=? c={x.shape[1]}\ninput   x: {source}[r c]\n"
        f"neg     = neg(x)\nneg_1   = neg(neg)\noutput  y: {target}[r c] = neg_1"
    )
    return kernel(text)([x], [x.shape[0]])[0]


def in_rows(values: torch.Tensor, width: int) -> torch.Tensor:
    rows = -(-values.numel() // width)
    return torch.cat([values, values[: rows * width - values.numel()]]).reshape(rows, width)


def assert_same(found: torch.Tensor, right: torch.Tensor) -> None:
    """Equal bits but for NaN, of which there are many."""
    assert torch.equal(found.isnan(), right.isnan())
    bits = [
        v.masked_fill(v.isnan(), 0).view(torch.int16 if v.itemsize == 2 else torch.int32)
        for v in (found, right)
    ]
    assert torch.equal(*bits)


@by_dtype
@by_width
def test_every_number_is_read(name: str, width: int) -> None:
    x = in_rows(torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[name]), width)
    assert_same(cast(x, name, "f32"), x.float())


@by_dtype
@by_width
def test_numbers_are_rounded_to_nearest_even(name: str, width: int) -> None:
    """All exponents, and mantissas around the halfway points."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64)
    halfway = torch.arange(-(2**15), 2**15) * 2**16 + 2**15
    nearby = torch.cat([halfway - 1, halfway, halfway + 1, random])
    x = in_rows(nearby.to(torch.int32).view(torch.float32), width)
    right = x.to(DTYPES[name])
    assert_same(cast(x, "f32", name), right)


@by_dtype
def test_many_numbers_are_written_past_the_caches(name: str) -> None:
    x = torch.randn(1 << 13, 1 << 11, generator=torch.Generator().manual_seed(0)).to(DTYPES[name])
    assert_same(cast(x, name, name), x)
