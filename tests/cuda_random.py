"""Random regions that are written in CUDA C++, and what their kernels compute on a CPU."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import cuda_on_cpu
import random_regions
from bounded import assert_within, evaluate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.plan import make_plan
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.tree import Launch

# More elements are too many for threads that take turns.
MOST = 20_000


def random_kernels(
    count: int,
    machines: Mapping[str, Machine],
    is_wanted: Callable[[Launch], object],
    cases: Callable[[], st.SearchStrategy[random_regions.Case]] = random_regions.cases,
) -> list[tuple[random_regions.Case, str]]:
    """The first so many of a row of random regions of which some launch is wanted, and machines."""
    found: list[tuple[random_regions.Case, str]] = []

    @settings(
        max_examples=100 * count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(), st.sampled_from(sorted(machines)))
    def collect(case: random_regions.Case, machine: str) -> None:
        if len(found) < count:
            with suppress(UnsupportedPlanError):
                plan = make_plan(case.region, machines[machine])
                if any(is_wanted(launch) for launch in plan.launches):
                    found.append((case, machine))

    collect()
    return found


def check(case: random_regions.Case, machine: Machine, what: str) -> None:
    """A kernel computes what its region means, for all of the case's sizes."""
    kernel = cuda_on_cpu.kernel_of(case.region, machine)
    for extents in case.extents:
        if product(extents.values()) > MOST:
            continue
        sizes = case.sizes(extents)
        inputs = random_regions.tensors(case, extents)
        expected = evaluate(case.region, inputs, sizes)
        for output, ours, want in zip(
            case.region.outputs, kernel(inputs, sizes), expected, strict=True
        ):
            where = f"{output.buffer.name}, sizes {extents}, {what}\n{case.region}\n"
            assert_within(ours, want, where)
