"""What tests of the whole backend share: compiling with every region fused, and what the counters
say.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def compile_fused(
    function: Any, *, dynamic: bool | None = False, **options: Any
) -> Callable[..., Any]:
    """torch.compile with this backend; regions are fused however small they are, and graphs are not
    taken from Inductor's cache, so that each test sees its own decisions.
    """
    return torch.compile(
        function,
        backend="normpass",
        fullgraph=True,
        dynamic=dynamic,
        options={"least_bytes": 0, "inductor": {"fx_graph_cache": False}, **options},
    )


def count_fused(part: str = "") -> int:
    """How many regions were fused whose name has this part; fails if one was refused."""
    found = dict(counters["normpass"])
    refused = [key for key in found if key.startswith("refused")]
    assert not refused, refused
    return sum(n for key, n in found.items() if key.startswith("fused") and part_of(key, part))


def part_of(key: str, part: str) -> bool:
    if part == "forward":
        return not key.endswith("backward")
    return part in key


@contextmanager
def no_recompiles() -> Iterator[None]:
    """Fails if Dynamo compiles a graph inside."""
    before = counters["stats"]["unique_graphs"]
    yield
    after = counters["stats"]["unique_graphs"]
    assert after == before, f"{after - before} graphs were compiled again"


def run_in_child(text: str, x: torch.Tensor) -> torch.Tensor:
    """A kernel of one input and one output, as a DataLoader's worker would run it. Lives here
    because a spawned process imports it by name.
    """
    from normpass.backend.run import runtime

    torch.set_num_threads(1)
    return runtime.launch([x], [len(x)], text)[0]
