"""The order of passes: the only place where it exists.

    graph without no-ops -> grow -> copy what is better computed inside -> leave outside
    what is better computed once -> cut what is read in pieces -> lower -> judge -> put, one region
    at a time, in pieces first; what is refused is grown again without what is at fault

Each accepted region changes the graph, so what can still be fused without a cycle is asked of the
graph as it is. A stage that fails (a fault of ours) refuses its region and leaves the graph as it
was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from normpass.passes import faults, names
from normpass.passes.copies import copy_inputs, take_back
from normpass.passes.cost import Conditions, Work
from normpass.passes.hoist import left_outside
from normpass.passes.inductor_work import theirs
from normpass.passes.lower import Lowered, lower
from normpass.passes.noops import remove_noops
from normpass.passes.pieces import Cut, Cuts, fits, parts_of_what_is_read
from normpass.passes.profit import Estimate, estimate, has_inner_reduction, overwritten, refusal
from normpass.passes.regions import Grower, Grown, seeds
from normpass.passes.rewrite import SizeUnknown, put
from normpass.passes.shrink import MOST_TRIES, Fault, left_out, with_what_feeds_it
from normpass.passes.values import NotLowered
from normpass.passes.vocabulary import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

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
    donated: Container[Node] = (),
) -> list[Decision]:
    """Fuses every region of a functional ATen graph that pays, in place.

    op: what a fused region calls, `op(inputs, sizes, text) -> list of tensors`.
    least_bytes: regions that move less stay as they are; None for the measured default of the
    device. lay_out: the region with its tensors laid out as the backend will have them. kernel:
    what the backend's kernel for a region would do; it raises NotImplementedError where there is
    none. conditions: of a device, by which that is compared with what Inductor would do; None where
    nothing was measured. missing: why the backend has none, or None. rounded: whether results in
    half precision are rounded where they arise, as in eager mode, or only where they are stored.
    donated: inputs that Inductor may write over.
    """
    decisions: list[Decision] = []
    judge = Judge(graph, op, least_bytes, lay_out, kernel, conditions, missing, rounded, donated)
    try:
        _fuse_all(graph, judge, decisions)
    except Exception as error:  # a fault of ours, of whatever kind, must not cost a user's run
        reason = faults.report("the search for regions", "a graph", error, STAYS)
        decisions.append(Refused("graph", "", "", reason))
    return decisions


STAYS = "What is not fused yet stays with Inductor"
PLANNING = "planning the kernel"


def _fuse_all(graph: Graph, judge: Judge, decisions: list[Decision]) -> None:
    """Grows and judges one region after the other; adds to `decisions`."""
    remove_noops(graph)
    search = Search(graph, judge)
    try:
        search.run()
    finally:
        decisions += one_line_a_norm(graph, search.attempts)


@dataclass
class Attempt:
    """How far a region has come: its nodes and norms (their reductions), the stage it is in, its
    name, module and phase; what was decided, what was at fault, and what to leave out next.
    """

    nodes: list[Node]
    norms: list[Node]
    stage: str = "growing"
    label: tuple[str, str, str] = ("region", "", "")
    decision: Decision | None = None
    fault: Fault = field(default_factory=Fault)
    left_out: set[Node] = field(default_factory=set)

    def failed(self, error: Exception) -> Refused:
        """What becomes of the region when a stage raises what it should not."""
        name, module, phase = self.label
        subject = f"{name} of {module or 'the graph'}" + (f" ({phase})" if phase else "")
        reason = faults.report(self.stage, subject, error, "Inductor compiles it instead")
        self.fault = Fault(unknown=True)
        return Refused(*self.label, reason, tuple(node.name for node in self.nodes))


class Search:
    """The regions of one graph, one after the other.

    A region that is refused is grown again without what is at fault, a few times. If that does not
    help, its seed is settled: no region gets it, but those of its other reductions may do without.
    Where nothing is at fault they are settled too.
    """

    def __init__(self, graph: Graph, judge: Judge) -> None:
        self.graph = graph
        self.judge = judge
        self.grower = Grower(graph)
        self.has_parts = any(kind_of(node) is Kind.PART for node in graph.nodes)
        self.settled: set[Node] = set()
        self.attempts: list[Attempt] = []

    def run(self) -> None:
        """Tries every reduction as a seed. `attempts` has what was decided."""
        for seed in seeds(self.graph):
            if seed in self.settled or seed not in self.grower.reach.order:
                continue
            attempt = self.best(seed)
            if attempt.decision is not None:
                self.attempts.append(attempt)
            if isinstance(attempt.decision, Fused):
                self.grower = Grower(self.graph)

    def best(self, seed: Node) -> Attempt:
        """The first region around a seed that is accepted, the largest first; else the largest."""
        if self.has_parts:
            piecewise = self.attempt(seed, self.settled, in_pieces=True)
            if isinstance(piecewise.decision, Fused):
                return piecewise
        first = last = self.attempt(seed, self.settled)
        barred = set(self.settled)
        for _ in range(MOST_TRIES):
            if isinstance(last.decision, Fused) or not last.left_out:
                break
            barred |= last.left_out
            last = self.attempt(seed, barred)
        if isinstance(last.decision, Fused):
            return last
        if isinstance(first.decision, Refused):
            self.settled.add(seed)
        if isinstance(last.decision, Refused) and not last.fault:
            self.settled.update(node for node in last.nodes if kind_of(node) is Kind.REDUCTION)
        return first

    def grow(self, grower: Grower, seed: Node, barred: set[Node], in_pieces: bool) -> Grown | None:
        """The region around a seed; in pieces with parts of what it reads, if it fits so, else only
        with parts of what it computes.
        """
        grown = grower.grow(seed, barred, in_pieces=in_pieces)
        if grown is None or not in_pieces or fits(grown):
            return grown
        read = parts_of_what_is_read(grown)
        again = grower.grow(seed, barred | read, in_pieces=True) if read else None
        return again if again and fits(again) else None

    def attempt(self, seed: Node, barred: set[Node], *, in_pieces: bool = False) -> Attempt:
        """Grows and judges a region without what is barred. If it is not fused, the graph is as it
        was. in_pieces: one that has parts of tensors, if there is such.
        """
        attempt = Attempt([seed], [seed])
        barred = with_what_feeds_it(barred)
        copies: dict[Node, Node] = {}
        cuts = Cuts(self.graph)
        try:
            grown = self.grow(self.grower, seed, barred, in_pieces)
            if grown is None:
                return attempt
            attempt.nodes = grown.nodes
            copy_inputs(self.graph, grown.nodes, copies, barred)
            if copies:
                grown = self.grow(Grower(self.graph), seed, barred, in_pieces)
                if grown is None:  # what was copied into it takes it apart otherwise
                    return attempt
            grown = left_outside(grown)
            attempt.nodes = grown.nodes
            if in_pieces:
                cuts.make(grown)
            attempt.decision = self.judge.decide(grown, attempt, cuts.of)
            if isinstance(attempt.decision, Refused):
                attempt.stage = "leaving something out"
                out = left_out(seed, grown.nodes, attempt.fault)
                attempt.left_out = {copies.get(node, node) for node in out}
        except Exception as error:  # see fuse_graph
            attempt.decision = attempt.failed(error)
        finally:
            cuts.take_out()
            take_back(self.graph, copies)
        return attempt


def one_line_a_norm(graph: Graph, attempts: Sequence[Attempt]) -> list[Decision]:
    """What was decided: of a refusal only what was not fused after all, and what no other refusal
    has said before.
    """
    left = set(graph.nodes)
    decisions: list[Decision] = []
    for attempt in attempts:
        decision = attempt.decision
        if isinstance(decision, Refused):
            norms = [node for node in attempt.norms if node in left]
            if len(norms) < len(attempt.norms):
                nodes = [node for node in attempt.nodes if node in left]
                decision = _narrowed(decision, norms, nodes) if norms else None
            left.difference_update(norms)
        if decision is not None:
            decisions.append(decision)
    return decisions


def _narrowed(refused: Refused, norms: Sequence[Node], nodes: Sequence[Node]) -> Refused:
    """A refusal as one of these norms alone."""
    label = names.name(norms), names.module(norms), names.phase(norms)
    return Refused(*label, refused.reason, tuple(node.name for node in nodes))


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
    donated: Container[Node]

    def decide(
        self, grown: Grown, attempt: Attempt, cuts: Mapping[Node, Sequence[Cut]]
    ) -> Decision | None:
        """Fuses one grown region, or says why not; None if there is nothing of a norm in it."""
        nodes = grown.nodes
        attempt.stage = "naming"
        norms = names.inner_reductions(nodes)
        if not norms:
            return None
        attempt.norms = norms
        attempt.label = label = names.name(nodes), names.module(nodes), names.phase(nodes)
        members = tuple(node.name for node in nodes)
        try:
            attempt.stage = "lowering"
            lowered = lower(label[0], nodes, grown.domain, cuts, rounded=self.rounded)
            if not (lowered.has_one_hot_sum or has_inner_reduction(lowered)):
                return None
            attempt.stage = "laying out its tensors"
            lowered = self.lay_out(lowered)
            attempt.stage = "weighing"
            cost = estimate(lowered, nodes)

            def planned() -> Work:
                attempt.stage = PLANNING
                return self.kernel(lowered, cost)

            stock = partial(theirs, nodes, grown.domain, lowered, cost.sizes)
            here = self.conditions(lowered.device)
            reason = refusal(lowered, cost, planned, stock, here, least_bytes=self.least_bytes)
            fault = Fault(tuple(x for x in lowered.inputs if x.name in cost.written))
            if reason is None and self.least_bytes is None:
                reason, fault = overwritten(lowered, nodes, self.donated, planned), Fault()
            if reason is None:
                attempt.stage = PLANNING
                reason, fault = self.missing(lowered), Fault(unknown=True)
            if reason is not None:
                attempt.fault = fault
                return Refused(*label, reason, members)
            attempt.stage = "rewriting"
            call = put(self.graph, nodes, lowered, self.op)
        except (NotLowered, SizeUnknown) as error:
            attempt.fault = Fault.of(error)
            return Refused(*label, str(error), members)
        except NotImplementedError as error:
            if attempt.stage != PLANNING:
                raise  # what else is not implemented is a fault of ours
            attempt.fault = Fault(unknown=True)
            return Refused(*label, str(error), members)
        return Fused(
            *label, str(lowered.region), cost, lowered.device, cost.sizes, members, call.name
        )
