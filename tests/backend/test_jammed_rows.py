"""Kernels that take several rows at a time: as many as they should, and right for every number of
rows, whether it is a multiple of that or leaves some over.

The reference is float64 mathematics from primitives (oracles.py); the error allowed is eager's own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import oracles
import pytest
import torch
from compiled import compile_fused, no_recompiles
from torch import nn

from normpass.backend.codegen import cpp
from normpass.backend.entry import fusion_pass
from normpass.backend.explain import record
from normpass.backend.program.machine import CPU, machine_of
from normpass.backend.program.plan import make_plan
from normpass.backend.run.dialects import kernel_source
from normpass.backend.run.runtime import Kernel, print_kernel
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

EPS = 1e-5
PAIRED, FOURFOLD = 32768, 2048  # float32 rows of 128 KiB and of 8 KiB
THREADS = (1, 2, 3)  # one has all the rows; two or three have shares with remainders of their own
by_threads = pytest.mark.parametrize("threads", THREADS)
# The mean along each row is taken off it; ADDED sums the result over the rows as well.
CENTRED = """\
region centred
axes    r=? c={width}
input   x: {dtype}[r c]
sum     = sum[c](x)
mean    = div(sum, {width})
sub     = sub(x, mean)"""
ADDED = """
sum_1   = sum[r](sub)"""
OUTPUT = """
output  y: {dtype}[r c] = sub"""
TOTAL = """
output  total: {dtype}[c] = sum_1"""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return oracles.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return oracles.rms_norm(x, x.shape[-1:], weight, EPS)


NORMS: dict[str, tuple[type[nn.LayerNorm | nn.RMSNorm], Callable[..., Tensor]]] = {
    "layer_norm": (nn.LayerNorm, layer_norm),
    "rms_norm": (nn.RMSNorm, rms_norm),
}


def together(source: str) -> int:
    """How many rows a kernel takes at a time; what is left over it takes one by one."""
    counts = [int(n) for n in re.findall(r"rows\.template operator\(\)<(\d+)>", source)]
    if not counts:
        return 1
    many, one = counts
    assert one == 1
    return many


def text_of(width: int, dtype: str, *, added: bool) -> str:
    text = CENTRED + ADDED + OUTPUT + TOTAL if added else CENTRED + OUTPUT
    return text.format(width=width, dtype=dtype)


def numbers(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """An input and a gradient; no row resembles another."""
    generator = torch.Generator().manual_seed(rows)
    scale = torch.arange(1, rows + 1).unsqueeze(1) * 0.7
    x = torch.randn(rows, width, generator=generator) * scale + scale.flip(0)
    return x, torch.randn(rows, width, generator=generator)


def results(
    function: Callable[..., Tensor], module: nn.Module, x: Tensor, g: Tensor
) -> list[Tensor]:
    """Output, then the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    if len(x) > 1:
        torch._dynamo.mark_dynamic(x, 0)
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], g)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("width", "forward", "backward", "counts"),
    [(PAIRED, 2, 2, (9, 13, 5, 7, 4, 1)), (FOURFOLD, 1, 4, (*range(2, 10), 16, 33, 1))],
    ids=["two", "four"],
)
@pytest.mark.parametrize("name", NORMS)
def test_norms(
    name: str,
    width: int,
    forward: int,
    backward: int,
    counts: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 8 KiB go together where they are added to arrays, as the backward's are."""
    build, oracle = NORMS[name]
    module = build(width, eps=EPS)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=1.0, std=0.3)
    function = compile_fused(module, dynamic=None)

    def check(rows: int) -> None:
        x, g = numbers(rows, width)
        parameters = [p.detach() for p in module.parameters()]
        exact = oracle(x.double(), *(p.double() for p in parameters))
        right = [exact, *oracles.gradients(oracle, g, x, *parameters)]
        ours, theirs = results(function, module, x, g), results(module, module, x, g)
        for k, (mine, other, reference) in enumerate(zip(ours, theirs, right, strict=True)):
            assert reference is not None
            oracles.assert_no_less_accurate(mine, other, reference, f"result {k} of {rows} rows")

    first, *others, single = counts
    with record.listen() as heard:
        check(first)
    made = {d.phase: together(kernel_source(d)) for d in heard if isinstance(d, Fused)}
    alone = not machine_of("cpu").whole_lines
    assert made == {"forward": 1 if alone else forward, "backward": backward}
    with no_recompiles():
        for threads in THREADS:
            monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
            for rows in (first, *others):
                check(rows)
    check(single)  # has a graph of its own, without an axis of rows


