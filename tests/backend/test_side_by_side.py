"""Rows that lie side by side, with their elements far apart: a line of memory at a time."""

from __future__ import annotations

import pytest
import torch
from launched import KINDS, forward, has_parts, is_right, launched
from snapshots import assert_snapshot

from normpass.backend.codegen.cpp import generate
from normpass.backend.program.listing import listing
from normpass.backend.program.plan import make_plan
from normpass.backend.program.tree import Jam, Together
from normpass.passes.region_text import parse


def crossed(dtype: str, c: int = 48, s: int = 40) -> str:
    """Layer norm of an image's pixels: channels are far apart in x, side by side in y."""
    axes = {"n": 3, "s": s, "c": c}
    return forward(axes, "n s c", "c", dtype, strides=f" ({c * s}, 1, {s})")


def test_snapshot() -> None:
    """Sixteen rows at a time."""
    program = listing(make_plan(parse(crossed("f32"))))
    assert_snapshot("programs/rows_side_by_side.txt", program)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("workers", [1, 2, 64])
@pytest.mark.parametrize(("c", "s"), [(48, 40), (16, 16), (33, 17), (5, 100), (100, 5)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_rows_side_by_side_go_together(dtype: str, c: int, s: int, workers: int) -> None:
    text = crossed(dtype, c, s)
    plan = make_plan(parse(text))
    assert plan.together is not None
    assert plan.together.kind == Jam(16)
    assert plan.vector == "c"
    is_right(text, (2,), workers)


@pytest.mark.parametrize(("c", "s"), [(48, 40), (33, 17)])
def test_rows_side_by_side_are_written_so(c: int, s: int) -> None:
    axes = {"n": 3, "s": s, "c": c}
    text = forward(axes, "n s c", "c", written=f" ({c * s}, 1, {s})")
    assert "store_rows" in generate(make_plan(parse(text)))
    is_right(text, (2,), workers=2)


def test_a_line_is_read_for_all_rows_in_it() -> None:
    text = generate(make_plan(parse(crossed("f32"))))
    assert text.count("load_rows<scalar>(x, p_x + n * 1920 + s0 + c * 40, 40, lanes);") == 3
    assert "gather" not in text


SUMS_OF_EACH_ROW = """\
region rows_of_sums
axes    r=48 c=4 d=33
input   x: {dtype}[r c d] (1, 48, 192)
input   y: {dtype}[r c d]
sum     = sum[d](x)
sub     = sub(x, sum)
mul     = mul(sub, y)
all     = sum[c d](mul)
z       = mul(mul, all)
output  z: {dtype}[r c d] = z
"""


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_rows_with_an_array_of_sums_each_go_one_by_one(dtype: str) -> None:
    """There is one array. Several rows in it did not compile, and the region ran unfused."""
    text = SUMS_OF_EACH_ROW.format(dtype=dtype)
    plan = make_plan(parse(text))
    assert plan.together is None
    assert "array   sum[c]" in listing(plan)
    x = torch.randn(33, 4, 48, dtype=KINDS[dtype]).permute(2, 1, 0)
    y = torch.randn(48, 4, 33, dtype=KINDS[dtype])
    (found,) = launched(text, [x, y], workers=2)
    exact = (x.double() - x.double().sum(-1, keepdim=True)) * y.double()
    exact = exact * exact.sum((1, 2), keepdim=True)
    few = 64 * torch.finfo(KINDS[dtype]).eps * float(exact.abs().max())
    assert float((found.double() - exact).abs().max()) <= few


INSTANCE_BACKWARD = """\
region instance_norm_backward
axes    n=3 c={c} s={s}
input   x: {dtype}[n c s] ({step}, 1, {c})
input   g: {dtype}[n c s]
input   mean: f32[n c]
input   rstd: f32[n c]
sub     = sub(x, mean)
hat     = mul(sub, rstd)
gh      = mul(g, hat)
sum     = sum[s](g)
sum_1   = sum[s](gh)
a       = div(sum, {s}.0)
b       = div(sum_1, {s}.0)
hat_b   = mul(hat, b)
less    = sub(g, a)
less_1  = sub(less, hat_b)
dx      = mul(less_1, rstd)
dw      = sum[n](sum_1)
db      = sum[n](sum)
output  y0: f32[n c s] = dx
output  y1: f32[c] = dw
output  y2: f32[c] = db
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("workers", [1, 2, 64])
@pytest.mark.parametrize(("c", "s"), [(48, 64), (21, 37), (5, 100)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_side_by_side_are_added_to_elements_of_their_own(
    dtype: str, c: int, s: int, workers: int
) -> None:
    """Each channel has sums over images: what is added to differs between rows that go together."""
    text = INSTANCE_BACKWARD.format(c=c, s=s, step=c * s, dtype=dtype)
    plan = make_plan(parse(text))
    assert plan.together == Together("c", Jam(16))
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(3, c, s, generator=generator).to(KINDS[dtype]) for _ in range(2))
    x = torch.empty_strided(x.shape, (c * s, 1, c), dtype=x.dtype).copy_(x)
    mean, rstd = (torch.rand(3, c, generator=generator) + 0.5 for _ in range(2))
    dx, dw, db = launched(text, [x, g, mean, rstd], workers)
    hat = (x.double() - mean.unsqueeze(2)) * rstd.unsqueeze(2)
    right = g.double() * hat
    centred = g.double() - g.double().mean(2, keepdim=True) - hat * right.mean(2, keepdim=True)
    torch.testing.assert_close(dx.double(), centred * rstd.unsqueeze(2), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(dw.double(), right.sum((0, 2)), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(db.double(), g.double().sum((0, 2)), rtol=1e-6, atol=1e-5)


def test_rows_side_by_side_have_their_variance_of_the_whole() -> None:
    """They go together for their whole length: blocks would read each line once more."""
    axes = {"n": 2, "c": 32, "s": 147456}
    text = forward(axes, "n c s", "s", strides=f" ({32 * 147456}, 1, 32)")
    plan = make_plan(parse(text))
    assert plan.together == Together("c", Jam(16))
    assert not has_parts(text)
    is_right(text, (2,), workers=2)
