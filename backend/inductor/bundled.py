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
from normpass.backend.run import known, toolchain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from normpass.backend.run.known import Facts
    from normpass.backend.run.runtime import Kernel

log = logging.getLogger(__name__)
NAME = "normpass_kernels"


class Kernels:
    """Those of one compiled graph. Pickled they are libraries, which lie in a machine's cache once
    they have been read there; one for another processor or compiler stays unused.

    built: kernels that this process builds. read: what is known of those that came with the graph.
    """

    def __init__(self, built: Iterable[Kernel] = (), read: dict[str, Facts] | None = None) -> None:
        self.built, self.read = tuple(built), read or {}

    def __reduce__(self) -> tuple[Any, ...]:
        facts = self.read | dict(self._of_built())
        keys = {each.library for each in facts.values()}
        libraries = {key: data for key in sorted(keys) if (data := toolchain.packed(key))}
        return unpacked, (facts, libraries)

    def _of_built(self) -> Iterator[tuple[str, Facts]]:
        """Of those that can be built; of others it is told where they are launched."""
        for kernel in self.built:
            try:
                kernel.library()
                yield kernel.name, kernel.facts
            except Exception as error:
                log.info("a kernel is not kept with its graph: %r", error)


def unpacked(facts: dict[str, Facts], libraries: dict[str, bytes]) -> Kernels:
    """What comes out of a pickle."""
    for key, data in libraries.items():
        toolchain.unpack(key, data)
    for name, each in facts.items():
        known.remember(name, each)
    return Kernels(read=facts)


def note(graph: Any, kernel: Kernel) -> None:
    """Notes that a graph that is being lowered calls a kernel."""
    while (parent := getattr(graph, "parent", None)) is not None:
        graph = parent
    vars(graph).setdefault(NAME, {})[kernel] = True


def install() -> None:
    """Has compiled graphs keep the kernels they call."""
    from torch._inductor.output_code import CompiledFxGraph

    wrap(CompiledFxGraph, "__init__", _with_kernels)


def _with_kernels(original: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        graph = kwargs["graph"] if "graph" in kwargs else args[1] if len(args) > 1 else None
        if kernels := getattr(graph, NAME, None):
            setattr(self, NAME, Kernels(kernels))

    return made
