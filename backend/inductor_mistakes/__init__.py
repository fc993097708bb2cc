"""Mistakes of Inductor's that make numbers wrong, silently, or let it compile nothing, and are
mended where normpass compiles.

Inductor compiles what normpass leaves to it, and whoever trains with normpass trusts those numbers
too. Each mistake is a record (mistake.py) in a file of its own; tests/backend has a reproducer for
each, which fails when its mend is taken out, and when torch has fixed it and its versions are to
be corrected here.

When they are mended:

    backend="normpass"      from the first model that is compiled, for the rest of the process.
                            AOTAutograd compiles a backward later, in whatever thread first asks for
                            it, so there is no moment at which they could be taken out again; and
                            they do nothing but make wrong numbers right, for stock Inductor in this
                            process too.
    normpass.register()     until normpass.unregister(), unless the backend was used.

`key()` is part of the key of Inductor's and of AOTAutograd's cache (FusionPass.uuid): wrong code
that stock Inductor left there is not found.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from normpass.backend.inductor_mistakes import (
    children,
    clipped_windows,
    clones,
    collapsed,
    equal_maxima,
    in_place,
    local_buffers,
    neutral,
    one_place,
    overwritten,
    padded_labels,
    pools,
    positions,
    renames,
    tails,
    tiles,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from normpass.backend.inductor_mistakes.mistake import Mistake, Undo

log = logging.getLogger(__name__)

MISTAKES: tuple[Mistake, ...] = (
    renames.MISTAKE,
    tiles.MISTAKE,
    pools.MISTAKE,
    tails.MISTAKE,
    local_buffers.MISTAKE,
    in_place.MISTAKE,
    overwritten.MISTAKE,
    clones.MISTAKE,
    neutral.MISTAKE,
    clipped_windows.MISTAKE,
    equal_maxima.MISTAKE,
    positions.POOLS,
    positions.ARGMAX,
    collapsed.MISTAKE,
    padded_labels.MISTAKE,
    one_place.MISTAKE,
)


@dataclass
class _State:
    lock: threading.RLock = field(default_factory=threading.RLock)
    holders: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    mended: dict[str, Undo] = field(default_factory=dict)
    tried: tuple[str, ...] = ()
    kept_out: Undo | None = None

    def sync(self) -> None:
        """Mends what is wanted now. All is taken out first if that changes anything: two mends may
        wrap the same function.
        """
        if self.holders and self.kept_out is None:
            self.kept_out = _tried(children.keep_out, "child processes are not kept out")
        elif not self.holders and self.kept_out is not None:
            self.kept_out()
            self.kept_out = None
        wanted = tuple(mistake.name for mistake in self.wanted())
        if wanted == self.tried:
            return
        for put_back in reversed(self.mended.values()):
            put_back()
        self.mended = {}
        for mistake in self.wanted():
            undo = _tried(mistake.mend, f"pytorch issue {mistake.issue} is not mended")
            if undo is not None:
                self.mended[mistake.name] = undo
        self.tried = wanted

    def wanted(self) -> list[Mistake]:
        if not self.holders:
            return []
        return [
            mistake
            for mistake in MISTAKES
            if not self.left_out[mistake.name] and mistake.concerns(version())
        ]


def _tried(change: Callable[[], Undo], otherwise: str) -> Undo | None:
    """Changes torch; None, and a line in the log, where torch is not as the change expects."""
    try:
        return change()
    except Exception as error:
        log.info("%s: %r", otherwise, error)
        return None


def version() -> str:
    """The version of torch in this process."""
    return str(torch.__version__)


def install(holder: str = "backend") -> None:
    """Mends what this version of torch has wrong; harmless if it is done already.

    holder: who wants it. What several want stays until the last of them uninstalls.
    """
    with _STATE.lock:
        _STATE.holders.add(holder)
        _STATE.sync()


def uninstall(holder: str | None = None) -> None:
    """Puts torch's functions back, once nobody else wants them mended; without a name for all."""
    with _STATE.lock:
        if holder is None:
            _STATE.holders.clear()
        _STATE.holders.discard(holder or "")
        _STATE.sync()


def mended_for_rules() -> Undo:
    """What `normpass.register()` installs besides the rules; returns what `unregister()` calls."""
    install("rules")
    return lambda: uninstall("rules")


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Takes mends out for the length of a block, in all threads; all of them if none is named.

    Raises:
        ValueError: for a name there is not; the message lists them.
    """
    known = [mistake.name for mistake in MISTAKES]
    if unknown := set(names) - set(known):
        raise ValueError(f"expected names among {', '.join(known)}; found {sorted(unknown)}")
    out = Counter(names or known)
    with _STATE.lock:
        _STATE.left_out += out
        _STATE.sync()
    try:
        yield
    finally:
        with _STATE.lock:
            _STATE.left_out -= out
            _STATE.sync()


def key() -> str:
    """The names of the mends in force, for the keys of caches."""
    with _STATE.lock:
        return " ".join(_STATE.mended)


_STATE = _State()
