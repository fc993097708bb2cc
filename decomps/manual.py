"""A formula of FunctionsManual.cpp from its signature, its shapes and its mathematics alone.

    @manual("grad: , input: *n, value: -> dinput: *n")
    def evenly_distribute_backward(grad: Gradient, input: Tensor, value: Tensor) -> Tensor:
        '''y = max(x):  dx = grad / count, at those elements that are y, count in number'''
        chosen = input == value
        return grad * chosen / chosen.sum()

The function's name and parameters are upstream's, in upstream's order. From the annotations comes
the operator's schema: `Gradient` and `Tangent` are tensors whose None stands for zero. The result
`dx` has the dtype of the argument x, any other that of the first gradient or tensor that is there.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from normpass.decomps.conventions import Result, like
from normpass.decomps.registry import formula
from normpass.decomps.shapes import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from normpass.decomps.registry import Kind

F = TypeVar("F", bound="Callable[..., Any]")
Number = int | float | complex
Size = int
Gradient = Tensor
Tangent = Tensor

FILE = "torch/csrc/autograd/FunctionsManual.cpp"
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Gradient": "Tensor?",
    "Tangent": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "Sequence[Gradient]": "Tensor?[]",
    "Sequence[Tangent]": "Tensor?[]",
    "int": "int",
    "Size": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "bool | None": "bool?",
    "str": "str",
    "str | None": "str?",
    "Number": "Scalar",
    "torch.dtype": "ScalarType",
    "torch.layout": "Layout",
    "torch.device": "Device",
    "Sequence[int]": "SymInt[]",
    "Sequence[int] | None": "int[]?",
    "Sequence[Sequence[int]]": "SymInt[][]",
    "Sequence[bool]": "bool[]",
    "Sequence[torch.dtype]": "ScalarType[]",
}
_ZEROS = ("Gradient", "Tangent", "Sequence[Gradient]", "Sequence[Tangent]")


def manual(
    shapes: str,
    *,
    overload: str = "",
    results: Sequence[Result] | None = None,
    sample: Callable[..., Mapping[str, Any]] | None = None,
    of: Callable[..., Any] | str | None = None,
    compared: Sequence[str] = (),
    as_given: bool = False,
    why: str = "",
) -> Callable[[F], F]:
    """Decorator: enters a function as upstream's formula of its name (`registry.formula`).

    overload: where upstream has several of a name, what this one is called: the function is
    norm_backward_dim, the formula norm_backward.dim. results: dtypes and layouts
    that are not the usual ones. Raises TypeError for an annotation that no schema has.
    """

    def decorate(function: F) -> F:
        name = function.__name__.removesuffix(f"_{overload}")
        parameters = list(inspect.signature(function).parameters.values())
        kinds = {p.name: str(p.annotation) for p in parameters}
        finished = results or tuple(_result(result, kinds) for result in parse(shapes).results)
        is_list = str(inspect.signature(function).return_annotation).startswith("list")
        returns = ", ".join(["Tensor[]" if is_list else "Tensor"] * len(finished))
        arguments = ", ".join(map(partial(_argument, name), parameters))
        schema = f"{name}{overload and '.'}{overload}({arguments}) -> "
        formula(
            _kind(name),
            schema + (f"({returns})" if len(finished) > 1 else returns),
            source=f"{FILE}: {name}",
            shapes=shapes,
            results=finished,
            zeros=[n for n, kind in kinds.items() if kind in _ZEROS],
            as_given=as_given,
            why=why,
            sample=sample,
            of=of,
            compared=compared,
        )(function)
        return function

    return decorate


def _kind(name: str) -> Kind:
    if "double_backward" in name:
        return "double_backward"
    forward = name.endswith(("jvp", "forward_AD")) or "_jvp_" in name
    return "jvp" if forward else "vjp"


def _argument(name: str, parameter: inspect.Parameter) -> str:
    annotation = str(parameter.annotation)
    if annotation not in _TYPES:
        raise TypeError(
            f"{name}: expected {parameter.name} to be one of {', '.join(_TYPES)}; "
            f"found {annotation}"
        )
    default = "" if parameter.default is parameter.empty else f"={parameter.default}"
    return f"{_TYPES[annotation]} {parameter.name}{default}"


def _result(name: str, kinds: Mapping[str, str]) -> Result:
    argument = name.removeprefix("d")
    if argument in kinds:
        return Result(like(argument), None)
    return Result(like(*[n for n, kind in kinds.items() if kind in (*_ZEROS, "Tensor")]), None)
