"""What was fused, what was not and why: `normpass.explain` and its report."""

from __future__ import annotations

from normpass.backend.codegen import cpp
from normpass.backend.plan import make_plan
from normpass.passes.pipeline import Fused
from normpass.passes.region import parse


def kernel_source(fused: Fused) -> str:
    """The generated kernel of a fused region, in the dialect of its device."""
    plan = make_plan(parse(fused.text))
    return cpp.generate(plan)
