"""Atomic additions of a whole vector to one place: an assertion while the kernel is printed.

Checked on torch 2.11, 2.13 and 2.15: CppVecKernel.store, rename_indexing, broadcast, num_threads,
tiling_factor, tail_size and stores; atomic_add of Inductor's C++ prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.backend.inductor_mistakes.mistake import Mistake, wrap
from normpass.backend.inductor_mistakes.tiles import is_atomic

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.backend.inductor_mistakes.mistake import Undo


def mend() -> Undo:
    import torch
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, cexpr_index
    from torch._inductor.virtualized import V, ops

    def is_one_place(kernel: Any, index: Any) -> bool:
        found: Any = ops.index_expr(kernel.rename_indexing(index), torch.int64)
        return not getattr(found, "value", found).is_vec

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def store(kernel: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
            if not is_atomic(kernel, mode) or not is_one_place(kernel, index):
                original(kernel, name, index, value, mode)
                return
            vector = value if value.is_vec else kernel.broadcast(value)
            place = f"{kernel.args.output(name)} + {cexpr_index(kernel.rename_indexing(index))}"
            lanes = kernel.tiling_factor
            count = cexpr_index(kernel.tail_size or lanes)
            line = (
                f"{{ __at_align__ {DTYPE_TO_CPP[V.graph.get_dtype(name)]} lanes[{lanes}]; "
                f"{vector}.store(lanes, {count}); "
                f"for (int64_t k = 0; k < {count}; k++) atomic_add({place}, lanes[k]); }}"
            )
            kernel.stores.writeline(DeferredLine(name, line))

        return store

    return wrap(CppVecKernel, "store", around)


MISTAKE = Mistake(
    name="additions_to_one_place",
    issue=160391,
    fix=185325,
    wrong=(
        "With more than one thread, a scatter whose destination has one place along the axis that "
        "is vectorized, such as the sum of a graph's atoms into its one energy, is not compiled: "
        "an AssertionError that has no message."
    ),
    mend=mend,
    fixed="2.15.0",
)
