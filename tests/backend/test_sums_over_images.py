"""Sums over images that leave many numbers, as the gradient of a bias of attention's scores: a
worker has some of them whole, a row at a time, and no part of all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normpass.backend.program.plan import make_plan
from normpass.backend.program.tree import Finish, walk
from normpass.backend.run.runtime import Kernel
from normpass.passes.region_text import parse

TEXT = """\
region softmax_backward
axes    r={images} q=4 n={rows} c={row}
input   x: {dtype}[r q n c]
input   g: {dtype}[(r q) n c]
mul     = mul(g, x)
sum     = sum[c](mul)
product = mul(x, sum)
sub     = sub(mul, product)
bias    = sum[r](sub)
output  y0: {dtype}[r q n c] = sub
output  y1: {dtype}[1 q n c] = bias
"""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
MANY, FEW = (64, 100), (2, 100)


def text(images: Any = 3, rows: int = MANY[0], row: int = MANY[1], dtype: str = "f32") -> str:
    return TEXT.format(images=images, rows=rows, row=row, dtype=dtype)


def order(region: str) -> list[str]:
    return [axis.name for axis in make_plan(parse(region)).axes]


def has_partial_sums(region: str) -> bool:
    nodes = [node for top in make_plan(parse(region)).body for node in walk(top)]
    return any(isinstance(node, Finish) and node.accumulator.shared for node in nodes)


def test_many_sums_are_added_up_a_row_at_a_time() -> None:
    assert order(text()) == ["q_n", "r", "c"]
    assert not has_partial_sums(text())


def test_few_sums_are_added_up_in_the_order_of_memory() -> None:
    assert order(text(rows=FEW[0])) == ["r", "q_n", "c"]
    assert has_partial_sums(text(rows=FEW[0]))


def test_few_rows_are_too_little_work_each() -> None:
    """Of one long row for each image only one worker would be busy."""
    region = text(rows=1, row=20_000).replace("q=4", "q=1")
    assert order(region)[0] == "r"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [MANY[0], FEW[0]])
@pytest.mark.parametrize("images", [1, 5, "?"])
def test_they_are_right(images: Any, rows: int, dtype: str) -> None:
    torch.manual_seed(0)
    kernel = Kernel(text(images, rows, dtype=dtype))
    for count in (2, 5) if images == "?" else (images,):
        shape = (count, 4, rows, MANY[1])
        x = torch.randn(shape).softmax(-1).to(DTYPES[dtype])
        g = torch.randn(shape).to(DTYPES[dtype])
        sizes = [count] if images == "?" else []
        found = kernel([x, g.flatten(0, 1)], sizes)
        wide, slope = x.double(), g.double()
        dx = slope * wide - wide * (slope * wide).sum(-1, keepdim=True)
        for ours, right in zip(found, (dx, dx.sum(0, keepdim=True)), strict=True):
            # Half precision is computed in float32 and rounded once.
            exact = torch.float64 if dtype == "f64" else torch.float32
            share, least = (torch.finfo(d).eps for d in (DTYPES[dtype], exact))
            torch.testing.assert_close(ours.double(), right, rtol=share, atol=4 * least)
