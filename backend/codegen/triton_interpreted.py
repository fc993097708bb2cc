"""What Triton's interpreter lacks, in NumPy and PyTorch: libdevice, and reductions that keep NaN.

For tests on machines without a GPU. Touches triton.runtime.interpreter.TensorHandle (checked on
3.6 and 3.9)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

if TYPE_CHECKING:
    from collections.abc import Callable


def _value(array: Any, like: Any) -> Any:
    """An array as a Triton value of another one's element type."""
    array = np.asarray(array, dtype=like.handle.data.dtype)
    kind = tl.block_type(like.dtype, list(array.shape)) if array.shape else like.dtype
    return tl.tensor(TensorHandle(array if array.shape else array.reshape(1), like.dtype), kind)


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(first: Any, *others: Any) -> Any:
        arguments = [first, *others]
        shape = next((a.shape for a in arguments if a.type.is_block()), None)
        arrays = [torch.from_numpy(np.ascontiguousarray(a.handle.data)) for a in arguments]
        result = function(*arrays).numpy()
        return _value(result if shape is not None else result.reshape(()), first)

    return call


libdevice = SimpleNamespace(
    exp=_elementwise(torch.exp),
    expm1=_elementwise(torch.expm1),
    log=_elementwise(torch.log),
    log1p=_elementwise(torch.log1p),
    tanh=_elementwise(torch.tanh),
    pow=_elementwise(torch.pow),
    erf=_elementwise(torch.erf),
    sin=_elementwise(torch.sin),
    cos=_elementwise(torch.cos),
    rint=_elementwise(torch.round),
    floor=_elementwise(torch.floor),
    ceil=_elementwise(torch.ceil),
    trunc=_elementwise(torch.trunc),
)


def _reduction(ufunc: np.ufunc) -> Callable[..., Any]:
    def call(x: Any, axis: int | None = None, keep_dims: bool = False) -> Any:
        return _value(ufunc.reduce(x.handle.data, axis=axis, keepdims=keep_dims), x)

    return call


def _logical(ufunc: np.ufunc) -> Callable[..., Any]:
    """The interpreter makes numbers of truth values where it repeats a single one to a block."""

    def call(x: Any, y: Any) -> Any:
        array = ufunc(x.handle.data, y.handle.data)
        block = x.type.is_block() or y.type.is_block()
        kind = tl.block_type(tl.int1, list(array.shape)) if block else tl.int1
        return tl.tensor(TensorHandle(array, tl.int1), kind)

    return call


both = _logical(np.logical_and)
either = _logical(np.logical_or)
amax = _reduction(np.maximum)
amin = _reduction(np.minimum)
prod = _reduction(np.multiply)
