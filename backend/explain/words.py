"""What a report's table and its page say in the same words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from normpass.passes.sizes import human

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.explain.memory import Memory
    from normpass.backend.explain.report import RefusedNorm
    from normpass.backend.explain.timing import Times


def refusals(refused: Sequence[RefusedNorm]) -> list[tuple[str, str, str, str]]:
    """Name, phases, module, reason: one row where both phases are refused for the same reason."""
    phases: dict[tuple[str, str, str], list[str]] = {}
    for norm in refused:
        phases.setdefault((short(norm.name), place(norm.module), norm.reason), []).append(
            norm.phase
        )
    return [
        (name, ", ".join(dict.fromkeys(where)), module, reason)
        for (name, module, reason), where in phases.items()
    ]


def short(name: str) -> str:
    """The phase has a column of its own."""
    return name.removesuffix("_backward")


def place(module: str) -> str:
    """A module as readers see it: the model itself has an empty path, and files need not be named
    from the root.
    """
    if os.sep not in module:
        return module or "(the model itself)"
    path = Path(module)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(Path("...", *path.parts[-2:]))


def times(moved: int, least: int) -> str:
    return f"{moved / least:.2f}x" if least else "-"


def failure(error: Exception) -> str:
    """An error of whatever kind in a line; of one of a backend's, what it raised."""
    error = getattr(error, "inner_exception", error)
    lines = str(error).strip().splitlines()
    return ": ".join((type(error).__name__, *lines[:1]))


def clock(seconds: float) -> str:
    """Seconds with three digits: 17.2 us, 1.68 ms."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def time_cells(found: Times | str | None) -> tuple[str, str, str]:
    """A region's time, Inductor's, and how many times less that is."""
    if found is None or isinstance(found, str):
        return "-", "-", "-"
    return clock(found.ours), clock(found.stock), f"{found.stock / found.ours:.2f}x"


def memory_lines(memory: Memory | str | None) -> list[str]:
    """A step's memory in sentences."""
    if memory is None:
        return []
    if isinstance(memory, str):
        return [f"memory not measured: {memory}"]
    sides = {"normpass": memory.ours, "Inductor": memory.stock}
    return [
        f"memory of a step with {name}: {human(side.timeline.peak)} at most, "
        f"{human(side.saved_bytes)} saved for the backward"
        for name, side in sides.items()
    ]
