"""Faults of ours, of whatever kind: they cost a warning and the fusion of one region or graph, and
never a user's run.

Whoever could fail while a graph is compiled catches what comes and says so here. The first fault of
a kind is a warning that tells how to report it; more of the same are logged at INFO.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

HOW_TO_REPORT = (
    "This is a bug of normpass: please report it, with the folder that NORMPASS_DEBUG=folder "
    "writes and the traceback that TORCH_LOGS=+normpass prints."
)

_reported: set[tuple[str, ...]] = set()
_lock = Lock()


def report(stage: str, subject: str, error: Exception, instead: str, *, right: bool = True) -> str:
    """Logs a fault. Returns one line that says what happened, for the record.

    stage: what was being done, "planning its kernel". subject: to what, "layer_norm of layers.0
    (backward)". instead: what becomes of the run, "Inductor compiles it instead". right: whether
    its results are right all the same.
    """
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {where[0].filename}:{where[0].lineno}" if where else ""
    what = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    with _lock:
        first = (stage, type(error).__name__, place) not in _reported
        _reported.add((stage, type(error).__name__, place))
    said = (stage, subject, what, place, instead)
    if first:
        results = "results stay right" if right else "results may be wrong"
        log.warning(
            "a fault in %s of %s: %s%s. %s: %s. %s (normpass why fault)",
            *(*said, results, HOW_TO_REPORT),
        )
    else:
        log.info("a fault in %s of %s: %s%s. %s.", *said)
    log.debug("the fault's traceback", exc_info=error)
    return f"a fault of normpass in {stage}: {what}"


@contextmanager
def survived(stage: str, subject: str, instead: str) -> Iterator[None]:
    """Reports whatever is raised inside, and goes on after the block."""
    try:
        yield
    except Exception as error:
        report(stage, subject, error, instead)


def reported() -> list[tuple[str, ...]]:
    """The kinds of fault this process has seen: stage, type and place of each."""
    with _lock:
        return sorted(_reported)


def forget() -> None:
    """The next fault of each kind is a warning again."""
    with _lock:
        _reported.clear()
