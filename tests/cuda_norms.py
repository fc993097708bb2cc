"""Norms whose values stay on chip in CUDA C++: their regions, and what kernels of them compute on a
CPU.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import cuda_on_cpu
import numpy as np
import pytest
import torch
from bounded import assert_within, evaluate
from compared import make_inputs
from snapshots import assert_snapshot
from triton_cases import Case

from normpass.backend.codegen.cuda import generate
from normpass.backend.program.listing import listing
from normpass.backend.program.plan import make_plan
from normpass.benchmarks.gpu_cases import GpuCase
from normpass.benchmarks.gpu_graphs import fused_graphs
from normpass.benchmarks.roofline import H200
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.tree import Plan
    from normpass.passes.region import Region

PHASES = ("forward", "backward", "double backward")
DTYPES = ("bfloat16", "float32")


def regions(case: GpuCase) -> Iterator[Region]:
    """What is fused in a case on a GPU."""
    torch._dynamo.reset()
    for graph in fused_graphs(case, H200, least_bytes=0):
        yield from (parse(each.text) for each in graph.decisions if isinstance(each, Fused))


def check(region: Region, machine: Machine, name: str, crowded: int = 0) -> Plan:
    """A kernel computes what its region means, as exactly as its arithmetic allows. crowded: see
    `cuda_on_cpu.kernel_of`.
    """
    kernel = cuda_on_cpu.kernel_of(region, machine, crowded=crowded)
    case = Case(name, str(region), ((),), tuple)
    inputs = [*make_inputs(case, region, region.extents(())).values()]
    for output, ours, want in zip(
        region.outputs, kernel(inputs, ()), evaluate(region, inputs, ()), strict=True
    ):
        assert np.isfinite(want.error).all()
        assert_within(ours, want, f"{output.buffer.name}, {name}\n{region}\n")
    return kernel.plan


def variants(
    shapes: Mapping[str, tuple[tuple[int, ...], ...]],
    machines: Iterable[str],
    *,
    channels_last: bool = False,
    phases: tuple[str, ...] = PHASES,
) -> Iterator[object]:
    """Cases and machines. All are a sweep; every time each phase runs on each machine, in some type
    and shape.
    """
    for norm, (p, phase), (m, machine) in itertools.product(
        shapes, enumerate(phases), enumerate(machines)
    ):
        for (s, shape), (d, dtype) in itertools.product(enumerate(shapes[norm]), enumerate(DTYPES)):
            is_short = (p + m) % len(shapes[norm]) == s and (p + m) % 2 == d
            marks = [] if is_short else [pytest.mark.sweep]
            case = GpuCase(norm, shape, dtype, phase, channels_last)
            yield pytest.param(case, machine, marks=marks, id=f"{case.label} {machine}")


def assert_text(file: str, case: GpuCase, machine: Machine) -> None:
    """The program and the text of a case's kernel are as they were."""
    (region,) = regions(case)
    plan = make_plan(region, machine)
    text = "".join(f"// {line}\n" for line in listing(plan).splitlines())
    assert_snapshot(f"cuda/{file}.txt", f"{text}\n{generate(plan).text}")
