"""CUDA C++ whose teams have groups of columns: its kernels compute on a CPU what regions mean."""

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
from normpass.backend.program.machine import GPU, cuda_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.program.team import roomier, shared_bytes, team_of
from normpass.benchmarks.gpu_cases import GpuCase
from normpass.passes.region_text import parse

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the threads of a GPU are fibers of Linux"
)

# A GPU; one of clusters of four small blocks, whose threads have much to do; one that has no room
# for a second image.
MACHINES = {
    "H200": cuda_machine(90, columns=True),
    "small": replace(cuda_on_cpu.small(threads=192, blocks=4, of_thread=64), columns=True),
    "one": replace(
        cuda_on_cpu.small(threads=160, blocks=2, of_thread=64, shared=16_000), columns=True
    ),
}
# Groups of ten channels, two to a thread; of four, one thread's; of 24, three to a line.
SHAPES = {"group_norm": ((2, 320, 4, 5), (3, 128, 5, 5), (2, 768, 3, 2))}


# Where eager mode leaves the gradient of the result its channels are first: see MODULATED.
PHASES = ("forward", "double backward")


@pytest.mark.parametrize(
    ("case", "machine"), [*variants(SHAPES, MACHINES, channels_last=True, phases=PHASES)]
)
def test_norms(case: GpuCase, machine: str) -> None:
    for region in regions(case):
        plan = check(region, MACHINES[machine], f"{case.label}, {machine}")
        assert team_of(plan.launches[0]).group


# The backward of a group norm whose images have a scale and a shift of their own, and whose pixels
# have a mask.
MODULATED = """
region group_norm_backward
axes    r={r} q=4 c={c} d=5 e=3
input   g: bf16[r (q c) d e] ({image}, 1, {line}, {pixel})
input   x: bf16[r (q c) d e] ({image}, 1, {line}, {pixel})
input   mean: f32[r q]
input   rstd: f32[r q]
input   scale: bf16[r (q c)]
input   w: f32[(q c)]
input   off: b8[r d e]
where   = where(off, 0.0, g)
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
one     = add(scale, 1.0)
mul     = mul(where, x_hat)
sum     = sum[d e](where)
sum_1   = sum[d e](mul)
dscale  = mul(sum_1, w)
both    = mul(one, w)
mul_1   = mul(sum, both)
sum_2   = sum[c](mul_1)
mul_2   = mul(sum_1, both)
sum_3   = sum[c](mul_2)
mul_3   = mul(where, both)
div     = div(sum_2, {count}.0)
div_1   = div(sum_3, {count}.0)
sub_1   = sub(mul_3, div)
mul_4   = mul(x_hat, div_1)
sub_2   = sub(sub_1, mul_4)
dx      = mul(rstd, sub_2)
mul_5   = mul(sum_1, one)
dw      = sum[r](mul_5)
output  y0: bf16[r (q c) d e] ({image}, 1, {line}, {pixel}) = dx
output  y1: f32[(q c)] = dw
output  y2: bf16[r (q c)] = dscale
"""


def modulated(images: int, channels: int, text: str = MODULATED) -> str:
    pixel = 4 * channels
    sizes = {"line": 3 * pixel, "image": 15 * pixel, "pixel": pixel}
    sizes |= {f"{name}2": 2 * size for name, size in sizes.items()}
    sizes |= {"count": 15 * channels, "odd": 15 * pixel + 1}
    return text.strip().format(r=images, c=channels, **sizes)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("channels", [8, 20])
def test_images_with_scales_of_their_own(channels: int, machine: str) -> None:
    plan = check(parse(modulated(9, channels)), MACHINES[machine], machine)
    assert team_of(plan.launches[0]).group == channels // team_of(plan.launches[0]).lanes


def test_teams_of_several_blocks() -> None:
    for region in regions(GpuCase("group_norm", (3, 320, 16, 10), "bfloat16", "forward", True)):
        plan = check(region, MACHINES["small"], "several blocks")
        assert team_of(plan.launches[0]).group
        assert team_of(plan.launches[0]).blocks > 1


# Sums along a group's columns right after each other.
CHAIN = """
region group_norm
axes    r=9 q=4 c=20 d=5 e=3
input   x: bf16[r (q c) d e] (1200, 1, 240, 80)
sum     = sum[d e](x)
sum_1   = sum[c](sum)
less    = sub(sum, sum_1)
square  = mul(less, less)
sum_2   = sum[c](square)
third   = div(square, sum_2)
most    = amax[c](third)
y       = mul(x, most)
output  y0: bf16[r (q c) d e] (1200, 1, 240, 80) = y
"""


def test_sums_along_a_group_after_each_other() -> None:
    plan = check(parse(CHAIN.strip()), MACHINES["H200"], "chain")
    assert team_of(plan.launches[0]).group > 1


@pytest.mark.parametrize("phase", PHASES)
def test_one_image(phase: str) -> None:
    for region in regions(GpuCase("group_norm", (1, 320, 4, 5), "bfloat16", phase, True)):
        plan = check(region, MACHINES["H200"], phase)
        assert team_of(plan.launches[0]).group


