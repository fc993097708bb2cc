"""CUDA C++ whose teams have columns: its kernels compute on a CPU what their regions mean."""

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

from normpass.backend.program.machine import cuda_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.program.team import team_of
from normpass.benchmarks.gpu_cases import GpuCase
from normpass.passes.region_text import parse

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the threads of a GPU are fibers of Linux"
)

# A GPU; one of clusters of four small blocks; one without clusters.
MACHINES = {
    "H200": cuda_machine(90, columns=True),
    "small": replace(cuda_on_cpu.small(threads=64, blocks=4, of_thread=64), columns=True),
    "A100": cuda_machine(80, columns=True),
}
SHAPES = {"batch_norm": ((5, 32, 6, 6), (2, 48, 6, 7), (1, 128, 5, 5))}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "machine"), [*variants(SHAPES, MACHINES, channels_last=True)])
def test_norms(case: GpuCase, machine: str) -> None:
    for region in regions(case):
        plan = check(region, MACHINES[machine], f"{case.label}, {machine}")
        assert team_of(plan.launches[0]).across
        assert len(plan.launches) == 1


# Before an average over pixels: its gradient is the same for all pixels of an image.
POOLED = """
region batch_norm_backward
axes    n=3 c=32 d=2 e=3
input   g: bf16[n c]
input   off: b8[n c d e] (192, 1, 96, 32)
input   x: bf16[n c d e] (192, 1, 96, 32)
input   mean: f32[1 c 1 1]
input   rstd: f32[c]
input   w: f32[c]
div     = div(g, 6.0)
where   = where(off, 0.0, div)
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
mul     = mul(where, x_hat)
dw      = sum[n d e](mul)
db      = sum[n d e](where)
mul_1   = mul(rstd, w)
mean_1  = div(db, 18.0)
div_1   = div(dw, 18.0)
sub_1   = sub(where, mean_1)
mul_2   = mul(x_hat, div_1)
sub_2   = sub(sub_1, mul_2)
dx      = mul(sub_2, mul_1)
output  y0: f32[c] = dw
output  y1: f32[c] = db
output  y2: bf16[n c d e] (192, 1, 96, 32) = dx
"""


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_the_same_for_an_image(machine: str) -> None:
    plan = check(parse(POOLED.strip()), MACHINES[machine], machine)
    assert [axis.name for axis in plan.launches[0].inner] == ["n", "d_e"]
    assert len(plan.launches) == 1


BACKWARD = mathematics.channels_last(mathematics.batch_norm_backward)


@pytest.mark.parametrize("images", [1, 5, 8, 13])
def test_a_number_of_images_known_at_run_time(images: int) -> None:
    """A kernel for all numbers up to the next power of two."""
    for text, oracle in (
        (fill(regions_of.BATCH_NORM, c="32", x="r s c"), mathematics.batch_norm_channels_last),
        (fill(regions_of.BATCH_NORM_BACKWARD, c="32", x="r s c"), BACKWARD),
    ):
        region, classes = parse(text), size_classes((images,))
        kernel = cuda_on_cpu.kernel_of(region, MACHINES["H200"], classes)
        assert "const Row row(" in kernel.source.text
        compare(Case("batch norm", text, ((images,),), oracle), kernel, (images,), "cpu", oracle)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("crowded", [1, 2, 3])
def test_where_registers_do_not_suffice(crowded: int) -> None:
    """It is built again for threads with fewer numbers at a time, or fewer blocks at once."""
    case = GpuCase("batch_norm", (5, 32, 6, 6), "bfloat16", "backward", channels_last=True)
    for region in regions(case):
        check(region, MACHINES["H200"], case.label, crowded)


def test_two_channels() -> None:
    """What lies on chip beside the sums begins where vectors do."""
    text = fill(regions_of.BATCH_NORM, c="2", r="3", x="r s c")
    check(parse(text), MACHINES["A100"], "two channels")


@pytest.mark.parametrize(
    ("shape", "columns", "blocks"),
    [
        ((32, 512, 28, 28), 32, 8),  # as many as eight blocks hold
        ((32, 1024, 14, 14), 64, 8),  # a line of memory
        ((4, 64, 8, 8), 64, 1),  # few rows
    ],
)
def test_what_a_team_has(shape: tuple[int, ...], columns: int, blocks: int) -> None:
    (region,) = regions(GpuCase("batch_norm", shape, "bfloat16", "forward", channels_last=True))
    team = team_of(make_plan(region, MACHINES["H200"]).launches[0])
    assert (team.across * team.lanes, team.blocks) == (columns, blocks)


@pytest.mark.parametrize("examples", [pytest.param(300, marks=pytest.mark.sweep), 4])
def test_random_regions(examples: int) -> None:
    found = cuda_random.random_kernels(
        examples,
        MACHINES,
        lambda launch: team_of(launch).across,
        random_regions.columned_cases,
    )
    assert len(found) == examples
    for case, machine in found:
        cuda_random.check(case, MACHINES[machine], machine)


def test_snapshot() -> None:
    case = GpuCase("batch_norm", (32, 512, 28, 28), "bfloat16", "backward", channels_last=True)
    assert_text("batch_norm_backward_channels_last", case, MACHINES["H200"])
