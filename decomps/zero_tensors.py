"""Operators on tangents that are zero and have no memory, while something is traced.

Where an operator's forward derivative meets an argument that has no tangent, torch puts a tensor
there that knows that it is zero (aten._efficientzerotensor). The few operators below have C++
kernels for it, at a dispatch key that comes before the fake tensors of a trace; and those kernels
compute on the meta device. So a trace gets meta tensors, or tangents that are laid out like an
expanded zero and cannot be written: "expected device cpu but got meta" and "more than one element
of the written-to tensor refers to a single memory location". With a second level of derivatives
any product of the kind (x.sum() * v).sum() fails so, in torch 2.13. Here they are written with what
fake tensors see, and graphs record zeros with memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from normpass.decomps.activation.torch_internals import (
    ZERO_TENSOR,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
)
from normpass.decomps.registry import find_op, register_rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

aten = torch.ops.aten

BINARY = "aten/src/ATen/native/BinaryOps.cpp"
SAME_SIZE = "self: *s, other: *s -> result: *s"


def _rule(op: str, source: str, shapes: str) -> Callable[..., Any]:
    return register_rule("zero_tensor", find_op(op), source=source, shapes=shapes)


def _zero(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    zero: Tensor = aten._efficientzerotensor(shape, dtype=dtype, device=like.device)
    return zero


# A number from Python arrives as one here, not as a tensor, and may be either operand.
Operand: TypeAlias = "Tensor | complex"


def _on(self: Operand, other: Operand) -> Tensor:
    """The operand that says on which device the result lies: a CPU scalar does not."""
    tensors = [each for each in (self, other) if isinstance(each, torch.Tensor)]
    return tensors[-1] if tensors[0].device.type == "cpu" else tensors[0]


def _shape(self: Operand, other: Operand) -> torch.Size:
    return torch.broadcast_shapes(*(getattr(each, "shape", ()) for each in (self, other)))


def _is_zero(value: Operand) -> bool:
    return isinstance(value, torch.Tensor) and value._is_zerotensor()


@_rule("aten.mul.Tensor", f"{BINARY}: mul_zerotensor", SAME_SIZE)
def mul(self: Operand, other: Operand) -> Tensor:
    """0 * other = self * 0 = 0"""
    return _zero(_on(self, other), _shape(self, other), torch.result_type(self, other))


@_rule("aten.add.Tensor", f"{BINARY}: add_zerotensor", SAME_SIZE)
def add(self: Operand, other: Operand, *, alpha: Any = 1) -> Tensor:
    """self + alpha * other, of which the one that is not zero is copied"""
    shape, dtype = _shape(self, other), torch.result_type(self, other)
    if not _is_zero(self):
        value = self
    elif _is_zero(other):
        return _zero(_on(self, other), shape, dtype)
    else:
        value = other if alpha == 1 else other * alpha
    device = _on(self, other).device
    if not isinstance(value, torch.Tensor):
        return torch.full(shape, value, dtype=dtype, device=device)
    copied: Tensor = aten._to_copy(value.expand(shape), dtype=dtype, device=device)
    return copied


@_rule("aten.sub.Tensor", f"{BINARY}: sub_zerotensor", SAME_SIZE)
def sub(self: Operand, other: Operand, *, alpha: Any = 1) -> Tensor:
    """self - alpha * other"""
    return add(self, other, alpha=-alpha)


@_rule("aten.div.Tensor", f"{BINARY}: div_zerotensor", SAME_SIZE)
def div(self: Operand, other: Operand) -> Tensor:
    """0 / other = 0; self / 0 is infinite, and 0 / 0 not a number"""
    shape, dtype = _shape(self, other), torch.result_type(self, other)
    if not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    if not _is_zero(other):
        return _zero(_on(self, other), shape, dtype)
    device = _on(self, other).device
    if _is_zero(self):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    return self / torch.zeros(shape, dtype=dtype, device=device)


@_rule(
    "aten.linalg_cross.default",
    "aten/src/ATen/native/Cross.cpp: linalg_cross_zerotensor",
    SAME_SIZE,
)
def linalg_cross(self: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """0 x other = self x 0 = 0"""
    return mul(self, other)


def _viewed(op: Any) -> Callable[..., Tensor]:
    def view(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A view of a zero is a zero, as the kernels that fake tensors have for other views say."""
        with ExcludeDispatchKeyGuard(DispatchKeySet(ZERO_TENSOR)):
            viewed: Tensor = op(self, *args, **kwargs)
        return viewed

    return view


for _name in ("view", "_reshape_alias", "as_strided"):
    _rule(
        f"aten.{_name}.default",
        "aten/src/ATen/native/TensorShape.cpp: " + _name,
        "self: *s -> result: *size",
    )(_viewed(getattr(aten, _name).default))


@_rule(
    "aten._new_zeros_with_same_feature_meta.default",
    "aten/src/ATen/native/TensorFactories.cpp: _new_zeros_with_same_feature_meta",
    "self: *v *s, other: *s -> result: *v *s",
)
def _new_zeros_with_same_feature_meta(
    self: Tensor, other: Tensor, *, self_num_batch_dims: int = 0
) -> Tensor:
    """Memory for a tangent of `other`, which has none itself whose layout could be kept"""
    shape = (*self.shape[:self_num_batch_dims], *other.shape)
    return torch.zeros(shape, dtype=other.dtype, device=other.device)


def recorded(mode: ProxyTorchDispatchMode, size: Any, **kwargs: Any) -> Tensor:
    """What a graph has in place of a zero without memory: zeros. The trace goes on knowing that it
    is zero, but the graph's next kernel would be handed a null pointer, which torch 2.13 does
    under Inductor and under aot_eager (the jvp of torch.ldexp in its first argument).
    """
    # Imported late: with it, listing the rules would take a second.
    from normpass.decomps.activation.torch_internals import get_proxy_slot, track_tensor

    zero: Tensor = aten._efficientzerotensor(size, **kwargs)
    with mode:
        zeros = aten.full(size, 0, **kwargs)
    # With its sizes and strides: torch 2.11 cannot compute with those that it has not tracked.
    proxy = get_proxy_slot(zeros, mode.tracer).proxy
    track_tensor(zero, proxy, constant=None, tracer=mode.tracer)
    return zero
