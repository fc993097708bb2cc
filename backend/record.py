"""What became of every norm: counters, logs, traces, and whoever listens."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from normpass.passes.pipeline import Decision, Fused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

_listeners: list[list[Decision]] = []
_lock = Lock()


@contextmanager
def listen() -> Iterator[list[Decision]]:
    """Collects the decisions made while the block runs, in whatever thread (backward graphs of GPU
    models are compiled in autograd's)."""
    heard: list[Decision] = []
    with _lock:
        _listeners.append(heard)
    try:
        yield heard
    finally:
        with _lock:
            _listeners[:] = [other for other in _listeners if other is not heard]


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
        torch._logging.trace_structured(
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
