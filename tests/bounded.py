"""Regions evaluated with a bound on rounding: NumPy over named axes, none of the package's code.

Every value is carried with a bound on what rounding may have done to it (running error analysis in
the compute dtype), so a kernel is compared with what its own arithmetic allows and with nothing
guessed. An element about which the bound knows nothing (a comparison too close to call, an
overflow) has the bound infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from normpass.passes.region import Buffer, Output, Region

    Array = NDArray[Any]  # longdouble; NumPy's own types lose it


@dataclass
class Bounded:
    """Values, [one dimension an axis], and how far from them rounding can lead."""

    value: Array
    error: Array

    @property
    def low(self) -> Array:
        return self.value - self.error

    @property
    def high(self) -> Array:
        return self.value + self.error


def over_axes(
    buffer: Buffer, tensor: torch.Tensor, axes: Sequence[str], extents: Mapping[str, int]
) -> Array:
    order = [axis for dim in buffer.dims for axis in dim]
    array = tensor.to(torch.float64).numpy().astype(np.longdouble)
    array = array.reshape([extents[axis] for axis in order])
    present = [axis for axis in axes if axis in order]
    array = array.transpose([order.index(axis) for axis in present])
    array = array.reshape([extents[axis] if axis in order else 1 for axis in axes])
    for k, axis in enumerate(axes):
        if axis not in buffer.axes:  # expanded: one element stands for all
            array = array.take([0] if array.shape[k] else [], axis=k)
    return array


def evaluate(region: Region, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[Bounded]:
    """Each output in its tensor's shape."""
    extents = region.extents(sizes)
    axes = [axis.name for axis in region.axes]
    eps = np.longdouble(torch.finfo(region.compute_dtype).eps)
    values: dict[str, Bounded] = {}
    for buffer, tensor in zip(region.inputs, inputs, strict=True):
        array = over_axes(buffer, tensor, axes, extents)
        values[buffer.name] = Bounded(array, np.zeros_like(array))
    with np.errstate(all="ignore"):
        for op in region.ops:
            if op.fn == "numel":
                count = np.prod([extents[axis] for axis in op.axes], dtype=np.int64)
                values[op.name] = _exact(np.full([1] * len(axes), count, np.longdouble))
                continue
            args = [
                values[arg]
                if isinstance(arg, str)
                else _literal(np.full([1] * len(axes), arg), region.compute_dtype)
                for arg in op.args
            ]
            if op.is_reduction:
                over = tuple(axes.index(axis) for axis in op.axes)
                result = _reduce(op.fn, args[0], over, extents, op.axes, eps)
            else:
                result = FUNCTIONS[op.fn](eps, *args)
            values[op.name] = _limit(result, region.compute_dtype)
    return [_leave(region, output, values[output.value], extents) for output in region.outputs]


def _exact(value: Array) -> Bounded:
    value = value.astype(np.longdouble)
    return Bounded(value, np.zeros_like(value))


def _literal(value: Array, dtype: torch.dtype) -> Bounded:
    """A number of the text, as torch takes it beside a tensor: as one of the compute type."""
    kept = torch.as_tensor(value.astype(np.float64)).to(dtype)
    return _exact(kept.to(torch.float64).numpy())


def _limit(result: Bounded, dtype: torch.dtype) -> Bounded:
    """What may have overflowed or underflowed on the way."""
    info = torch.finfo(dtype)
    value, error = result.value, np.nan_to_num(result.error, nan=0.0, posinf=np.inf)
    large = np.isfinite(value) & (np.abs(value) + error > np.sqrt(np.longdouble(info.max)))
    error = np.where(error > 0, error + np.longdouble(info.tiny), error)
    return Bounded(value, np.where(large, np.inf, error))


def _leave(region: Region, output: Output, result: Bounded, extents: Mapping[str, int]) -> Bounded:
    axes = [axis.name for axis in region.axes]
    order = [axis for dim in output.buffer.dims for axis in dim]
    shape = region.shape(output.buffer, extents)

    def arrange(array: Array) -> Array:
        array = np.broadcast_to(array, [extents[a] if a in order else 1 for a in axes])
        rest = [k for k, axis in enumerate(axes) if axis not in order]
        return array.transpose([*(axes.index(axis) for axis in order), *rest]).reshape(shape)

    return Bounded(arrange(result.value), arrange(result.error))


