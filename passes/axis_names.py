"""Names of a region's axes: single letters, others for local axes than for parallel ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.passes.vocabulary import Kind, kind_of, reduced_dims

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from torch.fx import Node

    from normpass.passes.domain import Dims, Domain

# Axes that inner reductions reduce, and those of rows; n and c are a batch norm's, which reduces
# the outer one of both.
LOCAL_NAMES = ("c", "d", "e", "f")
BATCH_NAMES = ("n", "m")
ROW_NAMES = ("r", "q", "k", "l")


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
    return _named([axis for axis in order if axis in needed], local)


def _named(axes: Sequence[int], local: AbstractSet[int]) -> dict[int, str]:
    """Names for axes in order."""
    channels = _channels(axes, local)
    batch = set(axes[: axes.index(channels)] if channels is not None else ()) & local
    pools = {
        names: iter(name for name in names if channels is None or name != "c")
        for names in (LOCAL_NAMES, BATCH_NAMES, ROW_NAMES)
    }
    found: dict[int, str] = {}
    for axis in axes:
        pool = BATCH_NAMES if axis in batch else LOCAL_NAMES if axis in local else ROW_NAMES
        name = "c" if axis == channels else next(pools[pool], None)
        found[axis] = name or f"k{len(found)}"
    return found


def _channels(axes: Sequence[int], local: AbstractSet[int]) -> int | None:
    """A batch norm's: the first of a row's axes inside of local ones, if there are others inside of
    it, or none of a row's outside. Else it is a pixel's, of a norm over channels.
    """
    is_local = [axis in local for axis in axes]
    if True not in is_local:
        return None
    first = is_local.index(True)
    inside = [k for k in range(first, len(axes)) if not is_local[k]]
    if inside and (first == 0 or any(is_local[inside[0] :])):
        return axes[inside[0]]
    return None


def reduced_axes(node: Node, domain: Domain) -> tuple[int, ...]:
    """The axes that a reduction reduces."""
    return domain.axes_of(_reduced(node, domain))


def reduced_and_joined(node: Node, domain: Domain) -> set[int]:
    """The axes that a reduction reduces, and those that pieces of them make up."""
    dims = _reduced(node, domain)
    return {*domain.axes_of(dims), *domain.whole_axes_of(dims)}


def _reduced(node: Node, domain: Domain) -> Dims:
    dims, _ = reduced_dims(node)
    source = domain.dims[node.all_input_nodes[0]]
    return tuple(dim for k, dim in enumerate(source) if k in dims)


def locally_reduced(nodes: Sequence[Node], domain: Domain) -> set[int]:
    """Axes of reductions whose result is broadcast over them again, and what pieces of them make
    up.
    """
    behind: dict[Node, set[int]] = {}
    local: set[int] = set()
    for node in nodes:
        reached = set().union(*(behind.get(arg, set()) for arg in node.all_input_nodes))
        if kind_of(node) is Kind.REDUCTION:
            reached = reached | reduced_and_joined(node, domain)
        else:
            local |= reached & {*domain.axes(node), *domain.whole_axes(node)}
        behind[node] = reached
    return local
