"""Operators without a kernel for the CPU, and what stands for them there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table

from normpass.decomps.batching import by_position

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


def convolution(op: OpOverload) -> Callable[..., Any]:
    """A vendor's convolution by aten.convolution, with what it does to the result."""
    names = [argument.name for argument in op._schema.arguments]

    def stand_in(*args: Any) -> Tensor:
        given = dict(zip(names, args, strict=True))
        x, rank = given.get("self", given.get("input")), len(given["stride"])
        transposed = given.get("transposed", "transpose" in op.name())
        extra = given.get("output_padding", [0] * rank)
        space = given["stride"], given["padding"], given["dilation"], transposed, extra
        y = aten.convolution(x, given["weight"], given.get("bias"), *space, given["groups"])
        if "z" in given:
            y = y + given["alpha"] * given["z"]
        return y.clamp_min(0) if "relu" in op.name() else y

    return stand_in


def overrideable_backward(g: Tensor, x: Tensor, w: Tensor, *rest: Any) -> Any:
    """A backend's own, where it has one: aten.convolution_backward, with the bias's sizes."""
    return aten.convolution_backward(g, x, w, [g.shape[1]], *rest)


STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::_fused_rms_norm_backward": rms_backward,
    "aten::convolution_backward_overrideable": overrideable_backward,
    "aten::cudnn_batch_norm": cudnn,
    "aten::cudnn_batch_norm_backward": vendors_backward,
    "aten::miopen_batch_norm": aten.native_batch_norm,
    "aten::miopen_batch_norm_backward": vendors_backward,
}


_OF_VENDORS = re.compile("aten::((cudnn|miopen|mkldnn)_.*convolution|convolution_overrideable)")


def replaced(op: OpOverload) -> Callable[..., Any]:
    """The operator, or what stands for it, as a function of all arguments by position."""
    if _OF_VENDORS.match(op.name()):
        return convolution(op)
    return STAND_INS.get(op.name()) or by_position(op)
