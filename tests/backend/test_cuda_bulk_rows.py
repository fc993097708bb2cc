"""CUDA C++ whose rows come by bulk copies: what its kernels compute on a CPU, where a copy is there
only for whoever waited for it, and what they take of a GPU.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import cuda_on_cpu
import cuda_random
import pytest
import random_regions
import torch
import triton_cases
import triton_oracles as mathematics
import triton_regions as regions
from compared import compare
from cuda_ahead import is_recorded, needs_nvrtc, resources
from snapshots import assert_snapshot
from triton_ahead import needs_triton
from triton_cases import Case
from triton_regions import fill

from normpass.backend.codegen.cuda import generate
from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.machine import GPU, cuda_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.team import team_of
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the threads of a GPU are fibers of Linux"
)

# A GPU; one whose rows take several blocks, of which the last may have nothing of a row; and one
# that has a row at a time.
MACHINES = {
    "H200": cuda_machine(90, bulk=True),
    "clusters": cuda_on_cpu.small(threads=32, blocks=4, of_thread=32, bulk=True),
    "one row": cuda_on_cpu.small(shared=1300, bulk=True),
}
# Rows that begin at multiples of 16 bytes.
CASES = {
    case.name: replace(case, text=case.text.replace("c=70", "c=96"))
    for case in triton_cases.norms()
}
# Of weights of four bytes beside elements of two a thread reads two pieces, which lie apart.
NAMES = (
    "layer_norm f32",
    "layer_norm_backward bf16",
    "layer_norm_backward bf16 with f32 weights",
    "rms_norm_backward f64",
    "softmax f16",
    "softmax_backward f32",
)
MASKED = Case("masked rows", fill(regions.MASKED, c="64"), ((5,),), mathematics.masked)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("case", [*(CASES[name] for name in NAMES), MASKED], ids=lambda c: c.name)
def test_kernels_compute_what_their_regions_mean(case: Case, machine: str) -> None:
    with suppress(UnsupportedPlanError):  # of machines that are too small
        kernel = cuda_on_cpu.kernel_of(parse(case.text), MACHINES[machine])
        assert machine != "H200" or "arrivals.wait(" in kernel.source.text
        for sizes in (*case.sizes, (40,)):
            compare(case, kernel, sizes, "cpu", case.oracle)
        return
    assert machine != "H200"


@pytest.mark.parametrize(("c", "t", "blocks"), [("65536", "bf16", 4), ("12300", "f32", 2)])
def test_long_rows(c: str, t: str, blocks: int) -> None:
    text, oracle = fill(regions.LAYER_NORM_BACKWARD, c=c, t=t), mathematics.layer_norm_backward
    kernel = cuda_on_cpu.kernel_of(parse(text), MACHINES["H200"])
    team = team_of(kernel.source.kernels[0].launch)
    assert team.blocks == blocks
    assert team.bulk
    compare(Case(c, text, ((7,),), oracle), kernel, (7,), "cpu", oracle)


@pytest.mark.parametrize("examples", [pytest.param(300, marks=pytest.mark.sweep), 4])
def test_random_regions(examples: int) -> None:
    kernels = cuda_random.random_kernels(
        examples,
        MACHINES,
        lambda launch: launch.inner and team_of(launch).bulk,
        random_regions.rowed_cases,
    )
    assert len(kernels) == examples
    for case, machine in kernels:
        cuda_random.check(case, MACHINES[machine], machine)


def test_rows_that_begin_elsewhere_are_copied_first() -> None:
    """Bulk copies begin at multiples of 16, however narrow the vectors of a thread become."""
    text = fill(regions.SOFTMAX, c="64", t="f16")
    for crowded in (0, 1):
        kernel = cuda_on_cpu.kernel_of(parse(text), MACHINES["H200"], crowded=crowded)
        for begin in (1, 4):
            x = torch.randn(5 * 64 + begin).half()[begin:].view(5, 64)
            (y,) = kernel([x], [5])
            torch.testing.assert_close(y, torch.softmax(x.float(), 1).half())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("text", "instead", "found"),
    [
        ("arrivals.wait(stage, parity);", "", "ended before a copy had come"),
        (
            "arrivals.wait(stage, parity);",
            "arrivals.wait(stage, 0);",
            "ended before a copy had come",
        ),
        (
            "arrivals.wait(stage, parity);",
            "arrivals.wait(stage, 1 - parity);",
            "ended before a copy had come",
        ),
        ("device::block_barrier();  // all have read it", "", "not close"),
        ("if (threadIdx.x == 0 && number + 2 < last)", "if (false)", "wait for different things"),
        ("arrivals.expect(stage, 4", "arrivals.expect(stage, 8", "other bytes come"),
        (
            "const Arrivals<2> arrivals(chip + ",
            "const Arrivals<2> arrivals(chip + 4096 + ",
            "beyond",
        ),
        ("+ row.begin(), stage", "+ row.begin() + 1, stage", "does not begin at a multiple"),
    ],
)
def test_faults_are_found(text: str, instead: str, found: str) -> None:
    """A kernel that is wrong on a GPU is wrong here."""
    said = cuda_on_cpu.said_of_a_fault(
        text, instead, 512, threads=64, blocks=2, of_thread=16, bulk=True
    )
    assert found in said, said


# ---- which launches, and what they take


@pytest.mark.parametrize(("capability", "is_bulk"), [(80, False), (90, True), (100, True)])
def test_gpus_that_have_bulk_copies(capability: int, is_bulk: bool) -> None:
    text = fill(regions.LAYER_NORM_BACKWARD, c="1024", t="bf16", w="f32")
    asked = parse(text.replace("\ninput", "\ndialect cuda_bulk\ninput", 1))
    plan = make_plan(asked, gpu_machine(asked, (), capability))
    assert [bool(team_of(launch).bulk) for launch in plan.launches] == [is_bulk, False]
    assert gpu_machine(asked, (), 70) is GPU


def test_segments_come_thread_by_thread() -> None:
    case = next(case for case in triton_cases.channels() if case.name == "group_norm_backward f32")
    plan = make_plan(parse(case.text), MACHINES["H200"])
    assert not any(team_of(launch).bulk for launch in plan.launches)


@pytest.mark.one_in(3)
@needs_nvrtc
@needs_triton  # whose cuobjdump tells
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("name", ["layer_norm_forward", "layer_norm_backward", "softmax_backward"])
def test_resources(name: str, tmp_path: Path) -> None:
    lines = []
    for types in ({"t": "bf16", "w": "f32"}, {"t": "f32"}):
        for width in ("1024", "16384", "65536"):
            for capability in (90, 100):
                with suppress(UnsupportedPlanError):
                    text = fill(getattr(regions, name.upper()), c=width, **types)
                    plan = make_plan(parse(text), cuda_machine(capability, bulk=True))
                    found = f"{' '.join(types.values()):<8} {width:>6}  sm_{capability}"
                    lines.append(f"{found}  {resources(plan, capability, tmp_path)}")
    if is_recorded():
        assert_snapshot(f"cuda/resources/bulk/{name}.txt", "\n".join(lines) + "\n")


def test_snapshot() -> None:
    text = fill(regions.LAYER_NORM_BACKWARD, c="16384", t="bf16", w="bf16")
    assert_snapshot(
        "cuda/layer_norm_backward_bulk.txt", generate(make_plan(parse(text), MACHINES["H200"])).text
    )
