"""What tests run in other processes. A spawned one imports it by the name of this module."""

from __future__ import annotations

import faulthandler
import signal
from typing import Any

import orders

from normpass.decomps.activate import is_registered, register


def third_order() -> str:
    """Whether layer norm's third derivative is right in eager mode (orders.outcome)."""
    return orders.outcome("layer_norm", "grad_grad_grad", lambda function: function)


def in_a_child(queue: Any, wanted: bool) -> None:
    """Registers if that is wanted, and says what holds here. One that hangs says where."""
    # Not dump_traceback_later: a forked child would wait for pytest's own, whose thread it lacks.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(100)
    if wanted:
        register(eager=True)
    queue.put((is_registered(), third_order()))
