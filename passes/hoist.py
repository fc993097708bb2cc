"""What a region leaves to be computed before it, because it would compute it again and again.

A bias of a window, [heads, rows, columns], is the same for every window and every image. Inside of
the softmax over windows its sigmoid would be computed for each of them; outside it is computed
once, and the region reads it from a cache. That pays where the functions are dear. The one of
1 + weight is not, and stays inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy

from normpass.passes.axis_names import locally_reduced
from normpass.passes.regions import Grown
from normpass.passes.sizes import expected
from normpass.passes.vocabulary import EXPENSIVE, FUNCTIONS, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from torch.fx import Node

    from normpass.passes.domain import Domain

# It has at most so small a part of the elements for which it would be computed.
FEW = 1 / 16
# Fewer evaluations cost less than the kernel that computes them once.
LEAST_EVALUATIONS = 64 * 1024


def left_outside(grown: Grown) -> Grown:
    """The region without what is better computed before it, which is all that it is computed from
    in the region as well: the rest stays convex.
    """
    nodes, domain = grown.nodes, grown.domain
    inside = set(nodes)
    local = locally_reduced(nodes, domain)
    outside: set[Node] = set()
    for node in reversed(_without_reductions(nodes)):
        if node not in outside and _is_repeated(node, nodes, domain, local):
            cone = _cone(node, inside)
            if any(FUNCTIONS.get(each.target) in EXPENSIVE for each in cone):
                outside |= cone
    return Grown([node for node in nodes if node not in outside], domain) if outside else grown


def _without_reductions(nodes: Sequence[Node]) -> list[Node]:
    """Those that are pointwise in what the region reads."""
    inside = set(nodes)
    found: dict[Node, None] = {}
    for node in nodes:
        args = inside.intersection(node.all_input_nodes)
        if kind_of(node) in (Kind.POINTWISE, Kind.VIEW) and args <= found.keys():
            found[node] = None
    return list(found)


def _is_repeated(node: Node, nodes: Sequence[Node], domain: Domain, local: set[int]) -> bool:
    """Whether a value is computed for many more elements than it has.

    A kernel computes it in the innermost loop that it needs: along all axes that no row is made of,
    and those of the row that it varies over.
    """
    varies = set(domain.axes(node))
    rows = {axis for each in nodes for axis in domain.axes(each)} - local
    evaluations = _elements(domain, varies | rows)
    return evaluations >= LEAST_EVALUATIONS and _elements(domain, varies) <= FEW * evaluations


def _elements(domain: Domain, axes: Iterable[int]) -> int:
    return expected(sympy.prod(domain.extent(axis) for axis in axes))


def _cone(node: Node, inside: Container[Node]) -> set[Node]:
    """A node of a region and all that it is computed from there."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in inside and each not in found:
            found.add(each)
            waiting += each.all_input_nodes
    return found
