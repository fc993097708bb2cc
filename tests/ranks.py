"""Several processes that are ranks of one gloo group, for tests of what torch.distributed does to
compiled code.

Importing torch takes longer than most of these tests, so the processes of a group stay for all
tests of a module. A test gives them a function that can be imported by name; each calls it and
sends back what it returns.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path
    from types import TracebackType
    from typing import Self

# Seconds until a collective that a rank has left alone fails, and until a rank that does not answer
# is taken to hang: compiling a small model takes 5 to 20 on a busy core.
COLLECTIVE, ANSWER = 60, 240

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="torch was built without gloo",
)


class RankFailed(AssertionError):
    """What a rank raised, with its traceback, or that it died or did not answer."""


class Ranks:
    """A group of processes. Use it in `with`."""

    def __init__(self, count: int, store: Path) -> None:
        self.count = count
        self.store = store
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.count):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, rank, self.count, str(self.store))
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in self._ends:
            end.close()  # which ends their loops
        for process in self._processes:
            process.join(10)
            process.kill()
        self._ends, self._processes = [], []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank's call of function(*args) returns, by rank.

        Raises:
            RankFailed: if one of them raised, died or did not answer. The group is then another,
                because the others may wait for it.
        """
        if not self._processes:
            self.__enter__()
        for end in self._ends:
            with suppress(OSError):  # of one that is dead, which is found when it does not answer
                end.send_bytes(pickle.dumps((function, args)))
        deadline = time.monotonic() + ANSWER
        answers = [self._answer(rank, deadline) for rank in range(self.count)]
        if wrong := [f"rank {k}: {a}" for k, (good, a) in enumerate(answers) if not good]:
            self.restart()
            raise RankFailed("\n".join(wrong))
        return [answer for _, answer in answers]

    def restart(self) -> None:
        """Ends the processes; the next call has others, which meet elsewhere."""
        self.__exit__(None, None, None)
        self.store = self.store.with_name(f"{self.store.name}_")

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        end = self._ends[rank]
        try:
            if not end.poll(max(0.0, deadline - time.monotonic())):
                return False, f"expected an answer within {ANSWER} s, found none"
            good, answer = pickle.loads(end.recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(10)
            return False, f"expected an answer, found it dead ({self._processes[rank].exitcode})"
        return good, answer


def _serve(end: Connection, rank: int, count: int, store: str) -> None:
    """A rank's process: joins the group, then answers until the pipe is closed."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=COLLECTIVE),
    )
    while True:
        try:
            function, args = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        torch.compiler.reset()
        try:
            answer = True, function(*args)
        except Exception:
            answer = False, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))
