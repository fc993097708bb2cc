"""Kernels that take as many short rows at a time as a vector has lanes: which do, and right results
for every number of rows and every length of a row.

The reference is float64 mathematics from primitives (oracles.py); the error allowed is eager's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import oracles
import pytest
import torch
from torch.nn import functional as F

from normpass.backend.codegen import cpp
from normpass.backend.program.plan import make_plan
from normpass.backend.run.runtime import Kernel
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

EPS = 1e-5
FORWARD = """\
region layer_norm
axes    r=? c={width}
input   x: {dtype}[r c]
input   w: {dtype}[c]
input   b: {dtype}[c]
sum     = sum[c](x)
mean    = div(sum, {width})
sub     = sub(x, mean)
square  = mul(sub, sub)
sum_1   = sum[c](square)
var     = div(sum_1, {width})
add     = add(var, 1e-05)
rstd    = rsqrt(add)
x_hat   = mul(sub, rstd)
scaled  = mul(x_hat, w)
shifted = add(scaled, b)
output  y: {dtype}[r c] = shifted
output  saved_mean: {stats}[r] = mean
output  saved_rstd: {stats}[r] = rstd"""
BACKWARD = """\
region layer_norm_backward
axes    r=? c={width}
input   g: {dtype}[r c]
input   w: {dtype}[c]
input   x: {dtype}[r c]
input   mean: {stats}[r]
input   rstd: {stats}[r]
gw      = mul(g, w)
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
gwx     = mul(gw, x_hat)
sum     = sum[c](gw)
sum_1   = sum[c](gwx)
a       = div(sum, {width})
b       = div(sum_1, {width})
less    = sub(gw, a)
along   = mul(x_hat, b)
rest    = sub(less, along)
dx      = mul(rest, rstd)
gx      = mul(g, x_hat)
dw      = sum[r](gx)
db      = sum[r](g)
output  y: {dtype}[r c] = dx
output  y_1: {dtype}[c] = dw
output  y_2: {dtype}[c] = db"""
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
COUNTS = (0, 1, 2, 3, 4, 5, 15, 16, 17, 33, 100, 600)  # 600 rows are added up in three parts
RESULTS = ("y", "mean", "rstd", "dx", "dw", "db")
THREADS = (1, 2, 3)  # one has all the rows; two or three have shares with remainders of their own


def text_of(text: str, width: int, dtype: str = "f32") -> str:
    return text.format(width=width, dtype=dtype, stats="f64" if dtype == "f64" else "f32")


def source_of(text: str) -> str:
    return cpp.generate(make_plan(parse(text)))


def abreast(source: str) -> bool:
    return "across_rows" in source


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows of which none resembles another."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) > 1:
        scale = torch.arange(1, shape[0] + 1).reshape(-1, *(1 for _ in shape[1:])) % 7 + 0.5
        x = x * scale + scale
    return x.to(dtype)


def compare(names: Sequence[str], found: Sequence[list[tuple[Tensor, ...]]], what: str) -> None:
    """Ours, eager's and exact results of each name, of all runs at once: a row or two may be more
    exact by chance.
    """
    for name, runs in zip(names, found, strict=True):
        ours, theirs, exact = (torch.cat(column) for column in zip(*runs, strict=True))
        oracles.assert_no_less_accurate(ours, theirs, exact, f"{name}, {what}")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("past_caches", [True, False], ids=["past caches", "cached"])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(16, "f32"), (64, "f32"), (128, "f32"), (5, "bf16"), (48, "bf16"), (77, "bf16"), (32, "f64")],
)
def test_any_number_of_rows(
    width: int, dtype: str, past_caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache = 0 if past_caches else 1 << 40
    monkeypatch.setattr("normpass.backend.run.runtime.private_cache", lambda: own_cache)
    forward, backward = (Kernel(text_of(t, width, dtype)) for t in (FORWARD, BACKWARD))
    assert abreast(forward.source)
    assert abreast(backward.source) is (dtype == "bf16")
    kind = DTYPES[dtype]
    w, b = numbers(width, dtype=kind), numbers(width, dtype=kind)

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return oracles.layer_norm(x, (width,), w, b, EPS)

    for threads in THREADS:
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        found: list[list[tuple[Tensor, ...]]] = [[] for _ in RESULTS]
        for rows in COUNTS:
            x, g = numbers(rows, width, dtype=kind), numbers(rows, width, dtype=kind).flip(-1)
            y, mean, rstd = forward([x, w, b], [rows])
            leaves = [t.detach().requires_grad_() for t in (x, w, b)]
            eager = F.layer_norm(leaves[0], (width,), *leaves[1:], EPS)
            exact_mean = x.double().mean(1)
            variance = (x.double() - exact_mean.unsqueeze(1)).square().mean(1)
            exact = [norm(x.double(), w.double(), b.double()), exact_mean, (variance + EPS).rsqrt()]
            # Statistics as exact as they can be saved: what is compared is the backward alone.
            saved = [v.to(mean.dtype) for v in exact[1:]]
            ours = [y, mean, rstd, *backward([g, w, x, *saved], [rows])]
            theirs = [eager.detach(), *saved, *torch.autograd.grad(eager, leaves, g)]
            exact += [v for v in oracles.gradients(norm, g, x, w, b) if v is not None]
            for k, results in enumerate(zip(ours, theirs, exact, strict=True)):
                found[k].append(results)
        compare(RESULTS, found, f"{threads} threads")


SOFTMAX = """\
region softmax
axes    r=? c={width}
input   x: {dtype}[r c]
amax    = amax[c](x)
sub     = sub(x, amax)
exp     = exp(sub)
sum     = sum[c](exp)
div     = div(exp, sum)
output  y: {dtype}[r c] = div"""


@pytest.mark.one_in(6)
@pytest.mark.parametrize("width", [*range(2, 34), 95, 96])
def test_every_length_of_a_row(width: int) -> None:
    """From one lane to two vectors and one more. Kept values lie in one row's array each; the
    smallest and the largest rows stand for NaN and infinities as well.
    """
    kernel = Kernel(text_of(SOFTMAX, width, "bf16"))
    assert abreast(kernel.source)
    for rows in (1, 16, 37):
        x = numbers(rows, width, dtype=torch.bfloat16)
        (y,) = kernel([x], [rows])
        exact = oracles.softmax(x.double(), 1)
        oracles.assert_no_less_accurate(y, x.softmax(1), exact, f"{rows} rows")


def test_what_is_no_number_stays_in_its_row() -> None:
    x = numbers(37, 32, dtype=torch.float32)
    x[3, 31], x[17, 0], x[36, 7] = torch.nan, torch.inf, -torch.inf
    kernel = Kernel(text_of(SOFTMAX, 32))
    assert abreast(kernel.source)
    (y,) = kernel([x], [37])
    torch.testing.assert_close(y, x.softmax(1), equal_nan=True)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [3, 17]


HEADS = """\
region rms_norm_of_heads
axes    b={b} t={t} h={h} d={d}
input   x: {dtype}[b t h d]
input   g: {dtype}[b h t d]
input   w: {dtype}[d]
square  = mul(x, x)
sum     = sum[d](square)
mean    = div(sum, {d})
add     = add(mean, 1e-05)
rstd    = rsqrt(add)
x_hat   = mul(x, rstd)
scaled  = mul(x_hat, w)
gw      = mul(g, w)
gwx     = mul(gw, x_hat)
sum_1   = sum[d](gwx)
a       = div(sum_1, {d})
along   = mul(x_hat, a)
less    = sub(gw, along)
dx      = mul(less, rstd)
gx      = mul(g, x_hat)
dw      = sum[b t h](gx)
output  y: {dtype}[b h t d] = scaled
output  y_1: {dtype}[b t h d] = dx
output  y_2: {dtype}[d] = dw"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("h", "d"), [(16, 64), (5, 32), (40, 24)])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_heads_whose_rows_lie_apart(
    h: int, d: int, dtype: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries' and keys' norms: rows of one tensor lie side by side, of another one far apart. Each
    worker has a share even of a single text.
    """
    sizes = [(1, 70), (2, 3), (3, 11), (1, 1), (0, 4), (4, 0)] if dynamic else [(1, 29)]
    b, t = ("?", "?") if dynamic else sizes[0]
    kernel = Kernel(HEADS.format(b=b, t=t, h=h, d=d, dtype=dtype))
    assert abreast(kernel.source) is (dtype == "bf16")
    assert "share(n_b * n_t * n_h," in kernel.source
    monkeypatch.setattr("normpass.backend.run.runtime.ELEMENTS_PER_WORKER", 1)
    kind = DTYPES[dtype]

    def exactly(x: Tensor, w: Tensor) -> Tensor:
        return oracles.rms_norm(x, (d,), w, EPS).transpose(1, 2)

    for threads in (1, 2, 3, 5):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        kernel._launches.clear()
        found: list[list[tuple[Tensor, ...]]] = [[], [], []]
        for b, t in sizes:
            x, g = numbers(b, t, h, d, dtype=kind), numbers(b, h, t, d, dtype=kind)
            w = numbers(d, dtype=kind)
            leaves = [v.detach().requires_grad_() for v in (x, w)]
            eager = F.rms_norm(leaves[0], (d,), leaves[1], EPS).transpose(1, 2)
            theirs = [eager.detach(), *torch.autograd.grad(eager, leaves, g)]
            exact = [exactly(x.double(), w.double()), *oracles.gradients(exactly, g, x, w)]
            ours = kernel([x, g, w], [b, t] if dynamic else [])
            for k, results in enumerate(zip(ours, theirs, exact, strict=True)):
                assert all(v is not None for v in results)
                found[k].append(tuple(v.flatten() for v in results if v is not None))
        compare(("y", "dx", "dw"), found, f"{threads} threads")


@pytest.mark.parametrize(
    ("text", "goes"),
    [
        (text_of(FORWARD, 192), True),
        (text_of(FORWARD, 208), False),
        (text_of(FORWARD, 100), False),  # no whole vectors
        (text_of(FORWARD, 100, "bf16"), True),
        (text_of(FORWARD, 16), True),
        (text_of(FORWARD, 384, "bf16"), True),
        (text_of(FORWARD, 385, "bf16"), False),
        # A row has two tensors.
        (text_of(BACKWARD, 192, "bf16"), True),
        (text_of(BACKWARD, 193, "bf16"), False),
        # A row has one tensor, and values that are kept.
        (text_of(SOFTMAX, 96), True),
        (text_of(SOFTMAX, 112), False),
        # Numbers need no widening, and rows are gone over twice.
        (text_of(BACKWARD, 64), False),
        # Rows of float32 lie apart.
        (text_of(FORWARD, 64).replace("x: f32[r c]", "x: f32[r c] (65, 1)"), False),
        (text_of(FORWARD, 64, "bf16").replace("x: bf16[r c]", "x: bf16[r c] (65, 1)"), True),
        # A length that is not known.
        (text_of(SOFTMAX, 64).replace("c=64", "c=?"), False),
        # Three rows.
        (text_of(SOFTMAX, 64).replace("r=?", "r=3"), False),
        # What is one number a row is added up over the rows.
        (
            text_of(SOFTMAX, 64) + "\ntotal = sum[r](sum)\noutput z: f32[1] = total",
            False,
        ),
        # What is one of a row is a truth value.
        (
            text_of(SOFTMAX, 64).replace("input   x: f32[r c]", "input x: f32[r c]\ninput k: b8[r]")
            + "\nkept = where(k, div, 0.0)\noutput z: f32[r c] = kept",
            False,
        ),
        # The same, of each element.
        (
            text_of(SOFTMAX, 64).replace(
                "input   x: f32[r c]", "input x: f32[r c]\ninput k: b8[r c]"
            )
            + "\nkept = where(k, div, 0.0)\noutput z: f32[r c] = kept",
            True,
        ),
        # Rows have a sum in common that they need.
        (
            "region centred\naxes r=? c=64\ninput x: f32[r c]\nsum = sum[r c](x)\n"
            "sub = sub(x, sum)\noutput y: f32[r c] = sub",
            False,
        ),
    ],
)
def test_which_rows_go_abreast(text: str, goes: bool) -> None:
    assert abreast(source_of(text)) is goes
