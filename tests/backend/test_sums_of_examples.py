"""Sums over the rows of each example, as the weight's gradients of vmapped and of modulated norms:
the rows of all are divided among workers, however few examples there are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import assert_no_less_accurate
from triton_oracles import modulated_backward
from triton_regions import MODULATED_BACKWARD, fill

from normpass.backend.codegen.cpp import generate
from normpass.backend.program.launches import with_launches
from normpass.backend.program.machine import CPU, GPU, Machine
from normpass.backend.program.plan import make_plan
from normpass.backend.run.runtime import Kernel
from normpass.passes.region import Region, product
from normpass.passes.region_text import parse

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
ROWS, WIDTH = 2000, 96  # sums of fewer than 1,024 numbers are not added up by parts


def region(examples: int | str = 4, rows: int = ROWS, width: int = WIDTH, t: str = "f32") -> str:
    return fill(MODULATED_BACKWARD, c=str(width), r=str(rows), t=t, v=str(examples))


def pieces(region: Region, machine: Machine) -> int:
    """Into how many pieces of work the first pass over memory can be divided."""
    return product(
        axis.hint for axis in with_launches(make_plan(region, machine)).launches[0].outer
    )


@pytest.mark.parametrize("examples", [1, 2, 7, 16, 64])
def test_rows_of_few_examples_are_divided_among_programs(examples: int) -> None:
    assert pieces(parse(region(examples)), GPU) == examples * ROWS


@pytest.mark.parametrize("examples", [1, 2, 7])
def test_rows_of_few_examples_are_divided_among_workers(examples: int) -> None:
    text = generate(make_plan(parse(region(examples))))
    assert "share(n_v * n_r, omp_get_num_threads(), worker)" in text


def test_enough_examples_are_divided_whole() -> None:
    """There each worker has all of an example's sums, and nothing has to be combined."""
    text = generate(make_plan(parse(region(CPU.workers))))
    assert "share(n_v, omp_get_num_threads(), worker)" in text
    assert ".combine()" not in text
    assert pieces(parse(region(GPU.workers)), GPU) == GPU.workers


def test_sums_too_many_for_a_part_of_each() -> None:
    wide = region(4, rows=2, width=2 * int(CPU.partial))
    assert ".combine()" not in generate(make_plan(parse(wide)))


def test_what_all_examples_share_is_added_up_beside() -> None:
    """A norm with a weight of its own, whose result is modulated for each example."""
    both = region(4).replace("output", "dshared = sum[v r](gx)\noutput", 1)
    both += f"\noutput  grad_shared: f32[{'c'}] = dshared"
    assert pieces(parse(both), GPU) == 4 * ROWS
    check(both, 4, "f32", shared=True)


def test_a_number_of_each_example_does_not_keep_its_rows_together() -> None:
    text = region(3, rows=50)
    text = text.replace("sub   ", "input   k: f32[v 1 1]\nsub   ", 1)
    text = text.replace("= dx\n", "= times\n").replace("output", "times = mul(dx, k)\noutput", 1)
    assert "share(n_v * n_r, omp_get_num_threads(), worker)" in generate(make_plan(parse(text)))
    g, x = torch.randn(2, 3, 50, WIDTH, dtype=torch.float64)
    w, mean, rstd = torch.randn(3, WIDTH), torch.randn(3, 50, 1), torch.ones(3, 50, 1)
    inputs = [t.double() for t in (g, w, x, mean, rstd)]
    k = torch.tensor([2.0, -1.0, 0.5]).view(3, 1, 1)
    dx, dw, db = modulated_backward(*inputs)
    single = [t.float() for t in (*inputs, k)]
    for found, right in zip(Kernel(text)(single, []), (dx * k, dw, db), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)


def check(text: str, examples: int, dtype: str, *, shared: bool = False, sizes: Any = ()) -> None:
    torch.manual_seed(0)
    kind = DTYPES[dtype]
    statistics = torch.float64 if dtype == "f64" else torch.float32
    g, x = (torch.randn(examples, ROWS, WIDTH).to(kind) for _ in range(2))
    w = torch.randn(examples, WIDTH).to(kind)
    mean, rstd = torch.randn(examples, ROWS, 1), torch.rand(examples, ROWS, 1) + 0.5
    inputs = [g, w, x, mean.to(statistics), rstd.to(statistics)]

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        found = modulated_backward(*(t.to(dtype) for t in inputs))
        return [*found, found[1].sum(0)] if shared else list(found)

    rows = Kernel(text)(inputs, sizes), gradients(statistics), gradients(torch.float64)
    for ours, theirs, exact in zip(*rows, strict=True):
        assert ours.dtype == kind
        assert_no_less_accurate(ours, theirs.to(kind), exact)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("examples", [1, 3, 5, 16])
def test_they_are_right(examples: int, dtype: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(region(examples, t=dtype), examples, dtype)
    finally:
        torch.set_num_threads(before)


def test_examples_whose_number_is_known_at_run_time() -> None:
    for examples in (2, 11):
        check(region("?"), examples, "f32", sizes=[examples])
