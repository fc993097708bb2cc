"""The order of passes: the only place where it exists.

    graph -> grow -> lower -> judge -> put, one region at a time

Each accepted region changes the graph, so what can still be fused without a cycle is asked of the
graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normpass.passes import names
from normpass.passes.lower import Lowered, NotLowered, lower
from normpass.passes.profit import Estimate, estimate, has_inner_reduction, refusal
from normpass.passes.regions import Grower, Grown, seeds
from normpass.passes.rewrite import SizeUnknown, put
from normpass.passes.vocabulary import Kind, kind_of

if TYPE_CHECKING:
    from torch.fx import Graph, Node


@dataclass(frozen=True)
class Fused:
    """A region that became one op.

    sizes: its run-time sizes in the example the graph was traced with. nodes: what it replaced, by
    name. call: the node that is there now.
    """

    name: str
    module: str
    phase: str
    text: str
    estimate: Estimate
    device: str
    sizes: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    call: str = ""


@dataclass(frozen=True)
class Refused:
    """A norm that stays as it is, and why."""

    name: str
    module: str
    phase: str
    reason: str
    nodes: tuple[str, ...] = ()


Decision = Fused | Refused
Accept = Callable[[Lowered, Estimate], "str | None"]


def fuse_graph(
    graph: Graph,
    op: Callable[..., object],
    *,
    least_bytes: int | None = None,
    accept: Accept = lambda lowered, cost: None,
) -> list[Decision]:
    """Fuses every region of a functional ATen graph that pays, in place.

    op: what a fused region calls, `op(inputs, sizes, text) -> list of tensors`.
    least_bytes: regions that move less stay as they are; None for the measured default of the
    device. accept: the backend's say: a reason against a region, or None.
    """
    decisions: list[Decision] = []
    settled: set[Node] = set()  # nodes of refused regions
    grower = Grower(graph)
    for seed in seeds(graph):
        if seed in settled or seed not in grower.reach.order:
            continue
        grown = grower.grow(seed)
        if grown is None or settled & set(grown.nodes):
            continue
        decision = _decide(graph, grown, op, least_bytes, accept)
        if decision is None:
            continue
        decisions.append(decision)
        if isinstance(decision, Fused):
            grower = Grower(graph)
        else:
            settled.update(node for node in grown.nodes if kind_of(node) is not Kind.VIEW)
    return decisions


def _decide(
    graph: Graph,
    grown: Grown,
    op: Callable[..., object],
    least_bytes: int | None,
    accept: Accept,
) -> Decision | None:
    """Fuses one grown region, or says why not; None if there is nothing of a norm in it."""
    nodes = grown.nodes
    label = names.name(nodes), names.module(nodes), names.phase(nodes)
    members = tuple(node.name for node in nodes)
    try:
        lowered = lower(label[0], nodes, grown.domain)
        if not has_inner_reduction(lowered):
            return None
        cost = estimate(lowered, nodes)
        reason = refusal(lowered, cost, least_bytes=least_bytes) or accept(lowered, cost)
        if reason is not None:
            return Refused(*label, reason, members)
        call = put(graph, nodes, lowered, op)
    except (NotLowered, SizeUnknown) as error:
        return Refused(*label, str(error), members) if names.inner_reductions(nodes) else None
    device = lowered.inputs[0].meta["val"].device.type
    return Fused(*label, str(lowered.region), cost, device, cost.sizes, members, call.name)
