"""A scatter is written into a graph's input, and the input is overwritten with something else.

Checked on torch 2.11, 2.13 and 2.15: what in_place.py uses, and that writes to a graph's inputs are
aten.copy_ at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor_mistakes.in_place import only_in_place_if, scatters
from normpass.backend.inductor_mistakes.mistake import Mistake, decision
from normpass.backend.inductor_mistakes.nodes import VIEWS, storage

if TYPE_CHECKING:
    from torch.fx import Node

    from normpass.backend.inductor_mistakes.mistake import Undo

aten = torch.ops.aten
ISSUE = 198094


def mend() -> Undo:
    return only_in_place_if(_is_what_remains)


@decision(ISSUE, otherwise=False)
def _is_what_remains(node: Node) -> bool:
    """What the input becomes in the end is what this scatter, and others on it, made of it."""
    place = storage(node.args[0])
    writes = node.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return place is None or all(
        _comes_from(write.args[1], node) for write in writes if storage(write.args[0]) == place
    )


def _comes_from(source: Any, node: Node) -> bool:
    while isinstance(source, torch.fx.Node) and source is not node:
        if source.target not in (*VIEWS, *scatters()):
            return False
        source = source.args[0]
    return source is node


MISTAKE = Mistake(
    name="overwritten_scatters",
    issue=ISSUE,
    fix=198096,
    wrong=(
        "A scatter into a graph's input is written into the input itself, which is overwritten "
        "while the scatter's result, or another reading of the input (198270), is still needed."
    ),
    mend=mend,
)
