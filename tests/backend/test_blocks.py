"""Axes in blocks: few long rows for all workers, variances in one sweep, few channels in
registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy_dialect
import pytest
import sympy
import torch
from launched import BACKWARD, KINDS, axes_of, forward, has_parts, is_right, launched
from snapshots import assert_snapshot

from normpass.backend.codegen.cpp import generate
from normpass.backend.program.blocks import block_size
from normpass.backend.program.listing import listing
from normpass.backend.program.machine import CPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.tree import LoopAxis
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from torch import Tensor

# ---- programs


def test_snapshots() -> None:
    """What is in blocks is gone over twice there."""
    texts = {
        "long_rows": BACKWARD.format(**LONG, dtype="f32"),
        "variance_channels_last": CASES["channels last"][0],
        "variance_few_channels_last": CASES["few channels last"][0],
        "variance_channels_first": CASES["channels first"][0],
    }
    for name, text in texts.items():
        assert_snapshot(f"programs/{name}.txt", listing(make_plan(parse(text))))


# ---- extents


@pytest.mark.parametrize(
    ("extent", "limits", "size"),
    [(4096, (32, 512), 512), (50176, (32, 300), 256), (1009, (2, 512), None), (7, (2, 512), 7)],
)
def test_blocks_divide_an_extent(extent: int, limits: tuple[int, int], size: int | None) -> None:
    assert block_size(LoopAxis("n", sympy.Integer(extent), ("n",), extent, extent), *limits) == size


# ---- few long rows


LONG = {"r": 3, "c": 65536}


@pytest.mark.parametrize("workers", [1, 2, 5, 64])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_few_long_rows_are_divided_among_workers(dtype: str, workers: int) -> None:
    text = BACKWARD.format(**LONG, dtype=dtype)
    plan = make_plan(parse(text))
    assert axes_of(plan) == ["c_block", "r", "c"]
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, 65536, generator=generator).to(KINDS[dtype]) for _ in range(2))
    mean, rstd = torch.randn(3, 1), torch.rand(3, 1) + 0.5
    w = torch.randn(65536, generator=generator)
    dx, dw, db = launched(text, [x, g, mean, rstd, w], workers)
    hat = (x.double() - mean) * rstd
    gw = g.double() * w
    want = rstd * (gw - gw.mean(1, keepdim=True) - hat * (gw * hat).mean(1, keepdim=True))
    tolerance = {"f32": 2e-6, "bf16": 2**-7}[dtype]
    torch.testing.assert_close(dx.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dw.double(), (g.double() * hat).sum(0), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(db.double(), g.double().sum(0), rtol=1e-6, atol=2e-6)


def test_a_gradient_of_long_rows_is_complete_block_by_block() -> None:
    """No worker has an array as long as a row, and none of it is combined."""
    plan = make_plan(parse(BACKWARD.format(**LONG, dtype="f32")))
    text = generate(plan)
    assert "parts_dw_by_c(workers, 2048)" in text
    assert "parts_dw_by_c.combine()" not in text


def test_long_rows_of_several_dimensions() -> None:
    """Four parts of a row that do not follow each other in memory, as in padded images."""
    text = BACKWARD.replace("c={c}", "d=4 c={c}").replace("{c}.0", "1048576.0")
    text = text.replace("[c]", "[d c]").replace("[r 1]", "[r 1 1]")
    text = text.replace("[r c]", "[r d c] (1048640, 262160, 1)")
    text = text.format(r=8, c=262144, dtype="f32")
    assert axes_of(make_plan(parse(text))) == ["c_block", "r", "d", "c"]
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(8, 4, 262160, generator=generator)[..., :262144] for _ in range(2))
    mean, rstd = torch.randn(8, 1, 1), torch.rand(8, 1, 1) + 0.5
    w = torch.randn(4, 262144, generator=generator)
    dx, dw, db = launched(text, [x, g, mean, rstd, w], 2)
    hat = (x.double() - mean) * rstd
    gw = g.double() * w
    sums = gw.mean((1, 2), keepdim=True) + hat * (gw * hat).mean((1, 2), keepdim=True)
    torch.testing.assert_close(dx.double(), rstd * (gw - sums), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(dw.double(), (g.double() * hat).sum(0), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(db.double(), g.double().sum(0), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(
    ("rows", "columns", "first"),
    [(4096, 1024, "r"), (64, 65536, "r"), (64, 262144, "c_block"), (3, 4096, "r"), (2, 65537, "r")],
)
def test_other_rows_stay_whole(rows: int, columns: int, first: str) -> None:
    """Many rows fill the machine, short ones are little work, and a prime has no blocks."""
    assert axes_of(make_plan(parse(BACKWARD.format(r=rows, c=columns, dtype="f32"))))[0] == first


def test_the_results_do_not_depend_on_when() -> None:
    text = BACKWARD.format(**LONG, dtype="f32")
    inputs = [torch.randn(3, 65536) for _ in range(2)]
    inputs += [torch.randn(3, 1), torch.rand(3, 1), torch.randn(65536)]
    first, again = launched(text, inputs, 3), launched(text, inputs, 3)
    assert all(map(torch.equal, first, again))


# ---- variances


CASES = {
    "few long rows": (forward({"r": 3, "c": 262144}, "r c", "c"), (1,)),
    "many long rows": (forward({"r": 16, "c": 262144}, "r c", "c"), (1,)),
    "channels last": (forward({"n": 12544, "c": 64}, "n c", "n"), (0,)),
    "few channels last": (forward({"n": 100352, "c": 5}, "n c", "n"), (0,)),
    "channels first": (forward({"n": 8, "c": 16, "s": 50176}, "n c s", "n s"), (0, 2)),
    "short images": (forward({"n": 8192, "c": 16, "s": 49}, "n c s", "n s"), (0, 2)),
    "of each image": (forward({"n": 2, "s": 36864, "c": 32}, "n s c", "s"), (1,)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workers", [1, 2, 7, 64])
@pytest.mark.parametrize("name", CASES)
def test_variances_in_blocks(name: str, workers: int) -> None:
    text, reduced = CASES[name]
    assert has_parts(text)
    is_right(text, reduced, workers)


@pytest.mark.parametrize("name", CASES)
def test_variances_of_what_is_far_from_zero(name: str) -> None:
    """A sum of squares less the square of the mean would have no digit left."""
    is_right(*CASES[name], workers=2, mean=3000.0)


@pytest.mark.parametrize("far", [0.0, 3000.0])
def test_variances_of_two_tensors_in_one_region(far: float) -> None:
    """The first puts the axis in blocks, and the second's are made of the same."""
    text = """\
region two
axes    n=12544 c=64
input   x: f32[n c]
input   z: f32[n c]
sum     = sum[n](x)
mean    = div(sum, 12544.0)
sub     = sub(x, mean)
square  = mul(sub, sub)
total   = sum[n](square)
sum_z   = sum[n](z)
mean_z  = div(sum_z, 12544.0)
sub_z   = sub(z, mean_z)
squares = mul(sub_z, sub_z)
total_z = sum[n](squares)
less    = sub(z, mean)
power   = mul(less, less)
cross   = sum[n](power)
y       = mul(sub, sub_z)
output  y0: f32[n c] = y
output  y1: f32[c] = total
output  y2: f32[c] = total_z
output  y3: f32[c] = cross
"""
    names = {op.name for op in make_plan(parse(text)).region.ops}
    assert {"total_lost", "total_z_lost"} <= names
    assert "cross_lost" not in names  # its mean is another tensor's
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(12544, 64, generator=generator) + far for _ in range(2))
    y, total, total_z, cross = launched(text, [x, z], 2)
    right, other = x.double(), z.double()
    mean, mean_z = right.mean(0), other.mean(0)
    # Each factor is off by the last digit of its mean, times up to five deviations.
    product = (right - mean) * (other - mean_z)
    torch.testing.assert_close(y.double(), product, rtol=1e-6, atol=2e-6 * (1 + far))
    for found, squares in ((total, right - mean), (total_z, other - mean_z)):
        torch.testing.assert_close(found.double(), squares.square().sum(0), rtol=2e-6, atol=0)
    digits = 1e-6 * (1 + far)  # 2 (mean_z - mean) times what a mean is off by
    torch.testing.assert_close(cross.double(), (other - mean).square().sum(0), rtol=digits, atol=0)


