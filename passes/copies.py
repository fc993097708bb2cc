"""What a region computes again inside, because it is cheaper there than having it written.

The gradient of a residual block is added to what its norm makes of it, and goes to the next norm as
well: x + f(x), where f is no region's. Inductor computes the sum of what it is made of wherever it
is used. A region that has all of x but f cannot have the sum inside, since a path leads out and
back in, and so x would be written for the region's sake. It gets a copy of its own instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.passes.made import is_loop, only_computed_for
from normpass.passes.regions import fusable
from normpass.passes.sizes import nbytes
from normpass.passes.vocabulary import CHEAP, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from torch.fx import Graph, Node

# What is computed again takes at most so many operations an element.
MOST_OPERATIONS = 4


def copy_inputs(
    graph: Graph,
    nodes: Sequence[Node],
    copies: dict[Node, Node],
    barred: AbstractSet[Node] = frozenset(),
) -> None:
    """Gives a region copies of what it reads and others compute too.

    nodes: the region's, in the graph's order. copies: gets each copy with the node it is of; they
    are not in the region yet, but its own. barred: what the region must not hold.
    """
    inside = set(nodes)
    reads = dict.fromkeys(
        arg for node in nodes for arg in node.all_input_nodes if arg not in inside
    )
    copied: dict[Node, Node] = {}  # node -> its copy
    for x in reads:
        cone = _cone(x) if _is_tensor(x) and only_computed_for(x, inside) else []
        if cone and barred.isdisjoint(cone) and _reads_less(x, cone, set(reads)):
            for node in cone:
                if node not in copied:
                    with graph.inserting_after(node):
                        copied[node] = graph.node_copy(node, lambda arg: copied.get(arg, arg))
                    copies[copied[node]] = node
            x.replace_all_uses_with(copied[x], delete_user_cb=inside.__contains__)


def take_back(graph: Graph, copies: dict[Node, Node]) -> None:
    """Takes copies out of a graph that are in no region."""
    left = set(graph.nodes)
    for copy, node in reversed(copies.items()):
        if copy in left:
            copy.replace_all_uses_with(node)
            graph.erase_node(copy)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _cone(x: Node) -> list[Node]:
    """The nodes that compute a tensor from what is in memory anyway, in order; none if they are too
    many or too expensive, or a region may not hold them.
    """
    found: dict[Node, None] = {}
    waiting = [x]
    while waiting:
        node = waiting.pop()
        if node in found or not (is_loop(node) or kind_of(node) is Kind.VIEW):
            continue
        is_cheap = node.target in CHEAP or kind_of(node) is Kind.VIEW
        if not is_cheap or not fusable(node):
            return []
        found[node] = None
        waiting += node.all_input_nodes
    operations = sum(kind_of(node) is Kind.POINTWISE for node in found)
    order = {node: place for place, node in enumerate(x.graph.nodes) if node in found}
    return sorted(found, key=order.__getitem__) if operations <= MOST_OPERATIONS else []


def _reads_less(x: Node, cone: Sequence[Node], reads: set[Node]) -> bool:
    """Whether what it is made of is less to read than it is to write and read."""
    sources = {arg for node in cone for arg in node.all_input_nodes} - set(cone) - reads
    return sum(nbytes(arg) for arg in sources if _is_tensor(arg)) <= 2 * nbytes(x)
