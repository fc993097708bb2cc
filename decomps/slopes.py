"""Elementwise derivatives: from one row of a table, an op and its slope, come vjp and jvp.

    y = f(x) elementwise:   vjp = grad * conj(f'(x)),   jvp = tangent * f'(x)

A slope names what it needs: `x`, the tensor that is differentiated (the operator's first); `y`, the
result; any other argument of the operator by the name in its schema. It returns a tensor, a number,
or a truth value per element, which means one or zero: there a gradient is selected, not multiplied,
so that what is infinite where the slope is zero does not become NaN.

A slope that names `g`, the gradient or the tangent, returns the product g * f'(x): for functions
that divide by what may be zero (1 / 0 is NaN in the complex plane, g / 0 an infinity) and for those
that select and multiply at once.
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


# dtype.to_complex() in a form that Dynamo traces.
_COMPLEX = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}


class Elementwise:
    """An operator bound to its slope; makes the functions of its rules.

    What the schema says is read here, once: what is called later has to be traced by Dynamo.
    """

    def __init__(self, op: OpOverload, slope: Callable[..., Any]) -> None:
        self.op = op
        self.slope = slope
        schema = op._schema.arguments
        self.arguments = tuple(a.name for a in schema)
        self.positional = tuple(a.name for a in schema if not a.kwarg_only)
        self.keywords = tuple(a.name for a in schema if a.kwarg_only)
        self.defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        tensors = tuple(a.name for a in schema if isinstance(a.type, torch.TensorType))
        self.wanted = tuple(inspect.signature(slope).parameters)
        known = {"x", "y", "g"} | {*self.arguments} - {*tensors[:1]}
        if not tensors or not set(self.wanted) <= known:
            raise ValueError(
                f"the slope of {op} may ask for {', '.join(sorted(known))} and {op} must take a "
                f"tensor; the slope takes ({', '.join(self.wanted)}), {op} the tensors {tensors}"
            )
        self.tensors = tensors
        self.tensor = tensors[0]

    def vjp(self) -> Callable[..., Any]:
        def vjp(
            grad: Tensor | None, *args: Any, result: Tensor | None = None, **kwargs: Any
        ) -> Tensor | None:
            """grad * conj(slope): real where the tensor is. None for None."""
            if grad is None:
                return None
            given = self.given(args, kwargs)
            product = self.times(grad, given, result, conjugate=True)
            dtype = given[self.tensor].dtype
            if product.is_complex() and not dtype.is_complex:
                product = product.real
            return product.to(dtype)

        return self.signed(vjp, "grad")

    def jvp(self) -> Callable[..., Any]:
        def jvp(
            tangent: Tensor | None, *args: Any, result: Tensor | None = None, **kwargs: Any
        ) -> Tensor | None:
            """tangent * slope: complex where the result is. None for None."""
            if tangent is None:
                return None
            product = self.times(tangent, self.given(args, kwargs), result, conjugate=False)
            dtype = tangent.dtype
            return product.to(_COMPLEX.get(dtype, dtype) if product.is_complex() else dtype)

        return self.signed(jvp, "tangent")

    def signed(self, function: Callable[..., Any], first: str) -> Callable[..., Any]:
        """The function, with the parameters of the operator for whoever asks."""
        parameter = inspect.Parameter
        names = [first, *self.arguments]
        parameters = [parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in names]
        parameters.append(parameter("result", parameter.KEYWORD_ONLY, default=None))
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.slope = self.slope  # type: ignore[attr-defined]  # what registry.Rule.code asks for
        return function

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The operator's arguments by name."""
        return {**self.defaults, **dict(zip(self.arguments, args, strict=False)), **kwargs}

    def times(
        self, grad: Tensor, given: dict[str, Any], result: Tensor | None, *, conjugate: bool
    ) -> Tensor:
        """grad * slope, or grad * conj(slope), in working precision."""
        g, x = _raised(grad), _raised(given[self.tensor])
        known = {**given, "x": x, "g": g.conj() if conjugate else g}
        if "y" in self.wanted:
            known["y"] = self.result(given, x) if result is None else _raised(result)
        slope = self.slope(*[known[name] for name in self.wanted])
        if "g" in self.wanted:
            return slope.conj() if conjugate else slope
        return _times(g, slope, conjugate=conjugate)

    def result(self, given: dict[str, Any], x: Tensor) -> Tensor:
        """The operator itself, for a caller that has not kept its result."""
        given = {**given, self.tensor: x}
        keywords = {name: given[name] for name in self.keywords}
        return self.op(*[given[name] for name in self.positional], **keywords)


def _raised(x: Tensor) -> Tensor:
    return x.to(working(x.dtype))


def _times(g: Tensor, slope: Any, *, conjugate: bool) -> Tensor:
    if isinstance(slope, torch.Tensor):
        if slope.dtype is torch.bool:
            return torch.where(slope, g, 0)
        return g * (slope.conj() if conjugate else slope)
    if slope == 0:
        return torch.zeros_like(g)
    if slope == 1:
        return g
    return g * (slope.conjugate() if conjugate and isinstance(slope, complex) else slope)
