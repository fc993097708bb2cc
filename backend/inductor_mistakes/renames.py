"""A scheduler node forgets what its buffers are called after a mutation.

Checked on torch 2.11, 2.13 and 2.15: SchedulerNode.recompute_size_and_body, read_writes,
set_read_writes and mutation_renames, and ReadWrites.rename and with_read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.backend.inductor_mistakes.mistake import Mistake, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.backend.inductor_mistakes.mistake import Undo


def mend() -> Undo:
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
            added = OrderedSet(
                dep for dep in node.read_writes.reads if isinstance(dep, StarDep | WeakDep)
            )
            original(node, *args, **kwargs)
            found = node.read_writes
            # Torch 2.13 does all of it where dependencies had been added, and 2.11 none of it.
            # Renaming twice could take a name one mutation too far.
            if added and added <= found.reads:
                return
            node.set_read_writes(found.with_read(added).rename(node.mutation_renames))

        return recompute_size_and_body

    return wrap(SchedulerNode, "recompute_size_and_body", around)


MISTAKE = Mistake(
    name="forgotten_renames",
    issue=185509,
    fix=185873,
    wrong=(
        "When loops are fused, a node's dependencies are read anew from its body, and those on a "
        "buffer that was mutated get its name from before the mutation: code that reads a "
        "scattered buffer may run before the scatter. Gradients of UNet2DConditionModel are wrong."
    ),
    mend=mend,
    fixed="2.14.1",
)