def test_squares_of_less_than_the_mean_is_of() -> None:
    """Deviations from one mean, added up for each image: their blocks' means are not on the way."""
    text = """\
region images
axes    n=4 s=50176
input   x: f32[n s]
sum     = sum[n s](x)
mean    = div(sum, 200704.0)
sub     = sub(x, mean)
square  = mul(sub, sub)
total   = sum[s](square)
output  y0: f32[n s] = sub
output  y1: f32[n] = total
"""
    assert not has_parts(text)
    x = torch.randn(4, 50176, generator=torch.Generator().manual_seed(0)) + 3
    _, total = launched(text, [x], 2)
    right = (x.double() - x.double().mean()).square().sum(1)
    torch.testing.assert_close(total.double(), right, rtol=1e-6, atol=0)


def test_what_stays_in_cache_has_its_variance_of_the_whole() -> None:
    rows = forward({"r": 4096, "c": 1024}, "r c", "c")
    assert axes_of(make_plan(parse(rows))) == ["r", "c"]
    assert not has_parts(rows)


def test_blocks_of_few_numbers_are_none() -> None:
    """Channels of seven pixels a row, with room after each: a block is of them and of so many rows,
    and a prime number of rows has no blocks. Seven numbers alone would be one result for each.
    """

    def pixels(n: int) -> str:
        return forward({"n": n, "s": 7, "c": 16}, "n s c", "n s", strides=" (128, 16, 1)")

    assert has_parts(pixels(131072))
    assert not has_parts(pixels(131071))


