"""NVIDIA's run-time compiler without a GPU: what a plan's kernels are compiled to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from triton_ahead import usage

from normpass.backend.codegen.cuda import generate
from normpass.backend.program.team import roomier, shared_bytes, team_of
from normpass.backend.run import nvrtc

if TYPE_CHECKING:
    from pathlib import Path

    from normpass.backend.program.tree import Launch, Plan

needs_nvrtc = pytest.mark.skipif(
    nvrtc.version() is None, reason="needs NVIDIA's run-time compiler, and it is not installed"
)


def is_recorded() -> bool:
    """Whether snapshots are of this compiler: others need other registers."""
    return nvrtc.version() == (13, 5)


def resources(plan: Plan, capability: int, folder: Path) -> str:
    """What a plan's kernel over rows takes as a GPU runs it: with a team that has more registers
    where those of the first would not suffice. None of its kernels spills.
    """
    others: dict[int, Launch] = {}
    while True:
        source = generate(plan, others)
        taken = usage(nvrtc.compiled(source.text, capability), folder)
        kernel = source.kernels[0]
        registers, spilled = taken[kernel.name]
        found = roomier(kernel.launch) if spilled else None
        if found is None:
            break
        others[0] = found
    assert not any(stack for _, stack in taken.values()), (source.text, taken)
    team = team_of(kernel.launch)
    return (
        f"{team.blocks} x {team.threads} threads, {team.vectors} vectors of {team.lanes}, "
        f"{kernel.launch.blocks.programs} at once, {registers} registers, "
        f"{shared_bytes(kernel.launch)} bytes shared"
    )
