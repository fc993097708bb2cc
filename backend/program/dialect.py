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
    for columns in (True, False):
        with suppress(UnsupportedPlanError):
            plan = make_plan(region, machine := cuda_machine(capability, columns=columns), classes)
            if region.dialect == "cuda":
                return machine
            in_triton = make_plan(region, GPU, classes)
            is_better = _reads_again(in_triton) or len(plan.launches) < len(in_triton.launches)
            return machine if is_better else GPU
    return GPU


def _reads_again(plan: Plan) -> bool:
    """Whether programs go through a row in several loops of their text."""
    return any(
        launch.blocks.again or launch.streamed(axis.name for axis in launch.inner)
        for launch in plan.launches
    )
