"""In which dialect a region is printed for a GPU."""

from __future__ import annotations

import os
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

# Where the environment names a dialect, GPUs get that wherever it has a form of a region.
VARIABLE = "NORMPASS_GPU_DIALECT"
DIALECTS = ("triton", "cuda")
# CUDA C++ copies onto the chip by instructions of GPUs from this capability on.
LEAST_CAPABILITY = 80


@lru_cache(maxsize=4096)
def gpu_machine(region: Region, classes: tuple[SizeClass, ...], capability: int) -> Machine:
    """The machine that a region is planned for: that of CUDA C++ if its teams hold rows which
    programs of Triton would read again, that of Triton otherwise.

    capability: of a GPU of NVIDIA's for which CUDA C++ can be compiled, 90 for 9.0; else 0.

    Raises:
        ValueError: if the environment asks for a dialect that there is not.
        UnsupportedPlanError: if there is no form of the region's plan at all.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted and wanted not in DIALECTS:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(DIALECTS)}, found {wanted!r}")
    if wanted == "triton" or capability < LEAST_CAPABILITY:
        return GPU
    if wanted != "cuda" and not _reads_again(make_plan(region, GPU, classes)):
        return GPU
    try:
        make_plan(region, machine := cuda_machine(capability), classes)
    except UnsupportedPlanError:
        return GPU
    return machine


def _reads_again(plan: Plan) -> bool:
    """Whether programs go through a row in several loops of their text."""
    return any(
        launch.blocks.again or launch.streamed(axis.name for axis in launch.inner)
        for launch in plan.launches
    )
