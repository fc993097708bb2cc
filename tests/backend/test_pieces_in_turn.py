"""Rows whose elements take turns: rotary embedding of pairs, as Flux, Wan, GLM and Cohere have it.
Against float64.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from piecewise import (
    HEADS,
    SIZE,
    as_exact,
    both,
    compiled,
    heads,
    in_triton,
    inputs,
    is_joined,
    many,
)
from torch import Tensor

from normpass.backend.codegen import cpp
from normpass.backend.explain import record
from normpass.backend.program.plan import make_plan
from normpass.backend.run.op import region_op
from normpass.backend.run.reference import evaluate, out_of_place
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def pairs_unbound(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Flux has it."""
    y = F.rms_norm(heads(x), (SIZE,), w).transpose(1, 2)
    real, imaginary = y.reshape(*y.shape[:-1], SIZE // 2, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], -1).flatten(3)
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y.to(wide) * cos + turned.to(wide) * sin).to(y.dtype)


def every_second(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As GLM and Cohere have it."""
    y = F.layer_norm(heads(x), (SIZE,), w).transpose(1, 2)
    turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    return y * cos + turned * sin


def written_in_turn(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Wan has it."""
    y = F.rms_norm(heads(x), (SIZE,), w)
    one, other = y.unflatten(-1, (SIZE // 2, 2)).unbind(-1)
    cos, sin = cos[:, None, ::2], sin[:, None, 1::2]
    out = torch.empty_like(y)
    out[..., ::2] = one * cos - other * sin
    out[..., 1::2] = one * sin + other * cos
    return out


def pairs_of_the_first_half(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Cut in two ways at once, which no region expresses: it stays whole."""
    y = F.rms_norm(heads(x), (SIZE,), w)
    some, rest = y[..., :24], y[..., 24:]
    turned = torch.stack([-some[..., 1::2], some[..., ::2]], -1).flatten(-2)
    return torch.cat([some * cos[:, None, :24] + turned * sin[:, None, 24:], rest], -1)


def halves_unbound(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Parts that lie side by side, each one element of a dimension of two."""
    y = F.rms_norm(heads(x), (SIZE,), w)
    first, last = y.unflatten(-1, (2, SIZE // 2)).unbind(-2)
    turned = torch.stack([-last, first], -2).flatten(-2)
    return y * cos[:, None] + turned * sin[:, None]


IN_TURN = [pairs_unbound, every_second, written_in_turn]
by_name = pytest.mark.parametrize("f", IN_TURN, ids=lambda f: f.__name__)


@pytest.mark.one_in(4)
@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_as_exact_as_eager_mode(f: Callable[..., Tensor], dtype: torch.dtype) -> None:
    args = inputs(dtype)
    found, fused = compiled(f, args)
    as_exact(found, f, args)
    assert [is_joined(each, "in turn") for each in fused] == [True, True]
    assert all(f"c={SIZE // 2}" in each.text for each in fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_truth_values_and_bytes(dtype: torch.dtype) -> None:
    """Read and written in turn as well."""

    def f(x: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.rms_norm(x, w.shape, w)
        y = y * mask + torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
        scale = y.abs().amax(-1, keepdim=True) / 127
        return y, y > 0, (y / scale).round().to(torch.int8)

    x, w = torch.randn(64, SIZE).to(dtype), torch.randn(SIZE).to(dtype)
    mask = torch.rand(64, SIZE) < 0.5
    torch._dynamo.reset()
    with record.listen() as decisions:
        found = torch.compile(f, backend="normpass", options={"least_bytes": 0})(x, w, mask)
    wide = f(x.double(), w.double(), mask)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(found[0].double(), wide[0], **close)
    sure = wide[0].abs() > 1e-3
    assert torch.equal(found[1][sure], wide[1][sure])
    assert int((found[2].int() - wide[2].int()).abs().max()) <= 1
    assert [is_joined(each, "in turn") for each in decisions if isinstance(each, Fused)] == [True]


@pytest.mark.parametrize("f", [pairs_of_the_first_half, halves_unbound], ids=lambda f: f.__name__)
def test_other_parts(f: Callable[..., Tensor]) -> None:
    args = inputs(torch.float32)
    found, fused = compiled(f, args)
    as_exact(found, f, args)
    assert [is_joined(each) for each in fused] == [f is halves_unbound] * 2


@pytest.mark.one_in(3)
@by_name
@pytest.mark.parametrize("batch", [0, 1])
def test_few_rows(f: Callable[..., Tensor], batch: int) -> None:
    args = inputs(torch.float32)
    args[0] = args[0].detach()[:batch].requires_grad_()
    found, _ = compiled(f, args)
    for one, eager in zip(found, both(f, args), strict=True):
        torch.testing.assert_close(one, eager)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [2, 6, 30, 34, 66, 130])
def test_rows_of_any_length(width: int) -> None:
    """Some lanes are left over, or all of them."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, (width,), w)
        return y + torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2) * w

    args = [torch.randn(33, width, requires_grad=True), torch.randn(width, requires_grad=True)]
    found, fused = compiled(f, args)
    as_exact(found, f, args)
    assert [is_joined(each, "in turn") for each in fused] == [width > 30] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_than_caches_hold(dtype: torch.dtype) -> None:
    """Written around the caches, both at once."""
    args = many(dtype)
    found, _ = compiled(pairs_unbound, args)
    as_exact(found, pairs_unbound, args)


def test_any_number_of_rows() -> None:
    torch._dynamo.reset()
    compiler = torch.compile(
        pairs_unbound, backend="normpass", options={"least_bytes": 0}, dynamic=None
    )
    for batch, length in ((3, 7), (2, 5), (4, 11)):
        x = torch.randn(batch, length, HEADS * SIZE, requires_grad=True)
        args = [x, inputs(torch.float32)[1], torch.randn(length, SIZE), torch.randn(length, SIZE)]
        torch._dynamo.mark_dynamic(x, 0)
        for tensor, dim in ((x, 1), (args[2], 0), (args[3], 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        as_exact(both(compiler, args), pairs_unbound, args)


def test_nan_goes_where_it_belongs() -> None:
    x, w, cos, sin = inputs(torch.float32)
    with torch.no_grad():
        x[0, 0, 3] = float("nan")
        cos[1, 4] = float("nan")
    found, _ = compiled(pairs_unbound, (x, w, cos, sin))
    assert torch.equal(found[0].isnan(), pairs_unbound(x, w, cos, sin).isnan())


SWAPPED = """
region pairs_swapped
axes    r=? c={width}
input   x: {dtype}[r c] ({two}, 2)
input   y: {dtype}[r c] ({two}, 2)
a       = exp(x)
b       = exp(y)
both    = add(a, b)
sum     = sum[c](both)
one     = div(a, sum)
two     = div(b, sum)
output  y0: {dtype}[r 1] = sum
output  y1: {dtype}[r c] ({two}, 2) = two
output  y2: {dtype}[r c] ({two}, 2) = one
in turn y1 y2 [1]
"""
ROWS = 9


def swapped(width: int, dtype: str = "f32") -> str:
    return SWAPPED.format(width=width, two=2 * width, dtype=dtype)


def exact_pairs(x: Tensor) -> list[Tensor]:
    y = torch.softmax(x.double(), -1)
    turned = torch.stack([y[:, 1::2], y[:, ::2]], -1).flatten(-2)
    return [x.double().exp().sum(-1, keepdim=True), turned]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("run", ["kernel", "reference", "out of place", "shapes"])
@pytest.mark.parametrize("width", [1, 5, 24, 64])
def test_one_tensor_of_two_outputs(run: str, width: int) -> None:
    """The operator returns what takes turns as one, however it is run."""
    x, text = torch.randn(ROWS, 2 * width), swapped(width)
    parts = [x[:, ::2], x[:, 1::2]]
    if run == "shapes":
        found = region_op([each.to("meta") for each in parts], [ROWS], text)
        shapes = [((ROWS, 1), (1, 1)), ((ROWS, 2 * width), (2 * width, 1))]
        assert [(y.shape, y.stride()) for y in found] == shapes
        return
    evaluated: Any = evaluate if run == "reference" else out_of_place
    call: Any = region_op if run == "kernel" else lambda x, n, text: evaluated(parse(text), x, n)
    for one, exact in zip(call(parts, [ROWS], text), exact_pairs(x), strict=True):
        torch.testing.assert_close(one, exact.float())


GUARDED = """
import sys, torch
from normpass.backend.codegen import cpp
from normpass.backend.explain import record
from normpass.backend.program.plan import make_plan
from normpass.backend.run.op import region_op
text, width = sys.stdin.read(), int(sys.argv[1])
import ctypes, mmap
size = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
place = libc.mmap(None, 2 * size, 3, 0x22, -1, 0)
assert libc.mprotect(place + size, size, 0) == 0
bytes_ = 2 * width * 4
memory = (ctypes.c_float * (2 * width)).from_address(place + size - bytes_)
x = torch.frombuffer(memory, dtype=torch.float32).view(1, -1)
x.copy_(torch.arange(2.0 * width) / width)
print(float(region_op([x[:, ::2], x[:, 1::2]], [1], text)[1].sum()))
"""


@pytest.mark.one_in(5)
@pytest.mark.skipif(sys.platform != "linux", reason="guards a page as Linux does")
@pytest.mark.parametrize("width", [8, 16, 24, 27, 64])
def test_nothing_behind_a_tensor_is_read(width: int) -> None:
    """Every second element of what ends with its page."""
    program = [sys.executable, "-c", GUARDED, str(width)]
    found = subprocess.run(program, input=swapped(width), text=True, capture_output=True)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) == pytest.approx(1.0, rel=1e-5)


def test_in_triton(tmp_path: Path) -> None:
    x = torch.randn(ROWS, 48)
    found = in_triton([x[:, ::2], x[:, 1::2]], swapped(24), tmp_path)
    for one, exact in zip(found, exact_pairs(x), strict=True):
        torch.testing.assert_close(one, exact.float())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_lanes_run_along_rows(dtype: str) -> None:
    """Whole vectors, shuffled: to gather and to scatter each number takes ten times as long."""
    text = cpp.generate(make_plan(parse(swapped(64, dtype))))
    assert text.count("load_every_second<scalar>(") >= 2
    assert text.count("write_in_turn(") == 1
    assert "gather" not in text
    assert "scatter" not in text


def test_one_of_several_projections() -> None:
    """What the norms read is taken apart as well, across their rows: those parts stay outside."""

    def f(qkv: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.view(3, 7, 3, HEADS, SIZE).unbind(2)
        return (*(every_second(x.flatten(2), w, cos, sin) for x in (q, k)), v * 2)

    _, w, cos, sin = inputs(torch.float32)
    qkv = torch.randn(3, 7, 3 * HEADS * SIZE)
    torch._dynamo.reset()
    with record.listen() as decisions:
        found = torch.compile(f, backend="normpass", options={"least_bytes": 0})(qkv, w, cos, sin)
    for one, eager in zip(found, f(qkv, w, cos, sin), strict=True):
        torch.testing.assert_close(one, eager)
    fused = [each for each in decisions if isinstance(each, Fused)]
    assert [is_joined(each, "in turn") for each in fused] == [True, True]


@pytest.mark.parametrize("count", [2, 3])
def test_an_outer_dimension_takes_turns(count: int) -> None:
    """Rows of two dimensions: their elements lie side by side, of so many parts."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, w.shape, w)
        first, *others = y.unflatten(1, (-1, count)).unbind(2)
        return y + torch.stack([*others, -first], 2).flatten(1, 2)

    args = [torch.randn(9, 48, 16, requires_grad=True), torch.randn(48, 16, requires_grad=True)]
    found, fused = compiled(f, args)
    as_exact(found, f, args)
    assert is_joined(fused[0], "in turn")


APART = """
region outer_pairs
axes    r=? d=4 v=64 e=2
input   a: f32[r d e v]
input   b: f32[r d e v]
m       = sum[v](a)
one     = gt(a, m)
two     = lt(b, m)
output  y0: b8[r d v e] (1024, 256, 2, 1) = one
output  y1: b8[r d v e] (1024, 256, 2, 1) = two
in turn y0 y1 [1]
"""


def test_lanes_along_another_axis_than_what_takes_turns() -> None:
    """Every second element as well, but none is a neighbour of one of the other output."""
    a, b = torch.randn(3, 4, 2, 64), torch.randn(3, 4, 2, 64)
    (found,) = region_op([a, b], [3], APART)
    sums = a.double().sum(-1, keepdim=True)
    exact = torch.stack([a > sums, b < sums], 2).flatten(1, 2).transpose(-1, -2)
    assert torch.equal(found, exact)