def _reduce(
    fn: str,
    x: Bounded,
    over: tuple[int, ...],
    extents: Mapping[str, int],
    axes: Sequence[str],
    eps: np.longdouble,
) -> Bounded:
    count = np.prod([extents[axis] for axis in axes], dtype=np.float64)
    if fn == "sum":
        value = x.value.sum(over, keepdims=True)
        carried = x.error.sum(over, keepdims=True)
        added = count * eps * (np.abs(x.value) + x.error).sum(over, keepdims=True)
        return Bounded(value, np.where(np.isfinite(value), carried + added, carried))
    if fn in ("amax", "amin"):
        reduce = np.max if fn == "amax" else np.min
        return Bounded(reduce(x.value, axis=over, keepdims=True), x.error.max(over, keepdims=True))
    value = x.value.prod(over, keepdims=True)
    largest = (np.abs(x.value) + x.error).prod(over, keepdims=True)
    least = np.abs(x.value).prod(over, keepdims=True)
    error = np.where(np.isfinite(value), largest - least + count * eps * largest, 0)
    # Partial products may overflow or underflow though the whole one does not.
    extreme = np.maximum(np.abs(x.value) + x.error, 1).prod(over, keepdims=True)
    smallest = np.where(x.value == 0, 1, np.minimum(np.abs(x.value), 1)).prod(over, keepdims=True)
    wild = (extreme > 1e30) | (smallest < 1e-30) | np.isinf(x.error.sum(over, keepdims=True))
    return Bounded(value, np.where(wild, np.inf, error))


def _rounded(value: Array, error: Array, eps: np.longdouble, ulps: float = 1) -> Bounded:
    return Bounded(
        value, np.where(np.isfinite(value), error + ulps * eps * (np.abs(value) + error), error)
    )


def _add(eps: np.longdouble, a: Bounded, b: Bounded) -> Bounded:
    # A product that is added may be contracted, which rounds less, never more.
    return _rounded(a.value + b.value, a.error + b.error, eps)


def _sub(eps: np.longdouble, a: Bounded, b: Bounded) -> Bounded:
    return _rounded(a.value - b.value, a.error + b.error, eps)


def _mul(eps: np.longdouble, a: Bounded, b: Bounded) -> Bounded:
    error = _times(np.abs(a.value), b.error) + _times(np.abs(b.value), a.error)
    return _underflow(_rounded(a.value * b.value, error + _times(a.error, b.error), eps))


def _times(size: Array, error: Array) -> Array:
    """A size times an error, where infinity times no error is none."""
    return np.where(error == 0, 0, size * error)


def _underflow(x: Bounded) -> Bounded:
    return Bounded(x.value, np.where((x.value != 0) & (x.error == 0), 1e-38, x.error))


def _div(eps: np.longdouble, a: Bounded, b: Bounded) -> Bounded:
    near_zero = np.abs(b.value) <= b.error
    room = np.abs(b.value) - b.error
    value = a.value / b.value
    error = (a.error + _times(np.abs(value), b.error)) / room
    return _unless(
        near_zero, _underflow(_rounded(value, np.where(np.isinf(b.value), 0, error), eps))
    )


def _unless(unknown: Array | NDArray[np.bool_], x: Bounded) -> Bounded:
    return Bounded(x.value, np.where(unknown, np.inf, x.error))


def _monotone(
    fn: Callable[[Array], Array], ulps: float, absolute: float = 0.0
) -> Callable[[np.longdouble, Bounded], Bounded]:
    def bound(eps: np.longdouble, x: Bounded) -> Bounded:
        value, low, high = fn(x.value), fn(x.low), fn(x.high)
        spread = np.maximum(
            *(np.where(end == value, 0, np.abs(end - value)) for end in (low, high))
        )
        undefined = np.isnan(value)
        differs = (x.error > 0) & ((np.isnan(low) != undefined) | (np.isnan(high) != undefined))
        small = absolute if eps > 1e-10 else 0.0
        result = _rounded(value, np.where(undefined, 0, spread) + small, eps, ulps)
        return _unless(differs | np.isinf(x.error), result)

    return bound


def _not_near_zero(
    bound: Callable[..., Bounded],
) -> Callable[..., Bounded]:
    def checked(eps: np.longdouble, x: Bounded, *rest: Bounded) -> Bounded:
        return _unless(np.abs(x.value) <= x.error, bound(eps, x, *rest))

    return checked


def _wave(fn: Callable[[Array], Array]) -> Callable[[np.longdouble, Bounded], Bounded]:
    def bound(eps: np.longdouble, x: Bounded) -> Bounded:
        far = np.isfinite(x.value) & (np.abs(x.value) > 1e4)
        return _unless(far | np.isinf(x.error), _rounded(fn(x.value), x.error + eps, eps, 4))

    return bound


def _power(eps: np.longdouble, x: Bounded, exponent: Bounded) -> Bounded:
    power = exponent.value
    return _not_near_zero(_monotone(lambda v: v**power, 8))(eps, x)


def _extreme(fn: Callable[[Array, Array], Array]) -> Callable[..., Bounded]:
    def bound(eps: np.longdouble, a: Bounded, b: Bounded) -> Bounded:
        return Bounded(fn(a.value, b.value), np.maximum(a.error, b.error))

    return bound


