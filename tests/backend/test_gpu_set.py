"""The kernels of real norms, compiled ahead of time for three generations of GPUs: forward,
backward, double backward and vmapped, in three types and five sizes. What they take of a GPU, and
nothing that spills.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from cuda_ahead import is_recorded, needs_nvrtc
from cuda_ahead import resources as of_cuda
from snapshots import assert_snapshot
from triton_ahead import fitted, needs_triton
from triton_ahead import is_recorded as is_recorded_triton

from normpass.backend.codegen import triton
from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.benchmarks.gpu_cases import GpuCase
from normpass.benchmarks.gpu_graphs import fused_graphs
from normpass.passes.cost import Caches, Conditions
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CAPABILITIES = (80, 90, 100)
PHASES = ("forward", "backward", "double backward", "vmapped")
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = {
    "layer_norm": ((4096, 1024), (8192, 4096), (4096, 5120), (4096, 16384), (1024, 65536)),
    "rms_norm": ((4096, 1024), (8192, 4096), (4096, 5120), (4096, 16384), (1024, 65536)),
    "group_norm": tuple(
        (8, c, n, n) for c, n in ((320, 64), (640, 32), (1280, 16), (64, 96), (32, 8))
    ),
    "batch_norm": tuple(
        (256, c, n, n) for c, n in ((64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
    ),
}


def conditions(capability: int) -> Conditions:
    """An H200's, but for its capability."""
    return Conditions(
        Caches(50 * 2**20 // 132, 50 * 2**20), 50 * 2**20 // 132, 132, None, capability
    )


def regions(case: GpuCase, capability: int) -> Iterator[Fused]:
    """What is fused in a case on a GPU."""
    for graph in fused_graphs(case, conditions(capability), least_bytes=0):
        yield from (each for each in graph.decisions if isinstance(each, Fused))


def taken(found: Fused, capability: int, folder: Path) -> list[str]:
    """What the kernels of a region take, a line each."""
    region, classes = parse(found.text), size_classes(found.sizes)
    plan = make_plan(region, gpu_machine(region, classes, capability), classes)
    if any(launch.team for launch in plan.launches):
        return [f"CUDA    {of_cuda(plan, capability, folder)}"]
    source = triton.generate(plan)
    lines = []
    for kernel, each in zip(source.kernels, fitted(source, capability, folder), strict=True):
        assert each.spilled == 0, (capability, source.text)
        lines.append(
            f"Triton  {kernel.warps} warps, {each.programs} at once, {each.registers} registers, "
            f"{each.shared} bytes shared"
        )
    return lines


def places(norm: str) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Shapes, and whether channels are last."""
    for shape in SHAPES[norm]:
        yield shape, False
        if len(shape) == 4:
            yield shape, True


def check(norm: str, phase: str, dtypes: tuple[str, ...], folder: Path, *, most: int) -> str:
    lines = []
    for dtype in dtypes:
        for shape, channels_last in [*places(norm)][:most]:
            case = GpuCase(norm, shape, dtype, phase, channels_last)
            for capability in CAPABILITIES:
                torch._dynamo.reset()
                for found in regions(case, capability):
                    lines.append(f"{case.label}  sm_{capability}  {found.name}")
                    lines += (f"    {line}" for line in taken(found, capability, folder))
    return "\n".join(lines) + "\n"


def phases(norm: str) -> tuple[str, ...]:
    return PHASES if norm in ("layer_norm", "rms_norm") else PHASES[:3]


@needs_triton
@needs_nvrtc
@pytest.mark.sweep
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize(
    ("norm", "phase"), [(norm, phase) for norm in SHAPES for phase in phases(norm)]
)
def test_the_whole_set(norm: str, phase: str, tmp_path: Path) -> None:
    text = check(norm, phase, DTYPES, tmp_path, most=10)
    if is_recorded() and is_recorded_triton():
        assert_snapshot(f"gpu/{norm}_{phase.replace(' ', '_')}.txt", text)