@by_threads
@pytest.mark.parametrize("past_caches", [True, False])
@pytest.mark.parametrize(("width", "jam"), [(PAIRED, 2), (FOURFOLD, 4)])
def test_any_number_of_rows(
    width: int, jam: int, past_caches: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel for none, for one, for fewer than go together, and for some left over."""
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    own_cache = 0 if past_caches else 1 << 40
    monkeypatch.setattr("normpass.backend.run.runtime.private_cache", lambda: own_cache)
    kernel = Kernel(text_of(width, "f32", added=True))
    assert together(kernel.source) == jam
    for rows in (0, 1, 2, 3, 4, 5, 7, 9, 22):
        x, _ = numbers(rows, width)
        y, total = kernel([x], [rows])
        # Without rows there is still the total to be written.
        assert kernel._launches[rows,].past_caches is past_caches
        exact = x.double() - x.double().mean(1, keepdim=True)
        eager = x - x.mean(1, keepdim=True)
        oracles.assert_no_less_accurate(y, eager, exact, f"{rows} rows")
        oracles.assert_no_less_accurate(total, eager.sum(0), exact.sum(0), f"total of {rows} rows")


KIB = 1024


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("f64", 8), ("bf16", 4)])
@pytest.mark.parametrize("added", [False, True])
def test_how_many_rows_go_together(dtype: str, size: int, added: bool) -> None:
    """By the bytes of a row in the type that is computed in, at and just below each bound."""

    def jam(bytes_per_row: int) -> int:
        region = parse(text_of(bytes_per_row // size, dtype, added=added))
        return together(cpp.generate(make_plan(region)))

    start, vector = (8 if added else 16) * KIB, 16 * size
    assert jam(start - vector) == 1
    assert jam(start) == jam(96 * KIB - vector) == 4
    assert jam(96 * KIB) == jam(256 * KIB - vector) == 2
    assert jam(256 * KIB) == 4
    # Rows that begin anywhere: test_unaligned_rows.py.
    assert jam(start + size) == (4 if added or dtype != "f32" else 1)


@pytest.mark.parametrize("width", [FOURFOLD, 2 * FOURFOLD, PAIRED])
def test_vectors_of_half_a_line(width: int) -> None:
    """Rows that are added to nothing go one by one, and are written in order; with arrays nothing
    changes.
    """
    machine = replace(CPU, whole_lines=False)

    def text(*, added: bool) -> str:
        return cpp.generate(make_plan(parse(text_of(width, "f32", added=added)), machine))

    alone = text(added=False)
    assert together(alone) == 1
    assert "write(" in alone
    assert "write_apart(" not in alone
    assert text(added=True) == cpp.generate(make_plan(parse(text_of(width, "f32", added=True))))


@by_threads
@pytest.mark.parametrize("whole_lines", [True, False])
def test_rows_that_are_added_to_nothing(
    whole_lines: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four together or one by one, as the processor's vectors are, written past the caches."""
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("normpass.backend.run.runtime.private_cache", lambda: 0)
    machine = replace(CPU, whole_lines=whole_lines)
    monkeypatch.setattr("normpass.backend.run.runtime.machine_of", lambda _: machine)
    print_kernel.cache_clear()  # it does not know of the machine, which a process has one of
    kernel = Kernel(text_of(2 * FOURFOLD, "f32", added=False))
    print_kernel.cache_clear()
    assert together(kernel.source) == (4 if whole_lines else 1)
    for rows in (1, 3, 4, 5, 9):
        x, _ = numbers(rows, 2 * FOURFOLD)
        (y,) = kernel([x], [rows])
        exact = x.double() - x.double().mean(1, keepdim=True)
        oracles.assert_no_less_accurate(y, x - x.mean(1, keepdim=True), exact, f"{rows} rows")


# Weights that differ between the outermost steps, as adaptive layer norm's do.
ADAPTIVE = """\
region adaptive
axes    n=? t=? c={width}
input   x: f32[n t c]
input   g: f32[n t c]
input   w: f32[n 1 c]
gw      = mul(g, w)
gwx     = mul(gw, x)
sum     = sum[c](gwx)
mean    = div(sum, {width})
along   = mul(x, mean)
rest    = sub(gw, along)
gx      = mul(g, x)
dw      = sum[t](gx)
output  y: f32[n t c] = rest
output  y_1: f32[n 1 c] = dw"""


def adaptive(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    gw = g * w
    return gw - x * (gw * x).mean(2, keepdim=True), (g * x).sum(1, keepdim=True)


@by_threads
@pytest.mark.parametrize(("width", "jam"), [(FOURFOLD, 4), (FOURFOLD - 4, 1), (PAIRED, 2)])
def test_rows_inside_of_other_loops(
    width: int, jam: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over an axis that is not the outermost one, with weights that differ between those."""
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    kernel = Kernel(ADAPTIVE.format(width=width))
    assert together(kernel.source) == jam
    generator = torch.Generator().manual_seed(width)
    for n, t in ((0, 3), (3, 0), (1, 1), (1, 9), (2, 4), (5, 3), (3, 6)):
        x, g = (torch.randn(n, t, width, generator=generator) for _ in range(2))
        w = torch.randn(n, 1, width, generator=generator)
        ours, theirs = kernel([x, g, w], [n, t]), adaptive(x, g, w)
        right = adaptive(x.double(), g.double(), w.double())
        for mine, other, exact in zip(ours, theirs, right, strict=True):
            oracles.assert_no_less_accurate(mine, other, exact, f"{n} times {t} rows")


def test_rows_with_sums_in_common_go_one_by_one() -> None:
    """A sum over rows and their elements that each of them needs again."""
    text = """\
region common
axes n=? t=? c=4096
input x: f32[n t c]
input w: f32[c]
s = sum[t c](x)
sub = sub(x, s)
mul = mul(sub, w)
output y: f32[n t c] = mul"""

    def jam(text: str) -> int:
        return together(cpp.generate(make_plan(parse(text))))

    assert jam(text) == 1
    assert jam(text.replace("sum[t c]", "sum[c]")) == 4


BIASED = f"""\
region biased
axes    b=? r=3 c={FOURFOLD}
input   x: f32[b r c]
sum     = sum[c](x)
mean    = div(sum, {FOURFOLD})
sub     = sub(x, mean)
sum_1   = sum[b](sub)
output  y: f32[b r c] = sub
output  bias: f32[r c] = sum_1"""


@by_threads
def test_rows_that_are_each_added_to_a_row_of_their_own(threads: int) -> None:
    """The gradient of a bias of every row, summed over what is outside of the rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for b in (0, 1, 5, 9):
            x = torch.randn(b, 3, FOURFOLD, generator=torch.Generator().manual_seed(b))
            kernel = Kernel(BIASED)
            assert kernel.launch((b,)) is not None, "it runs unfused: its code does not compile"
            y, bias = kernel([x], [b])
            exact = x.double() - x.double().mean(-1, keepdim=True)
            eager = x - x.mean(-1, keepdim=True)
            for found, own, right in ((y, eager, exact), (bias, eager.sum(0), exact.sum(0))):
                rounding = float((own - right).abs().max()) if b else 0.0
                torch.testing.assert_close(found.double(), right, rtol=0, atol=2 * rounding)
    finally:
        torch.set_num_threads(before)


def test_compiled_code_in_caches_is_of_one_kind_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide the traffic by which it was chosen what is fused."""
    keys = set()
    for whole_lines in (True, False):
        machine = replace(CPU, whole_lines=whole_lines)
        monkeypatch.setattr("normpass.backend.entry.machine_of", lambda _, found=machine: found)
        keys.add(fusion_pass().uuid())
    assert len(keys) == 2
