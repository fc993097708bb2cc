"""Truth values, integers and numbers of one byte in memory: read and written a vector at a time, at
every length of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

from normpass.backend.run import toolchain
from normpass.backend.run.runtime import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPARED = """\
region compared_{name}
axes    r=? c=?
input   x: {dtype}[r c]
input   k: b8[r c]
input   each: b8[r]
gt      = gt(x, 0.0)
both    = logical_and(gt, k)
either  = logical_or(both, each)
where   = where(k, x, -1.0)
output  y: b8[r c] = gt
output  y_1: b8[r c] = either
output  y_2: {dtype}[r c] = where"""
COUNTED = """\
region counted_{name}
axes    r=? c=?
input   i: i32[r c]
input   j: i64[r c]
input   one: i64[r 1]
input   x: {dtype}[r c]
add     = add(x, i)
mul     = mul(x, j)
eq      = eq(i, one)
output  y: {dtype}[r c] = add
output  y_1: {dtype}[r c] = mul
output  y_2: b8[r c] = eq"""
BYTES = """\
region bytes_{name}
axes    r=? c=?
input   b: {dtype}[r c]
input   x: {compute}[r c]
read    = mul(b, 1.0)
output  y: {compute}[r c] = read
output  y_1: {dtype}[r c] = x"""
BYTE_NAMES = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
}
LENGTHS = (*range(1, 35), 47, 48, 49, *range(126, 146))


NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


def widths() -> list[Any]:
    """Bits of a vector: what the processor has, and half of that where it has AVX-512."""
    wide = any(isinstance(isa, cpu_vec_isa.VecAVX512) for isa in cpu_vec_isa.valid_vec_isa_list())
    return [None, 256] if wide else [None]


@pytest.fixture(params=widths(), ids=["all", "256"][: len(widths())])
def bits(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels are built for vectors of so many bits."""

    def forget() -> None:
        toolchain._command.cache_clear()
        toolchain._include.cache_clear()

    with config.patch({"cpp.simdlen": request.param}):
        forget()
        yield str(request.param or "all")
    forget()


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_every_length_of_a_row(dtype: torch.dtype, bits: str) -> None:
    """With NaN and infinities among what is compared. All results are exact."""
    kernel = Kernel(COMPARED.format(dtype=NAMES[dtype], name=bits))
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 19):
        for length in LENGTHS:
            x, keep, each = arguments(rows, length, dtype, generator)
            gt, either, where = kernel([x, keep, each], [rows, length])
            assert torch.equal(gt, x > 0)
            assert torch.equal(either, ((x > 0) & keep) | each[:, None])
            assert torch.equal(where.nan_to_num(7.0), torch.where(keep, x, -1.0).nan_to_num(7.0))
            # As torch keeps them: nothing but 0 and 1.
            assert int(gt.view(torch.uint8).max()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_integers_at_every_length_of_a_row(dtype: torch.dtype, bits: str) -> None:
    """Those that float32 has. All results are exact, or rounded once."""
    kernel = Kernel(COUNTED.format(dtype=NAMES[dtype], name=bits))
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 19):
        for length in LENGTHS:
            shape = rows, length
            i, j = (torch.randint(-(2**24), 2**24, shape, generator=generator) for _ in range(2))
            x, one = torch.randn(shape, generator=generator).to(dtype), i[:, -1:].clone()
            add, mul, eq = kernel([i.int(), j, one, x], [rows, length])
            assert torch.equal(add, x + i)
            assert torch.equal(mul, x * j)
            assert torch.equal(eq, i == one)


def every_byte(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)


def every_kind_of_number(dtype: torch.dtype) -> torch.Tensor:
    """Float32 numbers of all sizes, halfway between those of a type and beside that, not finite
    ones; for integers those that they hold, with fractions.
    """
    generator = torch.Generator().manual_seed(0)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.linspace(limits.min, limits.max, 4096 + 3)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    bits = torch.randint(-(2**31), 2**31, (2**14,), generator=generator)
    return torch.cat([halves.float(), bits.to(torch.int32).view(torch.float32)])


@pytest.mark.parametrize("compute", ["f32", "f64"])
@pytest.mark.parametrize("dtype", BYTE_NAMES, ids=str)
def test_numbers_of_one_byte(dtype: torch.dtype, compute: str, bits: str) -> None:
    """To the last bit as eager mode reads and rounds them."""
    text = BYTES.format(dtype=BYTE_NAMES[dtype], compute=compute, name=bits)
    kernel, wide = Kernel(text), torch.float64 if compute == "f64" else torch.float32
    x = every_kind_of_number(dtype)
    for length in (*LENGTHS[:40:3], x.numel()):
        given = x[: len(x) // length * length].view(-1, length)[:4096]
        read = every_byte(dtype).repeat(-(-given.numel() // 256))[: given.numel()].view_as(given)
        y, written = kernel([read, given.to(wide)], [*given.shape])
        torch.testing.assert_close(y, read.to(wide), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(written.view(torch.uint8), given.to(dtype).view(torch.uint8))


def arguments(
    rows: int, length: int, dtype: torch.dtype, generator: torch.Generator
) -> list[torch.Tensor]:
    x = torch.randn(rows, length, generator=generator).to(dtype)
    for special in (torch.nan, torch.inf, -torch.inf, 0.0, -0.0):
        x[torch.rand(rows, length, generator=generator) < 0.1] = special
    keep = torch.rand(rows, length, generator=generator) < 0.5
    return [x, keep, torch.rand(rows, generator=generator) < 0.5]