def _compare(fn: Callable[[Array, Array], NDArray[np.bool_]]) -> Callable[..., Bounded]:
    def bound(eps: np.longdouble, a: Bounded, b: Bounded) -> Bounded:
        error = a.error + b.error
        close = (np.abs(a.value - b.value) <= error) & (error > 0) | np.isinf(error)
        return _truth(fn(a.value, b.value), close)

    return bound


def _truth(value: NDArray[np.bool_], unknown: NDArray[np.bool_]) -> Bounded:
    """A truth value is one or zero; one that is too close to call is off by one at most."""
    return Bounded(value.astype(np.longdouble), unknown.astype(np.longdouble))


def _as_truth(x: Bounded) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    return x.value != 0, (x.error > 0) & ~(np.abs(x.value) > x.error)


def _logical(fn: Callable[..., NDArray[np.bool_]]) -> Callable[..., Bounded]:
    def bound(eps: np.longdouble, *args: Bounded) -> Bounded:
        truths = [_as_truth(x) for x in args]
        unknown = np.logical_or.reduce(np.broadcast_arrays(*(u for _, u in truths)))
        return _truth(fn(*(t for t, _ in truths)), unknown)

    return bound


def _where(eps: np.longdouble, condition: Bounded, a: Bounded, b: Bounded) -> Bounded:
    truth, unknown = _as_truth(condition)
    value = np.where(truth, a.value, b.value)
    either = np.where(a.value == b.value, 0, np.abs(a.value - b.value)) + a.error + b.error
    either = np.where(np.isnan(either), np.inf, either)
    return Bounded(value, np.where(unknown, either, np.where(truth, a.error, b.error)))


def _erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(x.astype(np.float64))).numpy().astype(np.longdouble)


FUNCTIONS: dict[str, Callable[..., Bounded]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda eps, x: Bounded(-x.value, x.error),
    "abs": lambda eps, x: Bounded(np.abs(x.value), x.error),
    "maximum": _extreme(np.maximum),
    "minimum": _extreme(np.minimum),
    "sqrt": _monotone(np.sqrt, 1),
    "rsqrt": _not_near_zero(_monotone(lambda x: 1 / np.sqrt(x), 3)),
    "reciprocal": _not_near_zero(_monotone(lambda x: 1 / x, 2)),
    "pow": _power,
    "exp": _monotone(np.exp, 4),
    "expm1": _monotone(np.expm1, 4),
    "log": _monotone(np.log, 4),
    "log1p": _monotone(np.log1p, 4),
    "tanh": _monotone(np.tanh, 4),
    "sigmoid": _monotone(lambda x: 1 / (1 + np.exp(-x)), 8),
    "erf": _monotone(_erf, 8, absolute=3e-7),  # at::vec's polynomial for float32
    "sin": _wave(np.sin),
    "cos": _wave(np.cos),
    "eq": _compare(np.equal),
    "ne": _compare(np.not_equal),
    "lt": _compare(np.less),
    "le": _compare(np.less_equal),
    "gt": _compare(np.greater),
    "ge": _compare(np.greater_equal),
    "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or),
    "logical_not": _logical(np.logical_not),
    "where": _where,
}
ARITY = {
    **dict.fromkeys(["add", "sub", "mul", "div", "maximum", "minimum", "pow"], 2),
    **dict.fromkeys(["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"], 2),
    "where": 3,
}
# Arithmetic more often than the rest.
FUNCTION_NAMES = [*FUNCTIONS, *["add", "sub", "mul", "mul", "maximum"] * 2, "numel"]


def assert_within(result: torch.Tensor, expected: Bounded, what: str) -> None:
    """Raises AssertionError where a result is further away than rounding explains."""
    dtype = result.dtype
    found = result.to(torch.float64).numpy().astype(np.longdouble)
    value, error = expected.value, expected.error
    assert found.shape == value.shape, f"{what}: shape {found.shape}, expected {value.shape}"
    if dtype is torch.bool:
        truth, unknown = _as_truth(expected)
        wrong = (found != truth) & ~unknown
    else:
        info = torch.finfo(dtype)
        allowed = error + info.eps * (np.abs(value) + error) + info.tiny
        known = ~np.isinf(error)
        known &= ~(np.isfinite(value) & (np.abs(value) + error > info.max / 2))
        same = (found == value) | (np.isnan(found) & np.isnan(value))
        with np.errstate(invalid="ignore"):
            near = np.isfinite(value) & (np.abs(found - value) <= allowed)
        wrong = known & ~same & ~near
    if wrong.any():
        at = tuple(int(k) for k in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements wrong; at {at} expected "
            f"{value[at]:.9g} +- {error[at]:.2g}, found {found[at]:.9g}"
        )
