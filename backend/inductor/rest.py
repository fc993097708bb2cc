"""What Inductor is told of a graph beside its regions, so that CPUs do the rest of a step fast.

Each of these changes how Inductor compiles graphs that are marked, and no others. To add one: a
module of its own, and a line in `PARTS`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from normpass.backend.inductor import conv1d, few_channels, gemm, image_gradients, random_numbers
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph

    from normpass.backend.options import Options


class Part(NamedTuple):
    """install: tells Inductor, once a process, of what is marked. mark: marks a graph, or rewrites
    it. instead: what becomes of it if either fails.
    """

    name: str
    mark: Callable[[Graph], None]
    instead: str
    install: Callable[[], None] = lambda: None
    is_wanted: Callable[[Options], bool] = lambda _: True


PARTS = (
    Part("convolutions in one dimension", conv1d.as_images, "They stay so"),
    Part("gradients of images of few channels", few_channels.as_products, "They stay so"),
    Part(
        "the gradients of images",
        image_gradients.mark,
        "Their tensors are copied",
        image_gradients.install,
    ),
    Part(
        "dropout's random numbers",
        random_numbers.mark,
        "They are drawn one by one",
        random_numbers.install,
    ),
    Part(
        "products by oneDNN",
        gemm.mark,
        "MKL multiplies",
        gemm.install,
        lambda options: options.onednn,
    ),
)


def prepare(graph: Graph, options: Options) -> None:
    """Marks a graph for all that is wanted."""
    for part in PARTS:
        if part.is_wanted(options) and _is_installed(part):
            with faults.survived(part.name, "a graph", part.instead):
                part.mark(graph)


@cache
def _is_installed(part: Part) -> bool:
    """Installs what is not yet; whether that succeeded, the first time."""
    with faults.survived(part.name, "Inductor", part.instead):
        part.install()
        return True
    return False
