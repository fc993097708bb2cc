"""Elementwise derivatives: from one row of a table, an op and its slope, come vjp and jvp.

    y = f(x) elementwise:   vjp = grad * conj(f'(x)),   jvp = tangent * f'(x)

A slope names what it needs: `x`, the tensor that is differentiated; `y`, the result; any other
argument of the operator by the name in its schema. It returns a tensor, a number, or a truth value
per element, which means one or zero: there a gradient is selected, not multiplied, so that what is
infinite where the slope is zero does not become NaN.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.conventions import working

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload


class Elementwise:
    """An operator of one tensor, bound to its slope; makes the functions of its rules."""

    def __init__(self, op: OpOverload, slope: Callable[..., Any]) -> None:
        self.op = op
        self.slope = slope
        self.arguments = tuple(argument.name for argument in op._schema.arguments)
        tensors = [a.name for a in op._schema.arguments if isinstance(a.type, torch.TensorType)]
        self.wanted = tuple(inspect.signature(slope).parameters)
        known = {"x", "y", *self.arguments} - set(tensors)
        if len(tensors) != 1 or not set(self.wanted) <= known:
            raise ValueError(
                f"the slope of {op} may ask for {', '.join(sorted(known))} and {op} must take one "
                f"tensor; the slope takes ({', '.join(self.wanted)}), {op} the tensors {tensors}"
            )
        self.tensor = tensors[0]
        self.defaults = {
            a.name: a.default_value for a in op._schema.arguments if a.has_default_value()
        }

    def vjp(self) -> Callable[..., Any]:
        def vjp(grad: Tensor, *args: Any, result: Tensor | None = None, **kwargs: Any) -> Tensor:
            """grad * conj(slope): real where the tensor is."""
            x, slope = self.evaluate(args, result, kwargs)
            return _times(grad, slope, conjugate=True, like=x)

        return self.signed(vjp, "grad")

    def jvp(self) -> Callable[..., Any]:
        def jvp(tangent: Tensor, *args: Any, result: Tensor | None = None, **kwargs: Any) -> Tensor:
            """tangent * slope"""
            _, slope = self.evaluate(args, result, kwargs)
            return _times(tangent, slope, conjugate=False, like=None)

        return self.signed(jvp, "tangent")

    def signed(self, function: Callable[..., Any], first: str) -> Callable[..., Any]:
        """The function, with the parameters of the operator for whoever asks."""
        parameter = inspect.Parameter
        names = [first, *self.arguments]
        parameters = [parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in names]
        parameters.append(parameter("result", parameter.KEYWORD_ONLY, default=None))
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    def evaluate(
        self, args: tuple[Any, ...], result: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """The differentiated tensor as it was given, and the slope in working precision."""
        given = {**self.defaults, **dict(zip(self.arguments, args, strict=False)), **kwargs}
        original = given[self.tensor]
        x = original.to(working(original.dtype))
        known = {**given, "x": x}
        if "y" in self.wanted:
            known["y"] = (
                self.result(given | {self.tensor: x}) if result is None else result.to(x.dtype)
            )
        return original, self.slope(*(known[name] for name in self.wanted))

    def result(self, given: dict[str, Any]) -> Tensor:
        """The operator itself, for a caller that has not kept its result."""
        schema = self.op._schema.arguments
        positional = [given[a.name] for a in schema if not a.kwarg_only]
        return self.op(*positional, **{a.name: given[a.name] for a in schema if a.kwarg_only})


def _times(grad: Tensor, slope: Any, *, conjugate: bool, like: Tensor | None) -> Tensor:
    """grad * slope, or its conjugate; in the dtype of grad, or that of `like`."""
    dtype = grad.dtype if like is None else like.dtype
    g = grad.to(working(grad.dtype))
    if isinstance(slope, torch.Tensor) and slope.dtype is torch.bool:
        product = torch.where(slope, g, 0)
    elif isinstance(slope, torch.Tensor):
        product = g * (slope.conj() if conjugate else slope)
    else:
        product = torch.zeros_like(g) if slope == 0 else g * slope
    if product.is_complex() and not dtype.is_complex:
        product = product.real
    return product.to(dtype)
