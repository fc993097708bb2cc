"""The update of a buffer in place, as an operator's kernel makes it: no derivative sees it.

torch.func refuses copy_ into a tensor that a level of grad or jvp does not know, a captured buffer,
but lets batch norm's kernel update it. A rule made of plain operators is treated like copy_: so the
update is made below the levels for which the buffer is a constant.

The interpreter stack of torch.func is private; the names used here are those of torch 2.13.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

if TYPE_CHECKING:
    from torch import Tensor


RUNNING_STATISTICS_NOT_BATCHED = (
    "Batch norm got a batched tensor as input while the running_mean or running_var, which will be "
    "updated in place, were not batched.\nIf you are using a module and do not need eval mode, "
    "please set `track_running_stats` to be False.If you are using a prebuilt module and do not "
    "need eval mode, please see the functorch website for resources on how to patch your module to "
    "work with vmap"
)


def assign(buffer: Tensor, value: Tensor, refusal: str) -> None:
    """buffer <- value, without derivatives.

    Raises RuntimeError(refusal) where a level of vmap has batched the value and not the buffer.
    """
    with contextlib.ExitStack() as levels:
        while _functorch.peek_interpreter_stack() is not None:
            interpreter = retrieve_current_functorch_interpreter()
            level = interpreter.level()
            if _functorch.maybe_get_level(buffer) == level:
                break
            if _functorch.maybe_get_level(value) == level:
                if _functorch.is_batchedtensor(value):
                    raise RuntimeError(refusal)
                value = _functorch.get_unwrapped(value)
            levels.enter_context(interpreter.lower())
        # Below autograd: in forward mode even a detached value has a tangent.
        levels.enter_context(torch._C._AutoDispatchBelowAutograd())
        buffer.copy_(value)
