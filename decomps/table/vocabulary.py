"""What the names in the expressions of derivatives.yaml mean in Python.

METHODS are those of C++'s tensors, scalars and optionals that Python's lack or spell otherwise, as
functions of the receiver; every other method is the tensor's own. HELPERS are the functions that
upstream's code generator and FunctionsManual.cpp have for the expressions' sake. A derivative
formula is no helper: binding.py looks it up among the rules, and what is neither among ATen's
operators.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.torch_internals import suggest_memory_format
from normpass.decomps.axes import put_back

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from normpass.decomps.manual import Number

aten = torch.ops.aten


@dataclass(frozen=True)
class Options:
    """TensorOptions: what a new tensor has of another."""

    dtype: torch.dtype
    layout: torch.layout
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Options:
        return cls(tensor.dtype, tensor.layout, tensor.device)

    def keywords(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "layout": self.layout, "device": self.device}


# --- methods -------------------------------------------------------------------------------------


def is_defined(value: Any) -> bool:
    return value is not None


def value_or(value: Any, other: Any) -> Any:
    return other if value is None else value


def conj(value: Any) -> Any:
    """Of a tensor or of a number; what is real stays what it is."""
    if isinstance(value, torch.Tensor):
        return value.conj() if value.is_complex() else value
    return value.conjugate()


def size(value: Any, *axis: int) -> Any:
    """A tensor's size along an axis, or a list's length."""
    return value.shape[axis[0]] if axis else len(value)


def scalar_type(value: Any) -> torch.dtype:
    return value.dtype if isinstance(value, torch.Tensor) else torch.result_type(value, value)


def to(value: Tensor, target: Any, *rest: Any) -> Tensor:
    if isinstance(target, Options):
        return value.to(device=target.device, dtype=target.dtype)
    return value.to(target, *rest)


def sum_(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Over no axes it is over all, as everywhere."""
    dims = [dim] if isinstance(dim, int) else dim
    return aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)


def blocksize(x: Tensor) -> list[int] | None:
    """Of a tensor whose elements are blocks."""
    if x.layout not in (torch.sparse_bsr, torch.sparse_bsc):
        return None
    first = x.crow_indices() if x.layout == torch.sparse_bsr else x.ccol_indices()
    return list(x.values().shape[first.dim() :][:2])


METHODS: dict[str, Callable[..., Any]] = {
    "defined": is_defined,
    "has_value": is_defined,
    "value": lambda value: value,
    "value_or": value_or,
    "conj": conj,
    "sizes": lambda x: None if x is None else x.shape,
    "sym_sizes": lambda x: None if x is None else x.shape,
    "size": size,
    "sym_size": size,
    "strides": lambda x: x.stride(),
    "sym_strides": lambda x: x.stride(),
    "sym_numel": lambda x: x.numel(),
    "scalar_type": scalar_type,
    "dtype": lambda x: x.dtype,
    "layout": lambda x: x.layout,
    "sym_blocksize": blocksize,
    "get_nested_sizes": lambda x: x._nested_tensor_size(),
    "device": lambda x: x.device,
    "options": Options.of,
    "to": to,
    "back": lambda x: x[-1],
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "is_cpu": lambda x: x.is_cpu,
    "is_xpu": lambda x: x.is_xpu,
    "requires_grad": lambda x: x.requires_grad,
    "suggest_memory_format": suggest_memory_format,
    "toDouble": float,
    "toFloat": float,
    "isComplex": lambda x: isinstance(x, complex),
    "toComplexDouble": complex,
    # In place on a tensor that an expression has made, or on a tangent that is the caller's.
    "zero_": torch.zeros_like,
    "fill_": torch.full_like,
    "copy_": aten.copy.default,
    "mul_": torch.mul,
    "masked_fill_": torch.masked_fill,
    "logical_or_": torch.logical_or,
    "logical_not_": torch.logical_not,
    "conj_physical_": torch.conj_physical,
    # Given by position what Python wants by name.
    "contiguous": lambda x, form=torch.contiguous_format: x.contiguous(memory_format=form),
    "add": lambda x, other, alpha=1: torch.add(x, other, alpha=alpha),
    "div": lambda x, other, rounding_mode=None: torch.div(x, other, rounding_mode=rounding_mode),
    "index": lambda x, indices: aten.index.Tensor(x, indices),
    "slice": aten.slice.Tensor,
    "sum": sum_,
    "new_zeros": lambda x, sizes, o=None: x.new_zeros(sizes, **(o.keywords() if o else {})),
}


# --- helpers -------------------------------------------------------------------------------------


def not_implemented(name: str, reason: str = "") -> Any:
    message = f"the derivative for '{name}' is not implemented."
    raise NotImplementedError(f"{message} {reason}" if reason else message)


def error_for_max_pool2d_double_backward() -> Any:
    raise NotImplementedError(
        "max_pool2d with `return_indices=False` is not infinitely differentiable. If you want to "
        "calculate higher order derivatives, e.g. second order, set `return_indices=True`."
    )


