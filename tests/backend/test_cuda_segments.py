"""CUDA C++ whose rows lie along two axes: its kernels compute on a CPU what their regions mean."""

from __future__ import annotations

import sys
from dataclasses import replace

import cuda_on_cpu
import cuda_random
import pytest
import random_regions
import triton_oracles as mathematics
import triton_regions as regions_of
from compared import compare
from cuda_norms import assert_text, check, regions, variants
from triton_cases import Case
from triton_regions import fill

from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.machine import cuda_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.program.team import team_of
from normpass.benchmarks.gpu_cases import GpuCase
from normpass.passes.region_text import parse

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


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("case", "machine"), [*variants(SHAPES, MACHINES)])
def test_norms(case: GpuCase, machine: str) -> None:
    for region in regions(case):
        plan = check(region, MACHINES[machine], f"{case.label}, {machine}")
        assert len(plan.launches[0].inner) == 2


def test_bands_of_several_warps() -> None:
    machine = cuda_on_cpu.small(threads=128, blocks=1, of_thread=32)
    (region,) = regions(GpuCase("group_norm", (2, 64, 30, 30), "float32", "backward"))
    team = team_of(check(region, machine, "bands of several warps").launches[0])
    assert team.bands > 1
    assert team.exchange_of_bands


def test_bands_without_a_segment() -> None:
    """In the last turn: nothing of theirs is added or written."""
    (region,) = regions(GpuCase("group_norm", (2, 160, 8, 8), "float32", "backward"))
    team = team_of(check(region, MACHINES["warps"], "bands without a segment").launches[0])
    assert team.blocks * team.bands * team.turns > 5


# The first loop over segments is over what an earlier launch has left of each, without elements. Of
# the other one a sum of largest elements is not the largest of anything.
KEPT = """
region kept
axes    r=5 q=2 c=3 d=64
input   x: f32[r q c d]
most    = amax[r d](x)
of_most = sum[c](most)
largest = amax[d](x)
of_all  = sum[c](largest)
less    = sub(x, of_most)
y       = mul(less, of_all)
output  out: f32[r q c d] = y
"""


@pytest.mark.parametrize("machine", MACHINES)
def test_values_of_segments(machine: str) -> None:
    plan = check(parse(KEPT.strip()), MACHINES[machine], machine)
    assert [len(launch.inner) for launch in plan.launches] == [2, 0, 2]


POSITIONS = """
region positions
axes    r=40 q=2 c=3 d=64
input   x: f32[r q c d]
mean    = sum[c d](x)
y       = sub(x, mean)
places  = sum[r c](y)
output  out: f32[r q c d] = y
output  sums: f32[q d] = places
"""


def test_sums_over_segments_and_rows_are_refused() -> None:
    """Each band would have a part of its own of them; without that sum there is a kernel."""
    region = parse(POSITIONS.strip())
    with pytest.raises(UnsupportedPlanError, match="expected sums along all of a row"):
        make_plan(region, MACHINES["H200"])
    assert not gpu_machine(region, (), 90).clusters
    without = replace(region, ops=region.ops[:-1], outputs=region.outputs[:-1])
    check(without, MACHINES["H200"], "without that sum")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("images", [1, 5, 8, 13])
def test_a_number_of_images_known_at_run_time(images: int) -> None:
    """A kernel for all numbers up to the next power of two."""
    for text, oracle in (
        (fill(regions_of.BATCH_NORM, c="40", v="20", x="r c s"), mathematics.batch_norm),
        (fill(regions_of.BATCH_NORM_BACKWARD, c="40", x="r c s"), mathematics.batch_norm_backward),
    ):
        region, classes = parse(text), size_classes((images,))
        kernel = cuda_on_cpu.kernel_of(region, MACHINES["H200"], classes)
        assert "const Row row(n_r);" in kernel.source.text
        compare(Case("batch norm", text, ((images,),), oracle), kernel, (images,), "cpu", oracle)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("crowded", [1, 2, 3])
def test_where_registers_do_not_suffice(crowded: int) -> None:
    """It is built again for threads with fewer numbers at a time, or fewer blocks at once."""
    case = GpuCase("group_norm", (2, 96, 8, 8), "bfloat16", "backward")
    for region in regions(case):
        check(region, MACHINES["H200"], case.label, crowded)


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


@pytest.mark.parametrize("examples", [pytest.param(300, marks=pytest.mark.sweep), 4])
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
    assert_text(file, case, MACHINES["H200"])
