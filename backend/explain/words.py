"""What a report's table and its page say in the same words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.explain.report import RefusedNorm


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
