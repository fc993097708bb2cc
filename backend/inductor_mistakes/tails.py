"""Reductions write more than there is left at the end of a row.

Checked on torch 2.11, 2.13 and 2.15: CppKernelProxy.aggregate_reduction_buffers, kernels and
loop_nest, and CppTile2DKernel.tiling_indices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.backend.inductor_mistakes.mistake import Mistake, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.backend.inductor_mistakes.mistake import Undo


def mend() -> Undo:
    from torch._inductor.codegen.cpp import CppKernelProxy, CppTile2DKernel

    def reduces_inside(proxy: Any) -> bool:
        main = proxy.kernels[0]
        if not isinstance(main, CppTile2DKernel):
            return False
        outer, inner = (proxy.loop_nest.loops[i].is_reduction for i in main.tiling_indices)
        return inner and not outer

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def aggregate_reduction_buffers(proxy: Any, split: bool, outer_loop: Any) -> None:
            # Split, the main kernel and that of the tail store their own elements each. Torch looks
            # for the reduction in the loop after the outer one instead of in the other tiled one.
            split = split or (outer_loop is not None and reduces_inside(proxy))
            original(proxy, split, outer_loop)

        return aggregate_reduction_buffers

    return wrap(CppKernelProxy, "aggregate_reduction_buffers", around)


MISTAKE = Mistake(
    name="tails_of_tiles",
    issue=196681,
    fix=196882,
    wrong=(
        "A reduction in tiles of two dimensions, with another loop between them, stores a whole "
        "vector where the output's last one is shorter: over the next row, and beyond the buffer."
    ),
    mend=mend,
)
