"""Rows that a tile computes together share one row of a local buffer.

Checked on torch 2.11, 2.13 and 2.15: OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
(False: loops are not fused and buffers not local), V.local_buffer_context.local_buffers, and
CppKernelProxy.loop_nest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.backend.inductor_mistakes.mistake import Mistake, decision, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.backend.inductor_mistakes.mistake import Undo

ISSUE = 185702


def mend() -> Undo:
    from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode

    def around(original: Callable[..., bool]) -> Callable[..., bool]:
        def check_outer_fusion_loop_level_attr(
            node: Any, proxies: Sequence[Any], depth: int
        ) -> bool:
            return not _share_rows(proxies, depth) and original(node, proxies, depth)

        return check_outer_fusion_loop_level_attr

    return wrap(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", around)


@decision(ISSUE, otherwise=True)
def _share_rows(proxies: Sequence[Any], depth: int) -> bool:
    """A local buffer has the sizes of the inner loops only."""
    from torch._inductor.virtualized import V

    outer = (loop for proxy in proxies for loop in proxy.loop_nest.loops[:depth])
    local_buffers = V.local_buffer_context.local_buffers
    return bool(local_buffers) and any(loop.steps != 1 for loop in outer)


MISTAKE = Mistake(
    name="shared_rows",
    issue=ISSUE,
    fix=185855,
    wrong=(
        "Where outer loops are fused, what only the inner loops pass on to each other lies in a "
        "buffer as large as the inner loops, and a tile of several outer elements writes them all "
        "to the same place. Gradients of two layer norms of a transposed tensor are wrong."
    ),
    mend=mend,
    fixed="2.15.0",
)