# ---- exponentials


SOFTMAX = """\
region softmax
axes    r={r} c={c}
input   x: {dtype}[r c]
top     = amax[c](x)
{bounded}
less    = sub(x, {top})
e       = exp(less)
total   = sum[c](e)
y       = div(e, total)
log     = log(total)
output  y0: {dtype}[r c] = y
output  y1: f32[r 1] = top
output  y2: f32[r 1] = log
"""
# As torch.logsumexp has it, whose result is infinite where the maximum is.
BOUNDED = "size = abs(top)\nlimitless = eq(size, inf)\nbound = where(limitless, 0.0, top)"


def softmax(r: int, c: int, dtype: str = "f32", *, bounded: bool = False) -> str:
    top = "bound" if bounded else "top"
    return SOFTMAX.format(r=r, c=c, dtype=dtype, bounded=BOUNDED if bounded else "", top=top)


WHOLE = slice(None)
SPECIAL = [
    [],
    [(0, slice(40000), -torch.inf)],  # more than a block
    [(1, WHOLE, -torch.inf)],
    [(2, 5, torch.inf), (0, 150000, torch.inf), (0, 7, -torch.inf)],
    [(1, WHOLE, torch.inf)],
    [(2, 100000, torch.nan), (1, 5, -torch.inf)],
]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("bounded", [False, True])
def test_exponentials_in_blocks(bounded: bool, dtype: str, workers: int) -> None:
    text = softmax(3, 262144, dtype, bounded=bounded)
    assert has_exponentials(text)
    drawn = torch.randn(3, 262144, generator=torch.Generator().manual_seed(0)) * 20
    for special in SPECIAL:
        x = drawn.clone()
        for row, columns, value in special:
            x[row, columns] = value
        x = x.to(KINDS[dtype])
        y, top, log = launched(text, [x], workers)
        torch.testing.assert_close(top[:, 0], x.float().amax(1), rtol=0, atol=0, equal_nan=True)
        less = torch.where(top.isinf(), 0, top) if bounded else top
        # Of infinite maxima: the sum is not a number, and where it is bounded, infinite or zero.
        want = torch.logsumexp(x.double(), 1, keepdim=True) - less
        torch.testing.assert_close(log.double(), want, rtol=3e-7, atol=1e-6, equal_nan=True)
        finite = ~top[:, 0].isinf() | (not bounded)
        x, y = x[finite], y[finite]
        want = torch.softmax(x.double(), 1)
        rounding = {"f32": 3e-6, "bf16": 2**-8}[dtype]
        torch.testing.assert_close(y.double(), want, rtol=rounding, atol=1e-30, equal_nan=True)
        assert_as_near(y, torch.softmax(x, 1), want)


