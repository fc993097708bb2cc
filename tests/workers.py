"""What tests run in other processes. A spawned one imports it by the name of this module."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import warnings
from typing import Any

import orders

from normpass.decomps.activation import is_registered, register


def third_order() -> str:
    """Whether layer norm's third derivative is right in eager mode (orders.outcome)."""
    return orders.outcome("layer_norm", "grad_grad_grad", lambda function: function)


def spawned(queue: Any) -> None:
    """A worker that registers for itself."""
    register(eager=True)
    say_what_holds(queue)


def forking(queue: Any) -> None:
    """Registers and forks a worker. PyTorch refuses to differentiate in a fork of a process whose
    autograd had threads, as pytest's may: this one has run nothing.
    """
    register(eager=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        worker = multiprocessing.get_context("fork").Process(target=say_what_holds, args=(queue,))
        worker.start()
    worker.join()


def say_what_holds(queue: Any) -> None:
    """Whether the rules are active here, and right. A process that hangs says where."""
    # Not dump_traceback_later: a forked child would wait for its parent's, whose thread it lacks.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(100)
    queue.put((is_registered(), third_order()))
