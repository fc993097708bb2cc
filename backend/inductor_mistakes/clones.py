"""A copy that was made of an input before it changes is taken for the input.

Checked on torch 2.11, 2.13 and 2.15: fx_passes.post_grad.remove_noop_ops and noop_registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor_mistakes.mistake import Mistake, decision, wrap
from normpass.backend.inductor_mistakes.nodes import hidden, storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

    from normpass.backend.inductor_mistakes.mistake import Undo

aten = torch.ops.aten
ISSUE = 198131


def mend() -> Undo:
    from torch._inductor.fx_passes import post_grad

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def remove_noop_ops(graph: Graph, *args: Any, **kwargs: Any) -> None:
            with hidden(_copies_of_written_inputs(graph)):
                original(graph, *args, **kwargs)

        return remove_noop_ops

    return wrap(post_grad, "remove_noop_ops", around)


@decision(ISSUE, otherwise=[], right=False)
def _copies_of_written_inputs(graph: Graph) -> list[Node]:
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {storage(write.args[0]) for write in writes} - {None}
    return [
        node
        for op, source in ((aten.clone.default, 0), (aten.copy.default, 1))
        for node in graph.find_nodes(op="call_function", target=op)
        if storage(node.args[source]) in written
    ]


MISTAKE = Mistake(
    name="clones_of_inputs",
    issue=ISSUE,
    fix=198132,
    wrong=(
        "Where a graph writes to its inputs, a clone of one is removed as if nothing could change "
        "what it was made of: two buffers that swap their values become one, and a row shift reads "
        "what it has written (197829)."
    ),
    mend=mend,
    fixed="2.15.0",
)
