"""The kernel of a region, in the dialect of its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen import cpp
from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.machine import machine_of
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.run.caches import capability
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from normpass.backend.program.tree import Plan
    from normpass.passes.pipeline import Fused


def kernel_source(fused: Fused) -> str:
    """The generated kernel of a fused region, in the dialect of its device."""
    plan = program(fused)
    if fused.device == "cuda":
        from normpass.backend.codegen import cuda, triton

        is_cuda = any(launch.team for launch in plan.launches)
        return (cuda if is_cuda else triton).generate(plan).text
    return cpp.generate(plan)


def program(fused: Fused) -> Plan:
    """What is printed, for the sizes of the example that the graph was traced with."""
    region, classes = parse(fused.text), size_classes(fused.sizes)
    if fused.device == "cuda":
        return make_plan(region, gpu_machine(region, classes, capability()), classes)
    return make_plan(region, machine_of(fused.device), classes)
