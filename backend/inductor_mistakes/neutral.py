"""x + 0, x * 1 and x / 1 are handed out as x itself.

Checked on torch 2.11, 2.13 and 2.15: fx_passes.joint_graph.remove_no_ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor_mistakes.mistake import Mistake, decision, wrap
from normpass.backend.inductor_mistakes.nodes import hidden, storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node

    from normpass.backend.inductor_mistakes.mistake import Undo

aten = torch.ops.aten
ISSUE = 197893
WITH_NEUTRAL_ELEMENT = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def mend() -> Undo:
    from torch._inductor.fx_passes import joint_graph

    def around(original: Callable[..., None]) -> Callable[..., None]:
        def remove_no_ops(module: GraphModule, *args: Any, **kwargs: Any) -> None:
            with hidden(_handed_out(module.graph)):
                original(module, *args, **kwargs)

        return remove_no_ops

    return wrap(joint_graph, "remove_no_ops", around)


@decision(ISSUE, otherwise=[], right=False)
def _handed_out(graph: Graph) -> list[Node]:
    """Results, and what results are views of: eager makes a tensor of its own for each. Where the
    operation is not neutral, or x is a tensor that nobody else gets, Inductor fuses it as ever.
    """
    (output,) = graph.find_nodes(op="output")
    results = {storage(result) for result in output.all_input_nodes} - {None}
    return [
        node
        for target in WITH_NEUTRAL_ELEMENT
        for node in graph.find_nodes(op="call_function", target=target)
        if storage(node) in results
    ]


MISTAKE = Mistake(
    name="neutral_results",
    issue=ISSUE,
    fix=None,
    wrong=(
        "A result x + 0, x * 1 or x / 1 (before 2.14 only with a tensor of zeros or ones) is x "
        "itself, an input or another result: who writes to one of them, as with an in-place "
        "operation on logits / temperature, changes the other."
    ),
    mend=mend,
)
