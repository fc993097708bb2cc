"""What a refused region leaves out when it is grown again: what is at fault, and what hangs on it.

A node that cannot be lowered stays outside; so do those that bring in a size which no tensor tells.
A tensor that would be written for the region's sake, where Inductor computes it in one loop with
what uses it, goes with all that is computed from it up to a tensor that is in memory anyway: of
norm(x + dropout(y)) the norm is fused alone where x + dropout(y) is saved. Of several such cuts the
one is taken that saves most bytes. Whether what is left pays, profit.py decides as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normpass.passes.domain import extent_of, step_of
from normpass.passes.escapes import outputs_of
from normpass.passes.made import only_computed_for
from normpass.passes.rewrite import SizeUnknown
from normpass.passes.sizes import nbytes
from normpass.passes.vocabulary import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    import sympy
    from torch.fx import Node

    from normpass.passes.values import NotLowered

# So often a region is grown again before it is given up.
MOST_TRIES = 3


@dataclass(frozen=True)
class Fault:
    """Why a region is refused, as far as a smaller one could do better.

    inputs: what would be written for its sake. node: what cannot be lowered, of its nodes or what
    they read. size: a run-time size that is nowhere. unknown: whether it may be anything.
    """

    inputs: tuple[Node, ...] = ()
    node: Node | None = None
    size: sympy.Expr | None = None
    unknown: bool = False

    @classmethod
    def of(cls, error: NotLowered | SizeUnknown) -> Fault:
        if isinstance(error, SizeUnknown):
            return cls(size=error.size)
        return cls(node=error.node)

    def __bool__(self) -> bool:
        """Whether there is any: what is too small has none, since a part of it is smaller still."""
        return bool(self.inputs) or self.node is not None or self.size is not None or self.unknown


def left_out(seed: Node, nodes: Sequence[Node], fault: Fault) -> set[Node]:
    """The nodes that the next region around a seed must not have; none if nothing helps.

    nodes: the refused region's, in the graph's order.
    """
    if fault.size is not None:
        cut = _bringing(fault.size, nodes)
    elif fault.node is not None and _is_double(fault.node) and not _is_double(seed):
        cut = _double(nodes)
    elif fault.node is not None:
        cut = {fault.node} & {*nodes} or _reading((fault.node,), nodes)
    else:
        cut = _best_cut(seed, nodes, fault.inputs)
    return set() if seed in with_what_feeds_it(cut) else cut


def with_what_feeds_it(barred: AbstractSet[Node]) -> set[Node]:
    """What a region must not have, and what nobody else needs: it would be written for that."""
    found = set(barred)
    waiting = list(barred)
    while waiting:
        for arg in waiting.pop().all_input_nodes:
            if arg not in found and found.issuperset(arg.users):
                found.add(arg)
                waiting.append(arg)
    return found


def _reading(sources: Collection[Node], nodes: Sequence[Node]) -> set[Node]:
    return {node for node in nodes if not set(sources).isdisjoint(node.all_input_nodes)}


def _double(nodes: Sequence[Node]) -> set[Node]:
    """All that is computed in float64, as the scale of a quantization is, and what is rounded from
    it: with one of them outside the next would be at fault.
    """
    found = set(filter(_is_double, nodes))
    return found | _reading(found, nodes)


def _is_double(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def _bringing(size: sympy.Expr, nodes: Sequence[Node]) -> set[Node]:
    """The nodes whose results have a size that nothing they read has."""
    return {
        node
        for node in nodes
        if size in _sizes(node) and not any(size in _sizes(arg) for arg in node.all_input_nodes)
    }


def _sizes(node: Node) -> set[sympy.Expr]:
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return set()
    return {*map(extent_of, tensor.shape), *map(step_of, tensor.stride())}


# ---- inputs


def _best_cut(seed: Node, nodes: Sequence[Node], inputs: Sequence[Node]) -> set[Node]:
    """The cut that saves most bytes, or loses fewest; none if as much as before would be written
    for the region's sake.
    """
    outputs = set(outputs_of(nodes))
    best: set[Node] = set()
    most = 0
    for some in (inputs, *((x,) for x in inputs if len(inputs) > 1)):
        saved = sum(2 * nbytes(x) for x in some)
        for cut in _cuts(seed, nodes, some):
            if sum(2 * nbytes(x) for x in _written(cut, nodes)) < saved:
                less = saved - _costs(cut, nodes, outputs)
                if less > most or not best:
                    best, most = cut, less
    return best


def _cuts(seed: Node, nodes: Sequence[Node], inputs: Sequence[Node]) -> Iterator[set[Node]]:
    """What reads some inputs; then more and more of what depends on it, as long as something would
    be written for the region's sake, and as its seed stays.
    """
    cut: set[Node] = set()
    more = _with_views(_reading(inputs, nodes), nodes)
    while seed not in more and not more <= cut:
        cut = cut | more
        yield cut
        written = _with_views(_written(cut, nodes), nodes)
        more = _with_views(_reading(written, nodes), nodes)


def _with_views(found: set[Node], nodes: Sequence[Node]) -> set[Node]:
    """Nodes and the views of their results, which are the same tensors."""
    for node in nodes:
        if kind_of(node) is Kind.VIEW and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _written(cut: AbstractSet[Node], nodes: Sequence[Node]) -> set[Node]:
    """What would be written for a region's sake once something is cut off from it."""
    rest = set(nodes) - cut
    return {node for node in _sources(rest, nodes) & cut if only_computed_for(node, rest)}


def _costs(cut: AbstractSet[Node], nodes: Sequence[Node], outputs: AbstractSet[Node]) -> int:
    """Bytes that are moved because something was cut off from a region: what goes from one to the
    other is read, and written too if nobody else needs it; what both read is read twice.

    outputs: what the region writes as it is.
    """
    rest = set(nodes) - cut
    for_cut, for_rest = _sources(cut, nodes), _sources(rest, nodes)
    read = for_rest & cut | for_cut & rest | (for_cut & for_rest).difference(nodes)
    written = _written(cut, nodes) | (for_cut & rest) - outputs
    return sum(map(nbytes, read)) + sum(map(nbytes, written))


def _sources(some: AbstractSet[Node], nodes: Sequence[Node]) -> set[Node]:
    """The tensors that some of a region's nodes read, where views of them stand for themselves."""
    inside = set(nodes)
    found = set()
    for node in some:
        if kind_of(node) is not Kind.VIEW:
            for arg in node.all_input_nodes:
                while arg in inside and kind_of(arg) is Kind.VIEW:
                    arg = arg.all_input_nodes[0]
                if isinstance(arg.meta.get("val"), torch.Tensor):
                    found.add(arg)
    return found
