"""Batch norm's forward for autograd: a composition of primitives, right to any order.

Below autograd the forward stays with torch's decompositions (see batch.py). Every spelling of the
operator is `_normalize` with other arguments. Derivatives go through the statistics, which are
constants as results.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import all_but, per_channel
from normpass.decomps.conventions import working_dtype
from normpass.decomps.norms.spellings import FORWARD, has_reserve, in_order, is_vendors, tensors
from normpass.decomps.norms.statistics import (
    check_running,
    moments,
    saved_dtype,
    saves_running,
    update,
)
from normpass.decomps.registry import find_op, register_rule

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "aten/src/ATen/native/Normalization.cpp"
RESULTS = "y: n c *s, save_mean: c, save_invstd: c"

_Results = tuple["Tensor", "Tensor", "Tensor"]


def _normalize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Results:
    """y = (x - mean) * rstd * weight + bias,  rstd = (var + eps)^(-1/2),  x the input

    training: mean = mean_ns(x), var = mean_ns((x - mean)^2), and in place, m the size of (n, s):
        running_mean += momentum * (mean - running_mean)
        running_var  += momentum * (var * m / (m - 1) - running_var)
    else: mean = running_mean, var = running_var; on the CPU nothing is saved.
    """
    given = (input, weight, bias, running_mean, running_var)
    raised = input.to(working_dtype(given))
    rank, kept = input.dim(), saved_dtype(*given)
    check_running(running_mean, running_var, training)
    if training:
        mean, var, m = moments(raised, all_but(input, 1), input.shape)
        update(running_mean, mean, momentum)
        update(running_var, var * m / (m - 1), momentum)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = running_mean.to(raised.dtype), running_var.to(raised.dtype)
    rstd = torch.rsqrt(var + eps)
    y = (raised - per_channel(mean, rank)) * per_channel(rstd, rank)
    if weight is not None:
        y = y * per_channel(weight, rank)
    if bias is not None:
        y = y + per_channel(bias, rank)
    if not training:
        if saves_running(input):
            mean = mean.clone()  # a tensor of its own: the buffer goes on changing
        else:
            mean, rstd = input.new_empty(0), input.new_empty(0)
    return y.to(input.dtype), mean.to(kept), rstd.to(kept)


def _rule(name: str, why: str = "", **fixed: Any) -> None:
    """Enters `_normalize` for an operator; fixed: the arguments that it does not have."""
    op = find_op(name)
    if op is None:
        return

    @wraps(_normalize)
    def composition(*args: Any) -> tuple[Tensor, ...]:
        given = in_order(op, args, FORWARD, **fixed)
        y, mean, rstd = _normalize(*given)
        if is_vendors(op) and not given[FORWARD.index("training")]:
            mean, rstd = mean.new_empty(0), rstd.new_empty(0)
        reserve = (y.new_empty(0, dtype=torch.uint8),) if has_reserve(op) else ()
        return y, mean, rstd, *reserve

    source = f"{SOURCE}: batch_norm_cpu"
    shapes = f"{tensors(op)} -> {RESULTS}" + ", reserve: 0" * has_reserve(op)
    constants = range(1, len(op._schema.returns))
    enter = register_rule(
        "autograd", op, source=source, shapes=shapes, why=why, constants=constants
    )
    enter(composition)


_RESERVE = "the reserve, which is cuDNN's own, stays empty"

_rule("aten.native_batch_norm.default")
_rule("aten._native_batch_norm_legit.default")
_rule("aten._native_batch_norm_legit.no_stats", running_mean=None, running_var=None)
_rule("aten._batch_norm_with_update.default", training=True, why=_RESERVE)
_rule("aten.cudnn_batch_norm.default", why=_RESERVE)
_rule("aten.miopen_batch_norm.default")
