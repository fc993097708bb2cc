"""What became of every norm: counters, logs, traces, and whoever listens or watches."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch._dynamo.utils import counters
from torch._logging._internal import trace_structured

from normpass.backend.explain.cut_out import CutOut, NotCutOut, cut_out, marked_copy, unmark
from normpass.backend.explain.listing import Line, listing
from normpass.passes import faults
from normpass.passes.names import is_backward
from normpass.passes.pipeline import Decision, Fused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.fx import Graph

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passed:
    """One graph that went through the pass: before, after, and what was decided in it.

    cuts: of each region by its call what it is of, or why that cannot be taken out of the graph.
    """

    phase: str
    before: tuple[Line, ...]
    after: tuple[Line, ...]
    decisions: tuple[Decision, ...]
    cuts: Mapping[str, CutOut | str]


@dataclass(frozen=True)
class Before:
    """A graph before the pass: its listing, and a copy of it."""

    lines: tuple[Line, ...]
    graph: Graph


_listeners: list[list[Decision]] = []
_watchers: list[list[Passed]] = []
_lock = Lock()


@contextmanager
def _attached(everybody: list[list[Any]], mine: list[Any]) -> Iterator[None]:
    with _lock:
        everybody.append(mine)
    try:
        yield
    finally:
        with _lock:
            everybody[:] = [other for other in everybody if other is not mine]


@contextmanager
def listen() -> Iterator[list[Decision]]:
    """Collects the decisions made while the block runs, in whatever thread (backward graphs of GPU
    models are compiled in autograd's)."""
    heard: list[Decision] = []
    with _attached(_listeners, heard):
        yield heard


@contextmanager
def watch() -> Iterator[list[Passed]]:
    """Collects the graphs that go through the pass while the block runs, in whatever thread."""
    seen: list[Passed] = []
    with _attached(_watchers, seen):
        yield seen


def before(graph: Graph) -> Before | None:
    """A graph before the pass, for those who watch; None, and for free, if nobody does. Its nodes
    are marked until `after`.
    """
    return Before(listing(graph), marked_copy(graph)) if _watchers else None


def after(before: Before | None, graph: Graph, made: Sequence[Decision]) -> None:
    """Hands a graph that went through the pass to those who watch."""
    if before is None:
        return
    phase = "backward" if is_backward(graph) else "forward"
    cuts = {each.call: _cut(before, graph, each) for each in made if isinstance(each, Fused)}
    unmark(graph)
    passed = Passed(phase, before.lines, listing(graph), tuple(made), cuts)
    with _lock:
        for seen in _watchers:
            seen.append(passed)


def _cut(before: Before, after: Graph, fused: Fused) -> CutOut | str:
    try:
        return cut_out(before.graph, after, fused)
    except NotCutOut as reason:
        return str(reason)
    except Exception as error:  # whatever it is, the rest of the report holds
        subject = f"{fused.name} of {fused.module or 'the graph'}"
        return faults.report("taking a region out of its graph", subject, error, "It is not timed")


def decisions(made: Sequence[Decision]) -> None:
    """Counts, logs and traces what a pass decided."""
    for decision in made:
        if isinstance(decision, Fused):
            counters["normpass"][f"fused {decision.name}"] += 1
            log.info("fused %s of %s", decision.name, decision.module or "the graph")
            log.debug("%s", decision.text)
        else:
            counters["normpass"][f"refused {decision.name}: {decision.reason}"] += 1
            log.info(
                "refused %s of %s: %s",
                decision.name,
                decision.module or "the graph",
                decision.reason,
            )
    if made:
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "normpass_decisions", "encoding": "string"},
            payload_fn=lambda: "\n\n".join(map(describe, made)),
        )
    with _lock:
        for heard in _listeners:
            heard.extend(made)


def describe(decision: Decision) -> str:
    """A decision as text."""
    head = f"{decision.phase} {decision.name} of {decision.module or 'the graph'}"
    if isinstance(decision, Fused):
        return f"fused {head}\n{decision.text}"
    return f"refused {head}: {decision.reason}"
