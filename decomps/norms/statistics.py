"""Batch norm's statistics in training and in evaluation mode, for every rule of its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.axes import size_of
from normpass.decomps.buffers import RUNNING_STATISTICS_NOT_BATCHED, assign
from normpass.decomps.conventions import working

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def check_running(running_mean: Tensor | None, running_var: Tensor | None, training: bool) -> None:
    """Raises what eager raises of running statistics that are not there.

    Its own kernel for the CPU crashes in evaluation mode without both; torch.batch_norm, which asks
    first, has these messages.
    """
    if not training:
        for name, value in (("running_mean", running_mean), ("running_var", running_var)):
            if value is None:
                raise RuntimeError(f"{name} must be defined in evaluation mode")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")


def moments(x: Tensor, axes: Sequence[int], example: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """mean and variance over these axes, and how many elements each is of.

    Raises RuntimeError, as eager does, for an example of these sizes that has no element at all.
    """
    if 0 in example:
        raise RuntimeError(
            f"input tensor must have at least one element, but got input_sizes = {list(example)}"
        )
    var, mean = torch.var_mean(x, list(axes), correction=0)
    return mean, var, size_of(x, axes)


def averaged(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    """(1 - momentum) * running + momentum * new, which is a constant here, in its precision."""
    return (1 - momentum) * running.to(new.dtype) + momentum * new.detach()


def update(running: Tensor | None, new: Tensor, momentum: float) -> None:
    """running <- (1 - momentum) * running + momentum * new, in place; nothing where it is None."""
    if running is not None:
        assign(running, averaged(running, new, momentum), RUNNING_STATISTICS_NOT_BATCHED)


def saved_dtype(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Eager's dtype for mean and rstd: the input's on the CPU, unless a parameter is wider."""
    mixed = any(value is not None and value.dtype != x.dtype for value in parameters)
    return working(x.dtype) if mixed or x.device.type != "cpu" else x.dtype


def saves_running(x: Tensor) -> bool:
    """Whether eager returns statistics in evaluation mode too: its kernel for the CPU does not."""
    return x.device.type != "cpu"
