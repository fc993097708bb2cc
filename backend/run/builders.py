"""Threads that build kernels beside whatever else is compiled."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_pool: ThreadPoolExecutor | None = None
_lock = Lock()


def submit(build: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Begins to build, with the caller's settings: torch keeps its own for each context. Where no
    thread can be started any more, the answer is cancelled.
    """
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="normpass-compile")
        try:
            return _pool.submit(copy_context().run, build, *arguments)
        except RuntimeError:
            future: Future[Any] = Future()
            future.cancel()
            return future


def _at_exit() -> None:
    """What nobody waits for is not built: a program that is to end, ends."""
    if _pool is not None:
        _pool.shutdown(wait=False, cancel_futures=True)


def _after_fork() -> None:
    """A forked child has none of its parent's threads: it builds with its own."""
    global _pool, _lock
    _pool, _lock = None, Lock()


# Functions of atexit run after Python has waited for the threads of all pools. No others can be
# entered where a thread is the first to ask for this module, after the main one has ended.
if hasattr(threading, "_register_atexit"):
    with suppress(RuntimeError):
        threading._register_atexit(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
