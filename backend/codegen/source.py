"""The kernel of a region, in the dialect of its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen import cpp
from normpass.backend.program.machine import GPU
from normpass.backend.program.plan import make_plan
from normpass.passes.region import parse

if TYPE_CHECKING:
    from normpass.passes.pipeline import Fused


def kernel_source(fused: Fused) -> str:
    """The generated kernel of a fused region, in the dialect of its device."""
    region = parse(fused.text)
    if fused.device == "cuda":
        from normpass.backend.codegen import triton

        return triton.generate(make_plan(region, GPU)).text
    return cpp.generate(make_plan(region))
