"""What mends ask about nodes of a graph.

Checked on torch 2.11, 2.13 and 2.15: fx_utils.get_node_storage.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch.fx import Node

aten = torch.ops.aten
# Of all elements of what they are made of.
VIEWS = (
    aten.alias.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
)


def storage(node: Any) -> int | None:
    """What is alike for nodes that share memory; None for what has none."""
    from torch._inductor.fx_utils import get_node_storage

    return get_node_storage(node) if isinstance(node, torch.fx.Node) else None


def before(node: Any, targets: Collection[Any]) -> Any:
    """What a node is made of by calls of these targets on their first argument alone."""
    while isinstance(node, torch.fx.Node) and node.target in targets:
        node = node.args[0]
    return node


@contextmanager
def hidden(nodes: Sequence[Node]) -> Iterator[None]:
    """Keeps nodes from a pass for the length of a block: they call what no pass knows."""
    targets = [node.target for node in nodes]
    for node in nodes:
        node.target = _hidden
    try:
        yield
    finally:
        for node, target in zip(nodes, targets, strict=True):
            node.target = target


def _hidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a graph runs only after its targets are put back")