def assert_as_near(ours: Tensor, theirs: Tensor, want: Tensor) -> None:
    """In units of each element, however small; beside what a float32 is rounded by."""
    normal = want > torch.finfo(torch.float32).tiny
    error, allowed = ((each.double() / want - 1)[normal].abs() for each in (ours, theirs))
    if normal.any():
        assert error.max() <= allowed.max() + torch.finfo(torch.float32).eps


ALMOST = """\
region almost
axes    r=3 c=262144
input   x: f32[r c]
input   z: f32[r c]
top     = amax[c](x)
all     = amax[r c](x)
low     = amin[c](x)
other   = amax[c](z)
size    = abs(x)
far     = amax[c](size)
shifted = add(top, z)
less    = sub(x, {of})
e       = {function}({exponent})
total   = {fn}[c](e)
output  y0: f32[r] = total
output  y1: f32[r] = top
output  y2: f32[1] = all
output  y3: f32[r] = low
output  y4: f32[r] = other
output  y5: f32[r] = far
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("of", "function", "exponent", "fn", "expected"),
    [
        ("top", "exp", "less", "sum", True),
        ("all", "exp", "less", "sum", False),  # of all rows: its blocks are not of one of them
        ("low", "exp", "less", "sum", False),
        ("other", "exp", "less", "sum", False),
        ("far", "exp", "less", "sum", False),
        ("shifted", "exp", "less", "sum", False),  # another for each element
        ("top", "tanh", "less", "sum", False),
        ("top", "exp", "x", "sum", False),
        ("top", "exp", "less", "amin", False),
    ],
)
def test_what_is_not_quite_such_a_sum(
    of: str, function: str, exponent: str, fn: str, expected: bool
) -> None:
    text = ALMOST.format(of=of, function=function, exponent=exponent, fn=fn)
    assert has_exponentials(text) is expected
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(3, 262144, generator=generator) for _ in range(2))
    found = launched(text, [x, z], 2)
    top = x.amax(1, keepdim=True)
    low, other, far = x.amin(1), z.amax(1), x.abs().amax(1)
    for ours, want in zip(found[1:], (top[:, 0], x.amax(), low, other, far), strict=True):
        torch.testing.assert_close(ours, want.reshape(ours.shape), rtol=0, atol=0)
    m = {"top": top, "all": x.amax(), "shifted": top + z}
    m |= {"low": low[:, None], "other": other[:, None], "far": far[:, None]}
    less = (x - m[of]).double() if exponent == "less" else x.double()
    want = getattr(torch, function)(less)
    want = want.sum(1) if fn == "sum" else want.amin(1)
    torch.testing.assert_close(found[0].double(), want, rtol=1e-6, atol=0)


def has_exponentials(text: str) -> bool:
    """Whether a sum of them is made of those of blocks."""
    return any(op.name == "total_scale" for op in make_plan(parse(text)).region.ops)


def test_rows_in_cache_are_gone_over_twice() -> None:
    assert not has_exponentials(softmax(64, 65536))


# ---- other dialects


@pytest.mark.parametrize(
    ("text", "reduced"),
    [
        (forward({"r": 3, "c": 24}, "r c", "c", "f64"), (1,)),
        (forward({"n": 24, "c": 6}, "n c", "n", "f64"), (0,)),
        (forward({"n": 24, "c": 3}, "n c", "n", "f64"), (0,)),
        (forward({"n": 6, "c": 5, "s": 300}, "n c s", "n s", "f64"), (0, 2)),
        (forward({"n": 2, "s": 12, "c": 5}, "n s c", "s", "f64"), (1,)),
    ],
)
def test_loops_of_numpy(text: str, reduced: tuple[int, ...]) -> None:
    """The same programs printed in another dialect, with blocks of a few elements."""
    region, machine = parse(text), replace(CPU, workers=2, blocking=numpy_dialect.SMALL_BLOCKS)
    assert any(axis.endswith("block") for axis in axes_of(make_plan(region, machine)))
    x = torch.randn(*region.shape(region.inputs[0], region.extents(())), dtype=torch.float64)
    y, mean, rstd = numpy_dialect.run(region, machine, [x], ())
    var, want = torch.var_mean(x, reduced, correction=0, keepdim=True)
    right = (var + 1e-5).rsqrt()
    torch.testing.assert_close(y.double(), (x - want) * right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean.double(), want.reshape(mean.shape), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rstd.double(), right.reshape(rstd.shape), rtol=1e-6, atol=0)
