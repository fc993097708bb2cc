"""CUDA C++ without a GPU: its kernels compute on a CPU what their regions mean."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import cuda_on_cpu
import cuda_random
import pytest
import torch
import triton_cases
import triton_oracles as mathematics
import triton_regions as regions
from compared import compare
from snapshots import assert_snapshot
from triton_cases import Case
from triton_regions import fill

from normpass.backend.codegen.cuda import CudaSource, generate
from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.listing import listing
from normpass.backend.program.machine import cuda_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.team import team_of
from normpass.backend.run.launch_cuda import CudaKernel
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from torch import Tensor

    from normpass.backend.program.machine import Machine
    from normpass.backend.run.gpu_kernel import GpuKernel

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the threads of a GPU are fibers of Linux"
)

# A GPU; one whose rows take several blocks, one that has a row at a time, and one that has no room
# beside it for what is the same for all rows.
MACHINES = {
    "H200": cuda_machine(90),
    "clusters": cuda_on_cpu.small(threads=32, blocks=4, of_thread=32),
    "one row": cuda_on_cpu.small(shared=1200),
    "aside": cuda_on_cpu.small(shared=700),
}
CASES = {
    case.name: case
    for family in ("norms", "examples", "channels", "others")
    for case in triton_cases.FAMILIES[family]()
}
MASKED = Case("masked rows", fill(regions.MASKED, c="64"), ((5,),), mathematics.masked)
# What CUDA C++ is written for. Of others rows have a length known at run time only, or one element,
# or elements that lie apart, or begin where nothing can be copied from; or sums are not over rows.
NORMS = ("layer_norm", "layer_norm_backward", "rms_norm_backward", "softmax", "softmax_backward")
WRITTEN = {
    *(
        f"{norm} {kind}"
        for norm in (*NORMS, "three_levels")
        for kind in ("f32", "f64", "bf16", "f16", "bf16 with f32 weights", "static")
    ),
    *(f"modulated_backward {kind}" for kind in ("f32", "f64", "bf16")),
    *(f"{norm}_norm_backward {kind}" for norm in ("batch", "group") for kind in ("f32", "f64")),
    *("softmax of NaN", "softmax of Inf", "extremes", "names", "three_levels one column"),
    "group_norm_backward channels last",
}
# Those that are run each time; the others are compiled from the same text but for its types.
SHORT = ("f32", "bf16", "NaN", "Inf", "extremes", "names", "three_levels one column")


def kernel_of(text: str, machine: Machine) -> CudaKernel:
    return cuda_on_cpu.kernel_of(parse(text), machine)


def check(case: Case, machine: Machine) -> None:
    kernel = kernel_of(case.text, machine)
    for sizes in case.sizes:
        compare(case, kernel, sizes, "cpu", case.oracle)


def variants() -> list[object]:
    """Cases and machines: of those that differ in types alone, some."""
    found = []
    for name in sorted(WRITTEN):
        for machine in MACHINES:
            is_short = name.endswith(SHORT) and machine == "H200"
            is_short |= name in ("layer_norm_backward f32", "layer_norm bf16", "three_levels f32")
            marks = [] if is_short else [pytest.mark.sweep]
            found.append(pytest.param(name, machine, marks=marks))
    return found


def test_what_is_written_in_cuda() -> None:
    def is_written(case: Case) -> bool:
        try:
            return bool(generate(make_plan(parse(case.text), MACHINES["H200"])))
        except UnsupportedPlanError as refusal:
            reasons.append(str(refusal))
            return False

    reasons: list[str] = []
    assert {name for name, case in CASES.items() if is_written(case)} == WRITTEN
    assert all("in CUDA C++: expected" in reason for reason in reasons)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("name", "machine"), variants())
def test_kernels_compute_what_their_regions_mean(name: str, machine: str) -> None:
    refusal = ""
    try:
        check(CASES[name], MACHINES[machine])
    except UnsupportedPlanError as error:
        refusal = str(error)
    assert not refusal or ("blocks hold" in refusal and machine != "H200")


@pytest.mark.parametrize(("c", "t", "w"), [("64", "f32", "f32"), ("96", "bf16", "f32")])
def test_weights_that_stay_in_memory(c: str, t: str, w: str) -> None:
    text = fill(regions.LAYER_NORM_BACKWARD, c=c, t=t, w=w)
    kernel = kernel_of(text, MACHINES["one row"])
    assert [load.access.buffer.name for load in team_of(kernel.plan.launches[0]).aside] == ["w"]
    assert "Row::read(p_w + " in kernel.source.text
    oracle = mathematics.layer_norm_backward
    compare(Case("aside", text, ((5,),), oracle), kernel, (5,), "cpu", oracle)


def test_weights_that_begin_elsewhere_are_copied_first() -> None:
    region = parse(fill(regions.LAYER_NORM_BACKWARD, c="64"))
    kernel = cuda_on_cpu.kernel_of(region, MACHINES["one row"])
    g, x, w = torch.randn(5, 64), torch.randn(5, 64), torch.randn(65)[1:]
    mean = x.mean(1, keepdim=True)
    rstd = x.var(1, keepdim=True, correction=0).add(1e-5).rsqrt()
    given = {"g": g, "w": w, "x": x, "mean": mean, "rstd": rstd}
    found = kernel([given[buffer.name] for buffer in region.inputs], [5])
    right = mathematics.layer_norm_backward(**{k: v.double() for k, v in given.items()})
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


def test_rows_with_a_mask() -> None:
    """Whose elements of one byte go on chip four at a time."""
    check(MASKED, MACHINES["H200"])


# Sums over rows for each v, and over all of them: of these every v leaves parts.
BESIDE = """
region beside
axes    v=3 r=40 c=64
input   x: f32[v r c]
top     = amax[c](x)
y       = sub(x, top)
of_v    = sum[r](y)
of_rows = sum[v r](y)
of_all  = sum[v r c](y)
output  out: f32[v r c] = y
output  each: f32[v c] = of_v
output  rows: f32[c] = of_rows
output  all: f32[1] = of_all
"""
# Rows along two axes, of which one is two of the region's that are one in memory.
APART = """
region apart
axes    r=? q=? c=16 d=?
sizes   t=?
input   x: f64[(r d) q c] (16, t, 1)
total   = sum[c](x)
y       = mul(total, 2.0)
output  out: f64[(r d) q] = y
"""


def beside(x: Tensor) -> tuple[Tensor, ...]:
    y = x - x.amax(2, keepdim=True)
    return y, y.sum(1), y.sum((0, 1)), y.sum()[None]


NUMBERS = {"x": [math.nan, 1.0, math.inf, -math.inf, 2.0]}
MORE = {
    case.name: case
    for case in (
        Case(
            "several warps",
            fill(regions.LAYER_NORM_BACKWARD, c="2048"),
            ((7,),),
            mathematics.layer_norm_backward,
        ),
        Case(
            "NaN among others",
            fill(regions.EXTREMES, c="64"),
            ((5,),),
            mathematics.extremes,
            NUMBERS,
        ),
        Case("sums of tiles", BESIDE, ((),), beside),
        Case("rows along two axes", APART, ((3, 4, 5, 240),), lambda x: (2 * x.sum(2),)),
    )
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("machine", MACHINES)
def test_sums_of_several_warps_and_tiles(name: str, machine: str) -> None:
    with suppress(UnsupportedPlanError):  # of machines that are too small
        check(MORE[name], MACHINES[machine])
        return
    assert machine != "H200"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "c", "t", "blocks"),
    [
        ("layer_norm_backward", "65536", "bf16", 4),
        ("layer_norm_backward", "131072", "f32", 8),
        ("layer_norm_backward", "12300", "f32", 2),
        ("layer_norm_forward", "65536", "f64", 8),
    ],
)
def test_long_rows(name: str, c: str, t: str, blocks: int) -> None:
    text = fill(getattr(regions, name.upper()), c=c, t=t)
    oracle = getattr(mathematics, name.removesuffix("_forward"))
    kernel = kernel_of(text, MACHINES["H200"])
    assert team_of(kernel.source.kernels[0].launch).blocks == blocks
    compare(Case(f"{name} {c}", text, ((4,),), oracle), kernel, (4,), "cpu", oracle)


@pytest.mark.parametrize("examples", [pytest.param(300, marks=pytest.mark.sweep), 5])
def test_kernels_compute_random_regions(examples: int) -> None:
    kernels = cuda_random.random_kernels(examples, MACHINES, lambda launch: launch.inner)
    assert len(kernels) == examples
    for case, machine in kernels:
        cuda_random.check(case, MACHINES[machine], machine)


# ---- tensors


def test_rows_that_begin_elsewhere_are_copied_first() -> None:
    kernel = kernel_of(fill(regions.SOFTMAX, c="64"), MACHINES["H200"])
    x = torch.randn(5 * 64 + 1)[1:].view(5, 64)
    assert x.data_ptr() % 16
    (y,) = kernel([x], [5])
    torch.testing.assert_close(y, torch.softmax(x, 1))


SHIFTED = """
region shifted
axes    r=? c=64
input   x: f32[r c]
input   b: f32[r c] (0, 1)
v       = add(x, b)
top     = amax[c](v)
y       = sub(v, top)
output  out: f32[r c] = y
"""


def test_a_row_for_all_that_begins_elsewhere_is_copied_once() -> None:
    kernel = kernel_of(SHIFTED, MACHINES["H200"])
    x, b = torch.randn(5, 64), torch.randn(65)[1:].expand(5, 64)
    (y,) = kernel([x, b], [5])
    torch.testing.assert_close(y, x + b - (x + b).amax(1, keepdim=True), rtol=0, atol=0)


@pytest.mark.usefixtures("faults_are_meant")
def test_where_it_cannot_be_built_triton_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    region = parse(fill(regions.SOFTMAX, c="64"))
    taken: list[object] = []

    def refuse(source: CudaSource, device: torch.device) -> dict[str, object]:
        raise RuntimeError("NVRTC: no such architecture")

    def other() -> GpuKernel:
        def kernel(inputs: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
            taken.append(sizes)
            return [torch.softmax(inputs[0], 1)]

        return kernel  # type: ignore[return-value]

    kernel = CudaKernel(region, MACHINES["H200"], (), refuse, other)  # type: ignore[arg-type]
    x = torch.randn(5, 64)
    for _ in range(2):
        torch.testing.assert_close(kernel([x], [5])[0], torch.softmax(x, 1))
    assert taken == [(5,), (5,)]
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("normpass")]
    assert warning == (
        "region softmax runs in Triton: its CUDA kernel could not be built: NVRTC: no such "
        "architecture (normpass why kernel-not-built)"
    )


# ---- the tests' own GPU


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("text", "instead", "found"),
    [
        ("row.wait<2>(k);", "", "Tensor-likes are not close"),
        (
            "if (number + 2 < last) ask(number + 2",
            "if (number + 2 < last) ask(number + 1",
            "not close",
        ),
        (
            "exchange.all<Sum>(",
            "if (row.is_first()) exchange.all<Sum>(",
            "wait for different things",
        ),
        ("slots_x(chip + ", "slots_x(chip + 8 + ", "does not begin at a multiple"),
        ("slots_x(chip + ", "slots_x(chip + 64 + ", "beyond its block's memory"),
    ],
)
def test_faults_are_found(text: str, instead: str, found: str) -> None:
    """A kernel that is wrong on a GPU is wrong here."""
    said = cuda_on_cpu.said_of_a_fault(text, instead, 128, threads=32, blocks=4, of_thread=32)
    assert found in said, said


# ---- text


@pytest.mark.parametrize(
    ("file", "name", "changed"),
    [
        ("layer_norm_backward", "LAYER_NORM_BACKWARD", {"c": "65536", "t": "bf16", "w": "f32"}),
        ("layer_norm", "LAYER_NORM_FORWARD", {"c": "16384", "t": "bf16"}),
        ("modulated_backward", "MODULATED_BACKWARD", {"c": "4096", "t": "bf16"}),
    ],
)
def test_snapshot(file: str, name: str, changed: dict[str, str]) -> None:
    plan = make_plan(parse(fill(getattr(regions, name), **changed)), MACHINES["H200"])
    text = "".join(f"// {line}\n" for line in listing(plan).splitlines())
    assert_snapshot(f"cuda/{file}.txt", f"{text}\n{generate(plan).text}")


def test_names_of_cpp_are_no_names_of_values() -> None:
    text = fill(regions.SOFTMAX, c="64").replace("top", "class").replace("less", "exp_")
    case = Case("words", text, ((3,),), mathematics.softmax)
    check(case, MACHINES["H200"])
