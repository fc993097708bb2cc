"""In which dialect a region is printed for a GPU."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.machine import GPU, cuda_machine
from normpass.backend.program.plan import make_plan

if TYPE_CHECKING:
    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass
    from normpass.backend.program.tree import Plan
    from normpass.passes.region import Region

# CUDA C++ copies onto the chip by instructions of GPUs from this capability on.
LEAST_CAPABILITY = 80
# Warps of a program that has a multiprocessor to itself.
CROWDED = 16
# Bytes that memory hands out at a time.
SECTOR = 32


@lru_cache(maxsize=4096)
def gpu_machine(region: Region, classes: tuple[SizeClass, ...], capability: int) -> Machine:
    """The machine that a region is planned for: that of CUDA C++ if its teams hold rows which
    programs of Triton would read again, or take fewer launches, that of Triton otherwise; or that
    of the dialect that the region asks for, where there is a form in it.

    capability: of a GPU of NVIDIA's for which CUDA C++ can be compiled, 90 for 9.0; else 0.

    Raises:
        UnsupportedPlanError: if there is no form of the region's plan at all.
    """
    if region.dialect == "triton" or capability < LEAST_CAPABILITY:
        return GPU
    bulk = region.dialect == "cuda_bulk"
    for columns in (True, False):
        with suppress(UnsupportedPlanError):
            machine = cuda_machine(capability, columns=columns, bulk=bulk)
            plan = make_plan(region, machine, classes)
            is_asked = region.dialect.startswith("cuda")
            if is_asked or _is_better(plan, make_plan(region, GPU, classes)):
                return machine
            return GPU
    return GPU


def _is_better(plan: Plan, in_triton: Plan) -> bool:
    """Whether teams hold what programs of Triton read again or have no registers for, read more of
    what memory hands out at a time, or take fewer launches.
    """
    few = len(plan.launches) < len(in_triton.launches)
    return few or _is_joined(plan) or _reads_again(in_triton) or _is_crowded(in_triton)


def _is_joined(plan: Plan) -> bool:
    """Whether a team has several groups side by side of which a program of Triton would read each
    on its own, and all around it with it.
    """
    return any(
        launch.team.group * launch.team.lanes * load.access.buffer.dtype.itemsize < SECTOR
        for launch in plan.launches
        if launch.team and launch.team.group
        for load in (*launch.team.staged, *launch.held)
    )


def _reads_again(plan: Plan) -> bool:
    """Whether programs go through a row in several loops of their text."""
    return any(
        launch.blocks.again or launch.streamed(axis.name for axis in launch.inner)
        for launch in plan.launches
    )


def _is_crowded(plan: Plan) -> bool:
    """Whether a program has all of a multiprocessor's registers for rows along two axes: of what it
    computes with some would be in memory.
    """
    return any(len(launch.inner) > 1 and launch.blocks.warps >= CROWDED for launch in plan.launches)
