"""NORMPASS_DEBUG=folder: numbered graphs and kernels as they pass by."""

from __future__ import annotations

import logging
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from torch.fx import Graph, GraphModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.passes.pipeline import Decision

log = logging.getLogger(__name__)

_numbers = count()


def graph(
    folder: str | None, stage: str, graph: Graph | GraphModule, number: int | None = None
) -> int:
    """Writes a graph as `<number>_<stage>.py`. Returns the number, for what belongs to it."""
    number = next(_numbers) if number is None else number
    if folder:
        text = graph.code if isinstance(graph, GraphModule) else graph.python_code("self").src
        _write(folder, f"{number:03d}_{stage}.py", text)
    return number


def kernels(folder: str | None, decisions: Sequence[Decision], number: int) -> None:
    """Writes the region, the program and the kernel of everything fused."""
    if not folder:
        return
    # Whoever imports this module for the graph that Dynamo hands over needs none of these.
    from normpass.backend.program.listing import listing
    from normpass.backend.run.dialects import kernel_source, program
    from normpass.passes.pipeline import Fused

    for k, decision in enumerate(decisions):
        if isinstance(decision, Fused):
            stem = f"{number:03d}_40_kernel{k}_{decision.name}"
            suffix = "cpp" if decision.device == "cpu" else "py"
            _write(folder, f"{stem}.region", decision.text)
            _write(folder, f"{stem}.program", listing(program(decision)))
            _write(folder, f"{stem}.{suffix}", kernel_source(decision))


def _write(folder: str, name: str, text: str) -> None:
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text + "\n")
    except OSError as error:
        _warn_once(
            f"nothing is written to the debug folder {folder!r}: {error} "
            "(normpass why nothing-written)"
        )


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