def warn_backwards(grad: Any) -> Any:
    """Of an operator that is there for PyTorch's own tests."""
    warnings.warn("Warn from backward", stacklevel=2)
    return grad


def maybe_multiply(x: Tensor, factor: Number) -> Tensor:
    return x if isinstance(factor, int | float) and factor == 1 else x * factor


def handle_r_to_c(like: Any, grad: Tensor) -> Tensor:
    """The gradient of a real tensor is real."""
    dtype = like if isinstance(like, torch.dtype) else like.dtype
    return grad.real if grad.is_complex() and not dtype.is_complex else grad


def apply_loss_reduction(loss: Tensor, reduction: int) -> Tensor:
    return (loss, loss.mean(), loss.sum())[reduction] if reduction < 3 else loss


def restore_reduced_dims(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """x, of which a reduction has taken these axes -> with them, of size one."""
    if keepdim:
        return x
    rank = x.dim() + len(dims)
    return put_back(x, [axis % rank for axis in dims])


def unsqueeze_multiple(x: Tensor, dims: Sequence[int] | None, rank: int) -> Tensor:
    """The same, from the rank before; dims None or empty: all axes were reduced."""
    axes = [axis % rank for axis in dims or range(rank)] if rank else []
    return put_back(x, axes)


def unsqueeze_to(x: Tensor, *where: Any) -> Tensor:
    """x, from which a squeeze has taken the axes of size one -> of these sizes.

    where: the sizes; before them the axis or the axes that were squeezed, else all.
    """
    *dims, sizes = where
    if not sizes:
        return x
    among = range(len(sizes)) if not dims else dims[0] if not isinstance(dims[0], int) else dims
    axes = [axis % len(sizes) for axis in among]
    return put_back(x, [axis for axis in axes if sizes[axis] == 1])


def exp(x: Any) -> Any:
    return x.exp() if isinstance(x, torch.Tensor) else math.exp(x)


def log(x: Any) -> Any:
    return x.log() if isinstance(x, torch.Tensor) else math.log(x)


def sqrt(x: Any) -> Any:
    return x.sqrt() if isinstance(x, torch.Tensor) else math.sqrt(x)


def scalar_tensor(value: Number, options: Options) -> Tensor:
    return torch.scalar_tensor(value, **options.keywords())


def zeros(sizes: Sequence[int], options: Options) -> Tensor:
    return torch.zeros(sizes, **options.keywords())


def ones(sizes: Sequence[int], options: Options) -> Tensor:
    return torch.ones(sizes, **options.keywords())


HELPERS: dict[str, Callable[..., Any]] = {
    "IntArrayRef": lambda x: x,
    # What is exact to any order, not what is fast at the first.
    "GradMode_is_enabled": lambda: True,
    "isDifferentiableType": lambda dtype: dtype.is_floating_point or dtype.is_complex,
    "to_args_sizes": lambda tensors: [x.shape for x in tensors],
    "to_args_scalartypes": lambda tensors: [x.dtype for x in tensors],
    "wrap_opt_if": lambda x, needed: x if needed else None,
    "where": torch.where,
    "masked_fill_inplace_if_safe": torch.masked_fill,  # from torch 2.14 on
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "real": torch.real,
    "imag": torch.imag,
    "sum_to": aten.sum_to_size.default,
    "reversed_list": lambda x: [*reversed(x)],
    "negated": lambda x: [-n for n in x],
    "floor_divide": lambda x, y: x // y,
    "apply_loss_reduction": apply_loss_reduction,
    "error_for_max_pool2d_double_backward": error_for_max_pool2d_double_backward,
    "exp": exp,
    "handle_r_to_c": handle_r_to_c,
    "native_get_nested_tensor_impl": lambda x: x,
    "log": log,
    "maybe_multiply": maybe_multiply,
    "not_implemented": not_implemented,
    "not_implemented_list": not_implemented,
    "ones": ones,
    "restore_reduced_dims": restore_reduced_dims,
    "scalar_tensor": scalar_tensor,
    "sqrt": sqrt,
    "unsqueeze_multiple": unsqueeze_multiple,
    "unsqueeze_to": unsqueeze_to,
    "warn_backwards": warn_backwards,
    "zeros": zeros,
}

CONSTANTS: dict[str, Any] = {
    "M_PI": math.pi,
    "M_LN2": math.log(2),
    "MemoryFormat_Contiguous": torch.contiguous_format,
    "kJagged": torch.jagged,
    "kCudnnDoubleBackwardMsg": (
        "Double backwards is not supported for CuDNN RNNs due to limitations in the CuDNN API. To "
        "run double backwards, please disable the CuDNN backend temporarily while running the "
        "forward pass of your RNN. For example: \nwith torch.backends.cudnn.flags(enabled=False):\n"
        "    output = model(inputs)"
    ),
    "retain_variables": False,  # what is saved is never written again here
}
