"""Kernels within what Inductor keeps of a compiled graph: its cache on disk, a remote one, what
torch.compiler.save_cache_artifacts writes, what torch.compile saves. Who loads the graph has its
kernels then, and compiles none.

Private, checked on torch 2.11, 2.13 and 2.15: CompiledFxGraph of torch._inductor.output_code, which
is made of a GraphLowering and pickled with whatever it has; a subgraph's `parent`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from normpass.backend.inductor_mistakes.mistake import wrap
from normpass.backend.run import toolchain

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
NAME = "normpass_kernels"


class Kernels:
    """Those of one compiled graph. Pickled they are libraries, which lie in a machine's cache once
    they have been read there; one for another processor or compiler stays unused.

    sources: of kernels that this process builds. keys: of libraries that came with the graph.
    """

    def __init__(self, sources: tuple[str, ...] = (), keys: tuple[str, ...] = ()) -> None:
        self.sources, self.keys = sources, keys

    def __reduce__(self) -> tuple[Any, ...]:
        keys = dict.fromkeys((*self.keys, *map(toolchain.built, self.sources)))
        return unpacked, ({key: data for key in keys if (data := toolchain.packed(key))},)


def unpacked(libraries: dict[str, bytes]) -> Kernels:
    """What comes out of a pickle."""
    for key, data in libraries.items():
        toolchain.unpack(key, data)
    return Kernels(keys=tuple(libraries))


def note(graph: Any, source: str) -> None:
    """Notes that a graph that is being lowered calls a kernel."""
    while (parent := getattr(graph, "parent", None)) is not None:
        graph = parent
    vars(graph).setdefault(NAME, {})[source] = True


def install() -> None:
    """Has compiled graphs keep the kernels they call."""
    from torch._inductor.output_code import CompiledFxGraph

    wrap(CompiledFxGraph, "__init__", _with_kernels)


def _with_kernels(original: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, callable: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        original(self, callable, graph, *args, **kwargs)
        if sources := getattr(graph, NAME, None):
            setattr(self, NAME, Kernels(tuple(sources)))

    return made
