"""Sixteen-bit numbers on their way in and out of CPU kernels, bit by bit against torch's casts."""

from __future__ import annotations

import pytest
import torch

from normpass.backend.program.machine import ELEMENTS_PER_WORKER
from normpass.backend.run.runtime import Kernel, launch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
by_dtype = pytest.mark.parametrize("name", DTYPES)
CAST = """\
region cast
axes    r=? c={width}
input   x: {source}[r c]
neg     = neg(x)
neg_1   = neg(neg)
output  y: {target}[r c] = neg_1"""
# Rows of 19 leave a remainder beside whole vectors; rows of 64 have none.
by_width = pytest.mark.parametrize("width", [19, 64])


def cast(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """What a kernel makes of x: *n when it loads one dtype and stores another."""
    text = CAST.format(source=source, width=x.shape[1], target=target)
    return launch([x], [x.shape[0]], text)[0]


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


FLOATS = {**DTYPES, "f32": torch.float32}
# Whole vectors in every row; whole ones that lie aligned in every other row only; a remainder; no
# whole vector at all.
WIDTHS = (64, 72, 83, 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("past_caches", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("source", "target"),
    [*((name, name) for name in FLOATS), ("f32", "bf16"), ("f32", "f16")],
)
def test_numbers_are_the_same_written_past_the_caches(
    source: str, target: str, threads: int, past_caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of this machine's caches: none keep nothing, huge ones everything."""
    own_cache = 0 if past_caches else 1 << 40
    monkeypatch.setattr("normpass.backend.run.runtime.private_cache", lambda: own_cache)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    region = Kernel(CAST.format(source=source, width="?", target=target))
    for width in WIDTHS:
        rows = 2 * ELEMENTS_PER_WORKER // width + 1  # work for two, and an odd number of rows
        rows += 1 - rows % 2
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
        x = x.to(FLOATS[source])
        (y,) = region([x], [rows, width])
        assert region._launches[rows, width].past_caches is past_caches
        assert_same(y, x.to(FLOATS[target]))
