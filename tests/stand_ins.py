"""Operators without a kernel for the CPU, and what stands for them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten

MASK = [True, True, True]
RESERVE = torch.empty(0, dtype=torch.uint8)


def cudnn(*args: Any) -> Any:
    """cuDNN's batch norm is native_batch_norm with an empty reserve."""
    return *aten.native_batch_norm(*args), RESERVE


def vendors_backward(x: Tensor, g: Tensor, *rest: Any) -> Any:
    """cuDNN's and MIOpen's are native_batch_norm_backward in train mode."""
    *statistics, eps = rest[:6]
    return aten.native_batch_norm_backward(g, x, *statistics, True, eps, MASK)


def rms_backward(*args: Any) -> Any:
    """torch's own decomposition; as CUDA has it, dweight is of the weight's dtype."""
    dx, dweight = decomposition_table[aten._fused_rms_norm_backward.default](*args)
    weight = args[4]
    return dx, dweight if dweight is None else dweight.to(weight.dtype)


STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::_fused_rms_norm_backward": rms_backward,
    "aten::cudnn_batch_norm": cudnn,
    "aten::cudnn_batch_norm_backward": vendors_backward,
    "aten::miopen_batch_norm": aten.native_batch_norm,
    "aten::miopen_batch_norm_backward": vendors_backward,
}


def replaced(op: OpOverload) -> Callable[..., Any]:
    """The operator, or what stands for it."""
    return STAND_INS.get(op.name(), op)
