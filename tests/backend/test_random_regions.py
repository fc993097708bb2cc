"""Random regions on the CPU: the kernel and the unfused path, each against an evaluation of its own
in float64.

The regions are pointwise programs with inner and outer reductions over one to four axes; see
random_regions.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import bounded
import pytest
import random_regions
import torch
from hypothesis import HealthCheck, assume, given, settings
from numpy_dialect import SMALL_BLOCKS

from normpass.backend.program.machine import CPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.run import reference, runtime
from normpass.passes.region import REGROUP, verify
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.backend.program.machine import Machine

QUIET = {
    "deadline": None,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
}


@pytest.fixture(autouse=True)
def _many_workers(monkeypatch: pytest.MonkeyPatch):
    """Several workers share even small work, so that shares and partial results are tested."""
    monkeypatch.setattr(runtime, "ELEMENTS_PER_WORKER", 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


def check(case: random_regions.Case) -> None:
    region = case.region
    verify(region)
    text = str(region)
    assert parse(text) == region
    for extents in case.extents:
        sizes = case.sizes(extents)
        kernel = runtime.Kernel(text, size_classes(sizes))
        inputs = random_regions.tensors(case, extents)
        expected = bounded.evaluate(region, inputs, sizes)
        known = region.extents(sizes)
        results = {
            "kernel": kernel(inputs, sizes),
            "unfused": reference.evaluate(region, inputs, sizes),
            "out of place": None if region.joins else reference.out_of_place(region, inputs, sizes),
        }
        assert kernel._function is not None, f"the kernel was not built:\n{text}\n{kernel.source}"
        for path, tensors in results.items():
            if tensors is None:
                continue  # parts of a tensor
            for output, result, want in zip(region.outputs, tensors, expected, strict=True):
                what = f"{path}, {output.buffer.name}, sizes {extents}\n{text}\n"
                assert result.dtype is output.buffer.dtype
                if path != "out of place":
                    assert result.stride() == region.strides(output.buffer, known), what
                bounded.assert_within(result, want, what)


def check_regrouped(case: random_regions.Case) -> None:
    assume(any(op.fn == REGROUP for op in make_plan(case.region).region.ops))
    check(case)


@settings(max_examples=6, derandomize=True, **QUIET)
@given(random_regions.cases())
def test_random_regions(case: random_regions.Case) -> None:
    check(case)


@pytest.fixture
def _sums_last(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However few sums there are, each worker has some of them whole."""
    yield from on(replace(CPU, workers=1, partial=0), monkeypatch)


@pytest.fixture(params=[0, 100], ids=["", "few lanes"])
def _small_blocks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """However short rows are, they are in blocks."""
    yield from on(replace(CPU, blocking=replace(SMALL_BLOCKS, narrow=request.param)), monkeypatch)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are planned for a machine."""
    monkeypatch.setattr(runtime, "machine_of", lambda _: machine)
    runtime.print_kernel.cache_clear()
    yield
    runtime.print_kernel.cache_clear()


@pytest.mark.usefixtures("_sums_last")
@settings(max_examples=6, derandomize=True, **QUIET)
@given(random_regions.cases())
def test_random_regions_with_sums_added_up_last(case: random_regions.Case) -> None:
    check(case)


@pytest.mark.usefixtures("_small_blocks")
@settings(max_examples=5, derandomize=True, **QUIET)
@given(random_regions.chained_cases())
def test_random_chains_in_blocks(case: random_regions.Case) -> None:
    check(case)


@pytest.mark.sweep
@pytest.mark.usefixtures("_small_blocks")
@settings(max_examples=200, print_blob=True, **QUIET)
@given(random_regions.chained_cases() | random_regions.cases())
def test_many_random_regions_in_blocks(case: random_regions.Case) -> None:
    check(case)


@settings(max_examples=6, derandomize=True, **QUIET)
@given(random_regions.grouped_cases())
def test_random_groups(case: random_regions.Case) -> None:
    check_regrouped(case)


@pytest.mark.sweep
@settings(max_examples=200, print_blob=True, **QUIET)
@given(random_regions.grouped_cases())
def test_many_random_groups(case: random_regions.Case) -> None:
    check_regrouped(case)


@pytest.mark.sweep
@settings(max_examples=400, print_blob=True, **QUIET)
@given(random_regions.cases())
def test_many_random_regions(case: random_regions.Case) -> None:
    check(case)
