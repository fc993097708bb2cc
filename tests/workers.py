"""What tests run in other processes. A spawned one imports it by the name of this module."""

from __future__ import annotations

import faulthandler
from typing import Any

import orders

from normpass.decomps.activate import is_registered, register


def third_order() -> str:
    """Whether layer norm's third derivative is right in eager mode (orders.outcome)."""
    return orders.outcome("layer_norm", "grad_grad_grad", lambda function: function)


def in_a_child(queue: Any, wanted: bool) -> None:
    """Registers if that is wanted, and says what holds here. One that hangs says where."""
    faulthandler.dump_traceback_later(100, exit=True)
    if wanted:
        register(eager=True)
    queue.put((is_registered(), third_order()))
