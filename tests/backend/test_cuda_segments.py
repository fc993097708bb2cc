"""CUDA C++ whose rows lie along two axes: its kernels compute on a CPU what their regions mean."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import cuda_on_cpu
import cuda_random
import numpy as np
import pytest
import random_regions
import torch
from bounded import assert_within, evaluate
from compared import make_inputs
from snapshots import assert_snapshot
from triton_cases import Case

from normpass.backend.codegen.cuda import generate
from normpass.backend.program.listing import listing
from normpass.backend.program.machine import cuda_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.team import team_of
from normpass.benchmarks.gpu_cases import GpuCase
from normpass.benchmarks.gpu_graphs import fused_graphs
from normpass.benchmarks.roofline import H200
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.passes.region import Region

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the threads of a GPU are fibers of Linux"
)

# A GPU; one whose bands are warps, in several blocks; one with bands of several warps, that has a
# row at a time.
MACHINES = {
    "H200": cuda_machine(90),
    "warps": cuda_on_cpu.small(threads=64, blocks=4, of_thread=16),
    "bands": cuda_on_cpu.small(threads=128, blocks=2, of_thread=32, shared=16_000),
}
# Groups of 3 channels, of whose 64 pixels each has as many as a thread, or not; channels of 5
# images.
SHAPES = {
    "group_norm": ((2, 96, 8, 8), (3, 96, 12, 6), (2, 64, 30, 30)),
    "batch_norm": ((5, 32, 12, 12), (2, 40, 6, 6)),
}


def regions(case: GpuCase) -> Iterator[Region]:
    """What is fused in a case on a GPU."""
    torch._dynamo.reset()
    for graph in fused_graphs(case, H200, least_bytes=0):
        yield from (parse(each.text) for each in graph.decisions if isinstance(each, Fused))


def check(region: Region, machine: str, name: str) -> None:
    """A kernel computes what its region means, as exactly as its arithmetic allows."""
    kernel = cuda_on_cpu.kernel_of(region, MACHINES[machine])
    rows = kernel.plan.launches[0]
    assert len(rows.inner) == 2
    inputs = [
        *make_inputs(Case(name, str(region), ((),), tuple), region, region.extents(())).values()
    ]
    for output, ours, want in zip(
        region.outputs, kernel(inputs, ()), evaluate(region, inputs, ()), strict=True
    ):
        assert np.isfinite(want.error).all()
        assert_within(ours, want, f"{output.buffer.name}, {machine}\n{region}\n")


def variants() -> Iterator[object]:
    """All are a sweep; every time each phase runs on each machine, in some type and shape."""
    phases = ("forward", "backward", "double backward")
    for norm, (p, phase), (m, machine) in itertools.product(
        SHAPES, enumerate(phases), enumerate(MACHINES)
    ):
        for (s, shape), (d, dtype) in itertools.product(
            enumerate(SHAPES[norm]), enumerate(("bfloat16", "float32"))
        ):
            is_short = (p + m) % len(SHAPES[norm]) == s and (p + m) % 2 == d
            marks = [] if is_short else [pytest.mark.sweep]
            name = f"{'x'.join(map(str, shape))} {dtype}"
            case = GpuCase(norm, shape, dtype, phase)
            yield pytest.param(case, machine, marks=marks, id=f"{norm} {phase} {name} {machine}")


@pytest.mark.parametrize(("case", "machine"), [*variants()])
def test_norms(case: GpuCase, machine: str) -> None:
    for region in regions(case):
        check(region, machine, case.label)


def test_what_bands_have() -> None:
    """A segment for each warp, or several warps for each; in turns where there are more."""
    (region,) = regions(GpuCase("group_norm", (8, 320, 64, 64), "bfloat16", "forward"))
    team = team_of(make_plan(region, MACHINES["H200"]).launches[0])
    assert team.blocks * team.bands * team.turns >= 10
    assert team.threads // team.bands * team.vectors * team.lanes == 4096
    (region,) = regions(GpuCase("batch_norm", (256, 256, 56, 56), "bfloat16", "forward"))
    team = team_of(make_plan(region, MACHINES["H200"]).launches[0])
    assert team.blocks * team.bands * team.turns == 256
    assert team.elements <= 1.15 * 256 * 3136 / team.blocks


@pytest.mark.parametrize("examples", [pytest.param(200, marks=pytest.mark.sweep), 8])
def test_random_regions(examples: int) -> None:
    found = cuda_random.random_kernels(
        examples,
        MACHINES,
        lambda launch: len(launch.inner) == 2,
        random_regions.segmented_cases,
    )
    assert len(found) == examples
    for case, machine in found:
        cuda_random.check(case, MACHINES[machine], machine)


@pytest.mark.parametrize(
    ("file", "case"),
    [
        ("group_norm_backward", GpuCase("group_norm", (8, 320, 64, 64), "bfloat16", "backward")),
        ("batch_norm", GpuCase("batch_norm", (64, 256, 56, 56), "bfloat16", "forward")),
    ],
)
def test_snapshot(file: str, case: GpuCase) -> None:
    (region,) = regions(case)
    plan = make_plan(region, MACHINES["H200"])
    text = "".join(f"// {line}\n" for line in listing(plan).splitlines())
    assert_snapshot(f"cuda/{file}.txt", f"{text}\n{generate(plan).text}")
