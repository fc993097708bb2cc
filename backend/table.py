"""The decompositions that graphs are traced with: Inductor's, with ours in their place."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normpass.backend.inductor import image_gradients
from normpass.decomps import digest, registry

if TYPE_CHECKING:
    from collections.abc import Callable


class DecompositionTable(dict[Any, "Callable[..., Any]"]):
    """Inductor's decompositions with ours in their place.

    Since torch 2.13 the table is part of the key of Inductor's cache, and some of its functions
    cannot be pickled: it goes there as the hash of our sources (the key has torch's version too).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return decomposition_table, (source_digest(),)


def decomposition_table(_digest: str = "") -> DecompositionTable:
    """The table for this process."""
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")  # a pool's decomposition takes it for imported
    theirs = select_decomp_table()
    return DecompositionTable(
        {**theirs, **image_gradients.kept_whole(theirs), **registry.decompositions_in_use()}
    )


def source_digest() -> str:
    """A hash of all our sources, and of the rules of others."""
    backend = Path(__file__).parent
    parts = digest.of_folder(backend), digest.of_folder(backend.parent / "passes")
    return "-".join((*parts, digest.of_rules()))
