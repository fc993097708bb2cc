"""The kernel of a region, in the dialect of its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen import cpp
from normpass.backend.program.machine import machine_of
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from normpass.backend.program.tree import Plan
    from normpass.passes.pipeline import Fused


def kernel_source(fused: Fused) -> str:
    """The generated kernel of a fused region, in the dialect of its device."""
    plan = program(fused)
    if fused.device == "cuda":
        from normpass.backend.codegen import triton

        return triton.generate(plan).text
    return cpp.generate(plan)


def program(fused: Fused) -> Plan:
    """What is printed, for the sizes of the example that the graph was traced with."""
    return make_plan(parse(fused.text), machine_of(fused.device), size_classes(fused.sizes))
