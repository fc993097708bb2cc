"""The update of a buffer in place, as an operator's kernel makes it: no derivative sees it.

torch.func refuses copy_ into a tensor that a level of grad or jvp does not know, a captured buffer,
but lets batch norm's kernel update it. A rule made of plain operators is treated like copy_: so the
update is made below all levels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.decomps.activation.levels import below
from normpass.decomps.activation.torch_internals import AutoDispatchBelowAutograd

if TYPE_CHECKING:
    from torch import Tensor


RUNNING_STATISTICS_NOT_BATCHED = (
    "Batch norm got a batched tensor as input while the running_mean or running_var, which will be "
    "updated in place, were not batched.\nIf you are using a module and do not need eval mode, "
    "please set `track_running_stats` to be False.If you are using a prebuilt module and do not "
    "need eval mode, please see the functorch website for resources on how to patch your module to "
    "work with vmap"
)


class RunningStatistics:
    """What examples do with running statistics that they share: raise an error, or update them once
    with the mean of their statistics, as `register(running_stats="mean")` asks for.
    """

    are_averaged = False


def assign(buffer: Tensor, value: Tensor, refusal: str | None) -> None:
    """buffer <- value, without derivatives.

    Where a level of vmap has batched the value and not the buffer: the mean of the examples, or
    with a refusal RuntimeError(refusal).
    """
    # Below autograd too: in forward mode even a detached value has a tangent.
    with below(buffer, value, refusal) as (to, plain), AutoDispatchBelowAutograd():
        to.copy_(plain)


def averaged(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    """(1 - momentum) * running + momentum * new, which is a constant here, in its precision."""
    return (1 - momentum) * running.to(new.dtype) + momentum * new.detach()


def update(running: Tensor | None, new: Tensor, momentum: float) -> None:
    """running <- (1 - momentum) * running + momentum * new, in place; nothing where it is None."""
    if running is not None:
        refusal = None if RunningStatistics.are_averaged else RUNNING_STATISTICS_NOT_BATCHED
        assign(running, averaged(running, new, momentum), refusal)
