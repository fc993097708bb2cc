"""Saved tensors that a backward alone has: Inductor writes over them once they are read.

AOTAutograd says which they are: neither the caller's nor results that he was given. Private:
torch._inductor.utils.get_donated_idxs, checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.passes.names import is_backward

if TYPE_CHECKING:
    from torch.fx import Graph, Node


def donated(graph: Graph) -> frozenset[Node]:
    """Of the inputs of a graph that is being compiled."""
    if not is_backward(graph):
        return frozenset()
    inputs = graph.find_nodes(op="placeholder")
    return frozenset(inputs[k] for k in numbers())


def numbers() -> tuple[int, ...]:
    """Which inputs of the backward graph that is being compiled. Inductor's cache does not know its
    graphs by that.
    """
    from torch._inductor.utils import get_donated_idxs

    return tuple(get_donated_idxs() or ())
