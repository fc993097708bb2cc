"""The order of passes: the only place where it exists.

    graph without no-ops -> grow -> copy what is better computed inside -> lower -> judge -> put,
    one region at a time

Each accepted region changes the graph, so what can still be fused without a cycle is asked of the
graph as it is. A stage that fails (a fault of ours) refuses its region and leaves the graph as it
was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from normpass.passes import faults, names
from normpass.passes.copies import copy_inputs, take_back
from normpass.passes.cost import Conditions, Work
from normpass.passes.inductor_work import theirs
from normpass.passes.lower import Lowered, NotLowered, lower
from normpass.passes.noops import remove_noops
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
LayOut = Callable[[Lowered], Lowered]
Kernel = Callable[[Lowered, Estimate], Work]
Missing = Callable[[Lowered], "str | None"]
Here = Callable[[str], "Conditions | None"]


def fuse_graph(
    graph: Graph,
    op: Callable[..., object],
    *,
    least_bytes: int | None = None,
    lay_out: LayOut = lambda lowered: lowered,
    kernel: Kernel = lambda lowered, cost: Work(cost.least, 0),
    conditions: Here = lambda device: None,
    missing: Missing = lambda lowered: None,
    rounded: bool = False,
) -> list[Decision]:
    """Fuses every region of a functional ATen graph that pays, in place.

    op: what a fused region calls, `op(inputs, sizes, text) -> list of tensors`.
    least_bytes: regions that move less stay as they are; None for the measured default of the
    device. lay_out: the region with its tensors laid out as the backend will have them. kernel:
    what the backend's kernel for a region would do. conditions: of a
    device, by which that is compared with what Inductor would do; None where nothing was measured.
    missing: why the backend has none, or None.
    rounded: whether results in half precision are rounded where they arise, as in eager mode, or
    only where they are stored.
    """
    decisions: list[Decision] = []
    judge = Judge(graph, op, least_bytes, lay_out, kernel, conditions, missing, rounded)
    try:
        _fuse_all(graph, judge, decisions)
    except Exception as error:  # a fault of ours, of whatever kind, must not cost a user's run
        reason = faults.report("the search for regions", "a graph", error, STAYS)
        decisions.append(Refused("graph", "", "", reason))
    return decisions


STAYS = "What is not fused yet stays with Inductor"


def _fuse_all(graph: Graph, judge: Judge, decisions: list[Decision]) -> None:
    """Grows and judges one region after the other; adds to `decisions`."""
    remove_noops(graph)
    settled: set[Node] = set()  # nodes of refused regions
    grower = Grower(graph)
    for seed in seeds(graph):
        if seed in settled or seed not in grower.reach.order:
            continue
        attempt = Attempt([seed])
        copies: dict[Node, Node] = {}
        try:
            grown = grower.grow(seed)
            if grown is None or settled & set(grown.nodes):
                continue
            attempt.nodes = grown.nodes
            copy_inputs(graph, grown.nodes, copies)
            if copies:
                grown = Grower(graph).grow(seed) or grown
                attempt.nodes = grown.nodes
            decision = judge.decide(grown, attempt)
        except Exception as error:  # see fuse_graph
            decision = attempt.failed(error)
        finally:
            take_back(graph, copies)
        if decision is None:
            continue
        decisions.append(decision)
        if isinstance(decision, Fused):
            grower = Grower(graph)
        else:
            settled.update(node for node in attempt.nodes if kind_of(node) is not Kind.VIEW)


@dataclass
class Attempt:
    """How far a region has come: its nodes, the stage it is in, its name, module and phase."""

    nodes: list[Node]
    stage: str = "growing"
    label: tuple[str, str, str] = ("region", "", "")

    def failed(self, error: Exception) -> Refused:
        """What becomes of the region when a stage raises what it should not."""
        name, module, phase = self.label
        subject = f"{name} of {module or 'the graph'}" + (f" ({phase})" if phase else "")
        reason = faults.report(self.stage, subject, error, "Inductor compiles it instead")
        return Refused(*self.label, reason, tuple(node.name for node in self.nodes))


@dataclass(frozen=True)
class Judge:
    """Decides on grown regions. The fields are those of `fuse_graph`."""

    graph: Graph
    op: Callable[..., object]
    least_bytes: int | None
    lay_out: LayOut
    kernel: Kernel
    conditions: Here
    missing: Missing
    rounded: bool

    def decide(self, grown: Grown, attempt: Attempt) -> Decision | None:
        """Fuses one grown region, or says why not; None if there is nothing of a norm in it."""
        nodes = grown.nodes
        attempt.stage = "naming"
        attempt.label = label = names.name(nodes), names.module(nodes), names.phase(nodes)
        members = tuple(node.name for node in nodes)
        try:
            attempt.stage = "lowering"
            lowered = lower(label[0], nodes, grown.domain, rounded=self.rounded)
            if not has_inner_reduction(lowered):
                return None
            attempt.stage = "laying out its tensors"
            lowered = self.lay_out(lowered)
            attempt.stage = "weighing"
            cost = estimate(lowered, nodes)

            def planned() -> Work:
                attempt.stage = "planning the kernel"
                return self.kernel(lowered, cost)

            stock = partial(theirs, nodes, grown.domain, lowered, cost.sizes)
            here = self.conditions(lowered.device)
            reason = refusal(lowered, cost, planned, stock, here, least_bytes=self.least_bytes)
            if reason is None:
                attempt.stage = "planning the kernel"
                reason = self.missing(lowered)
            if reason is not None:
                return Refused(*label, reason, members)
            attempt.stage = "rewriting"
            call = put(self.graph, nodes, lowered, self.op)
        except (NotLowered, SizeUnknown) as error:
            return Refused(*label, str(error), members) if names.inner_reductions(nodes) else None
        return Fused(
            *label, str(lowered.region), cost, lowered.device, cost.sizes, members, call.name
        )
