"""Atomic additions of a tile of two dimensions go to the wrong place.

Checked on torch 2.11, 2.13 and 2.15: CppTile2DKernel.store and need_vec_transpose,
CppVecKernel.store, CppKernel.num_threads and rename_indexing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.backend.inductor_mistakes.mistake import Mistake, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.backend.inductor_mistakes.mistake import Undo


def is_atomic(kernel: Any, mode: Any) -> bool:
    """Whether a store of this mode may meet another one to the same place."""
    from torch._inductor import config

    return mode == "atomic_add" and (config.cpp.dynamic_threads or kernel.num_threads != 1)


def mend() -> Undo:
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def store(kernel: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
            if is_atomic(kernel, mode) and not kernel.need_vec_transpose(
                kernel.rename_indexing(index)
            ):
                # It moves the index into the tile itself, and must be given the plain one.
                CppVecKernel.store(kernel, name, index, value, mode)
            else:
                original(kernel, name, index, value, mode)

        return store

    return wrap(CppTile2DKernel, "store", around)


MISTAKE = Mistake(
    name="atomic_tiles",
    issue=191837,
    fix=191861,
    wrong=(
        "With more than one thread, the index of an atomic addition from a tile of two dimensions "
        "is moved by the place in the tile twice: a scatter lands up to 15 elements off, beyond "
        "the buffer at its end. Compiled MACE models corrupt the heap in their backward."
    ),
    mend=mend,
    fixed="2.15.0",
)