@pytest.mark.one_in(2)
@pytest.mark.parametrize("crowded", [1, 2, 3])
def test_where_registers_do_not_suffice(crowded: int) -> None:
    """It is built again for threads with fewer numbers at a time, or fewer blocks at once."""
    plan = check(parse(modulated(9, 24)), MACHINES["H200"], "crowded", crowded)
    assert team_of(plan.launches[0]).group


BACKWARD = mathematics.channels_last(mathematics.group_norm_backward)


@pytest.mark.parametrize("images", [11, 16, 40])
@pytest.mark.parametrize("pixels", ["35", "?"])
def test_sizes_known_at_run_time(images: int, pixels: str) -> None:
    """A kernel for all numbers of pixels up to the next power of two."""
    text = fill(regions_of.GROUP_NORM_BACKWARD, c="12", x="r s (g d)")
    text = text.replace("s=35", f"s={pixels}")
    region, sizes = parse(text), (images, 35)[: 1 + (pixels == "?")]
    kernel = cuda_on_cpu.kernel_of(region, MACHINES["H200"], size_classes(sizes))
    assert team_of(kernel.plan.launches[0]).group == 3
    assert ("const Row row(" in kernel.source.text) == (pixels == "?")
    for count in (35, 64, 33) if pixels == "?" else (35,):
        given = (images, count)[: len(sizes)]
        case = Case("group norm", text, (given,), BACKWARD)
        compare(case, kernel, given, "cpu", BACKWARD)


# What is not quite such a launch: what else stands in a line of the region, and what is found.
X = "x: bf16[r (q c) d e] ({image}, 1, {line}, {pixel})"
NEAR_MISSES = {
    "a gradient whose channels are first": (
        X.replace("x:", "g:"),
        "g: bf16[r (q c) d e]",
        "d_e of",
    ),
    "channels that lie apart": (
        X,
        "x: bf16[r (q c) d e] ({image2}, 2, {line2}, {pixel2})",
        "found one over c",
    ),
    "groups in channels' places": (
        X,
        "x: bf16[r q c d e] ({image}, 1, 4, {line}, {pixel})",
        "found one over c",
    ),
    "a sum over all groups": ("sum_3   = sum[c](", "sum_3   = sum[q c](", "Accumulate of each"),
    "images that begin in the middle of a vector": (
        X,
        "x: bf16[r (q c) d e] ({odd}, 1, {line}, {pixel})",
        "multiples of 4 bytes, found 2",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    before, after, found = NEAR_MISSES[name]
    assert before in MODULATED
    region = parse(modulated(9, 8, MODULATED.replace(before, after)))
    with pytest.raises(UnsupportedPlanError, match=found):
        make_plan(region, MACHINES["H200"])
    assert gpu_machine(region, (), 90) is GPU


def test_more_threads_side_by_side_need_no_more_room() -> None:
    """Threads that lack registers have half a vector each, and are twice as many (`roomier`)."""
    for name in ("H200", "small"):
        launch = make_plan(parse(modulated(9, 24)), MACHINES[name]).launches[0]
        room, lanes = shared_bytes(launch), team_of(launch).lanes
        while narrower := roomier(launch):
            launch = narrower
            assert shared_bytes(launch) <= room
        assert team_of(launch).lanes < lanes


@pytest.mark.parametrize(
    ("shape", "groups", "blocks", "stages"),
    [
        ((8, 320, 64, 64), 8, 8, 2),  # lines of 160 bytes, and the next image on its way
        ((8, 1280, 32, 32), 2, 8, 2),
        ((16, 128, 64, 64), 16, 8, 2),
        ((4, 64, 8, 8), 32, 1, 2),  # few rows
    ],
)
def test_what_a_team_has(shape: tuple[int, ...], groups: int, blocks: int, stages: int) -> None:
    (region,) = regions(GpuCase("group_norm", shape, "bfloat16", "forward", True))
    team = team_of(make_plan(region, MACHINES["H200"]).launches[0])
    assert (team.across // team.group, team.blocks, team.stages) == (groups, blocks, stages)


@pytest.mark.parametrize(("channels", "is_cuda"), [(128, True), (512, False)])
def test_where_programs_of_triton_would_read_slivers(channels: int, is_cuda: bool) -> None:
    """Eight bytes of a group are a quarter of what memory hands out, and 32 are all of it."""
    (region,) = regions(GpuCase("group_norm", (16, channels, 16, 16), "bfloat16", "forward", True))
    assert (gpu_machine(region, (), 90) is not GPU) == is_cuda


@pytest.mark.parametrize("examples", [pytest.param(300, marks=pytest.mark.sweep), 4])
def test_random_regions(examples: int) -> None:
    found = cuda_random.random_kernels(
        examples, MACHINES, lambda launch: team_of(launch).group, random_regions.beside_cases
    )
    assert len(found) == examples
    for case, machine in found:
        cuda_random.check(case, MACHINES[machine], machine)


def test_snapshot() -> None:
    case = GpuCase("group_norm", (8, 320, 64, 64), "bfloat16", "double backward", True)
    assert_text("group_norm_double_backward_channels_last", case, MACHINES["H200"])
