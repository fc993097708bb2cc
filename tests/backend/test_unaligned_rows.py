"""Rows that begin anywhere in memory and are written past the caches: whole vectors begin where
memory is aligned. Which loops are, and right results for every length of a row.

The reference is float64 mathematics from primitives; the error allowed is eager's own.
"""

from __future__ import annotations

import oracles
import pytest
import torch

from normpass.backend.codegen import cpp
from normpass.backend.program.plan import make_plan
from normpass.backend.run.runtime import Kernel
from normpass.passes.region_text import parse

# What stands beside whole vectors: half precision, truth values, and tensors that lie across, with
# rows that are neighbours in memory or not.
MIXED = """\
region mixed
axes    r=? c=?
input   x: f32[r c]
input   h: bf16[r c]
input   k: b8[r c]
input   across: f32[c r]
input   w: f32[c]
sum     = sum[c](x)
sub     = sub(x, sum)
mul     = mul(sub, h)
add     = add(mul, across)
exp     = exp(w)
scaled  = mul(add, exp)
where   = where(k, scaled, -1.0)
total   = sum[r](where)
output  y: f32[r c] = where
output  y_1: bf16[r c] = add
output  y_2: f32[c r] = scaled
output  y_3: f32[c] = total"""
LENGTHS = (*range(1, 35), 47, 48, 49, *range(126, 146))


@pytest.mark.parametrize("neighbours", [True, False], ids=["neighbours", "apart"])
@pytest.mark.parametrize("past_caches", [True, False], ids=["past caches", "cached"])
def test_every_length_of_a_row(
    past_caches: bool, neighbours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one lane to two vectors, and from seven vectors to nine; each row begins somewhere
    else.
    """
    own_cache = 0 if past_caches else 1 << 40
    monkeypatch.setattr("normpass.backend.run.runtime.private_cache", lambda: own_cache)
    text = MIXED if neighbours else MIXED.replace("f32[c r]", "f32[c r] (64, 2)")
    kernel = Kernel(text)
    assert ("each_aligned<scalar>(p_y + " in kernel.source) is not neighbours
    assert ("load_rows<scalar>(across, " in kernel.source) is neighbours
    assert ("store_rows(p_y_2 + " in kernel.source) is neighbours
    generator = torch.Generator().manual_seed(0)
    found: list[list[tuple[torch.Tensor, ...]]] = [[], [], [], []]
    for rows in (1, 19):
        for length in LENGTHS:
            x, h, across = (torch.randn(rows, length, generator=generator) for _ in range(3))
            strides = (rows, 1) if neighbours else (64, 2)
            across = torch.empty_strided((length, rows), strides).copy_(across.t())
            h, w = h.bfloat16(), x[0].clone()
            keep = torch.rand(rows, length, generator=generator) < 0.5

            def results(
                x: torch.Tensor, h: torch.Tensor, across: torch.Tensor, w: torch.Tensor
            ) -> list[torch.Tensor]:
                added = (x - x.sum(1, keepdim=True)) * h + across.t()
                scaled = added * w.exp()
                where = torch.where(keep, scaled, -1.0)  # noqa: B023
                return [where, added, scaled.t(), where.sum(0)]

            ours = kernel([x, h, keep, across, w], [rows, length])
            eager = results(x, h.float(), across, w)
            eager[1] = eager[1].bfloat16()
            exact = results(x.double(), h.double(), across.double(), w.double())
            for k, tensors in enumerate(zip(ours, eager, exact, strict=True)):
                assert tensors[0].shape == tensors[2].shape
                found[k].append(tuple(tensor.flatten() for tensor in tensors))
    for k, runs in enumerate(found):  # together: a row may be more exact by chance
        mine, other, right = (torch.cat(column) for column in zip(*runs, strict=True))
        oracles.assert_no_less_accurate(mine, other, right, f"result {k}")


CENTRED = """\
region centred
axes    r=? c={width}
input   x: {dtype}[r c]
sum     = sum[c](x)
mean    = div(sum, {width})
sub     = sub(x, mean)
output  y: {dtype}[r c] = sub"""
ADDED = """
total   = sum[r](sub)
output  y_1: {dtype}[c] = total"""


def aligned(text: str) -> bool:
    return "each_aligned" in cpp.generate(make_plan(parse(text)))


@pytest.mark.parametrize("width", [197, 333, 1000])
def test_as_exact_as_eager(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written past the caches or not, results are the same to the last bit."""
    kernel = Kernel((CENTRED + ADDED).format(width=width, dtype="f32"))
    assert ("each_aligned" in kernel.source) is (width >= 512)
    x = torch.randn(300, width, generator=torch.Generator().manual_seed(width)) + 3
    found = []
    for own_cache in (0, 1 << 40):
        monkeypatch.setattr(
            "normpass.backend.run.runtime.private_cache", lambda own_cache=own_cache: own_cache
        )
        kernel._launches.clear()
        found.append(kernel([x], [300]))
        exact = x.double() - x.double().mean(1, keepdim=True)
        eager = x - x.mean(1, keepdim=True)
        oracles.assert_no_less_accurate(found[-1][0], eager, exact, "y")
        oracles.assert_no_less_accurate(found[-1][1], eager.sum(0), exact.sum(0), "total")
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("width", "dtype", "added", "expected"),
    [
        (1000, "f32", False, True),
        (1000, "f32", True, True),
        (1008, "f32", False, False),  # rows of whole vectors
        (130, "f32", False, True),
        (120, "f32", False, False),  # too short
        (520, "f32", True, True),
        (500, "f32", True, False),  # what the row before has added has to be waited for
        (1000, "bf16", False, False),  # two vectors a line
        (1000, "f64", False, False),  # not written past the caches
        ("?", "f32", False, True),
    ],
)
def test_which_rows_are_aligned(width: int | str, dtype: str, added: bool, expected: bool) -> None:
    text = (CENTRED + ADDED if added else CENTRED).replace("div(sum, {width})", "div(sum, 3.0)")
    assert aligned(text.format(width=width, dtype=dtype)) is expected
