"""Names of a region's axes: single letters, others for local axes than for parallel ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.passes.vocabulary import Kind, kind_of, reduced_dims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from normpass.passes.domain import Domain

LOCAL_NAMES = ("c", "d", "e", "f")  # axes that inner reductions reduce
PARALLEL_NAMES = ("r", "q", "n", "m")


def name_axes(nodes: Sequence[Node], domain: Domain) -> dict[int, str]:
    """Every axis of the nodes and what they read, in the order of the largest tensor."""
    largest = max(nodes, key=lambda node: len(domain.axes(node)))
    order = list(domain.axes(largest))
    for node in domain.dims:
        order += [axis for axis in domain.axes(node) if axis not in order]
    needed = {
        axis
        for node in (*nodes, *(a for n in nodes for a in n.all_input_nodes))
        if node in domain.dims
        for axis in domain.axes(node)
    }
    local = locally_reduced(nodes, domain)
    pools = {True: iter(LOCAL_NAMES), False: iter(PARALLEL_NAMES)}
    names: dict[int, str] = {}
    for axis in (axis for axis in order if axis in needed):
        names[axis] = next(pools[axis in local], None) or f"k{len(names)}"
    return names


def reduced_axes(node: Node, domain: Domain) -> tuple[int, ...]:
    """The axes that a reduction reduces."""
    dims, _ = reduced_dims(node)
    return tuple(
        axis
        for k, dim in enumerate(domain.dims[node.all_input_nodes[0]])
        if k in dims
        for axis in domain.resolve(dim)
    )


def locally_reduced(nodes: Sequence[Node], domain: Domain) -> set[int]:
    """Axes of reductions whose result is broadcast over them again."""
    behind: dict[Node, set[int]] = {}
    local: set[int] = set()
    for node in nodes:
        reached = set().union(*(behind.get(arg, set()) for arg in node.all_input_nodes))
        if kind_of(node) is Kind.REDUCTION:
            reached = reached | set(reduced_axes(node, domain))
        else:
            local |= reached & set(domain.axes(node))
        behind[node] = reached
    return local
