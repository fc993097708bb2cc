"""A formula of FunctionsManual.cpp from its signature, its shapes and its mathematics alone.

    @manual("grad: , input: *n, value: -> dinput: *n")
    def evenly_distribute_backward(grad: Gradient, input: Tensor, value: Tensor) -> Tensor:
        '''y = max(x):  dx = grad / count, at those elements that are y, count in number'''
        chosen = input == value
        return grad * chosen / chosen.sum()

The function's name and parameters are upstream's, in upstream's order. From the annotations comes
the operator's schema: `Gradient` and `Tangent` are tensors whose None stands for zero, and without
any of them there is no call; the None of a `Weight` stands for ones; `Mask3` is a mask of three
results; `**options` are a dtype and what else a new tensor has. The result `dx` or `x_t` has the
dtype of the argument x, x_t or x_opt, any other that of the first gradient or tensor that is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from normpass.decomps.conventions import DType, Result, like
from normpass.decomps.registry import formula
from normpass.decomps.shapes import parse

if TYPE_CHECKING:
    from normpass.decomps.registry import Kind

F = TypeVar("F", bound="Callable[..., Any]")
Gradient = Tensor
Tangent = Tensor
Weight = Tensor
Tensors = Sequence[Tensor]
Gradients = Sequence[Gradient]
Tangents = Sequence[Tangent]
Number = int | float | complex
Real = float
Size = int
Ints = Sequence[int]
Dims = Sequence[int]
Mask = Sequence[bool]
Mask2 = Sequence[bool]
Mask3 = Sequence[bool]
Shapes = Sequence[Ints]
DTypes = Sequence[torch.dtype]

FILE = "torch/csrc/autograd/FunctionsManual.cpp"
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Gradient": "Tensor?",
    "Tangent": "Tensor?",
    "Weight": "Tensor?",
    "Tensors": "Tensor[]",
    "Gradients": "Tensor?[]",
    "Sequence[Tensor | None]": "Tensor?[]",
    "Tangents": "Tensor?[]",
    "int": "int",
    "Size": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "str": "str",
    "str | None": "str?",
    "Number": "Scalar",
    "Real | None": "Scalar?",
    "torch.dtype": "ScalarType",
    "torch.layout": "Layout",
    "Ints": "SymInt[]",
    "Ints | None": "int[]?",
    "Dims": "int[1]",
    "Dims | None": "int[1]?",
    "Shapes": "SymInt[][]",
    "Mask": "bool[]",
    "Mask2": "bool[2]",
    "Mask3": "bool[3]",
    "DTypes": "ScalarType[]",
}
_ZEROS = ("Gradient", "Tangent", "Gradients", "Tangents")
_OPTIONS = (
    "*, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None"
)


def manual(
    shapes: str,
    *,
    name: str = "",
    rest: str = "",
    dtype: DType | None = None,
    results: Sequence[Result] | None = None,
    sample: Callable[..., Mapping[str, Any]] | None = None,
    of: Callable[..., Any] | str | None = None,
    compared: Sequence[str] = (),
    as_given: bool = False,
    source: str = "",
    why: str = "",
) -> Callable[[F], F]:
    """Decorator: enters a function as upstream's formula of its name (`registry.formula`).

    name: what upstream calls it, if not so: "norm_backward.dim" where it has several of a name.
    rest: the schema of what the function takes as *numbers, "SymInt[] stride, bool transposed".
    dtype, or with layouts results: those of the results that are not the usual ones. Raises
    TypeError for an annotation that no schema has.
    """

    def decorate(function: F) -> F:
        called = name or function.__name__
        parameters = inspect.signature(function).parameters
        kinds = {p.name: str(p.annotation) for p in parameters.values()}
        usual = [Result(dtype or _usual(result, kinds), None) for result in parse(shapes).results]
        is_list = str(inspect.signature(function).return_annotation).startswith("list")
        returns = ", ".join(["Tensor[]" if is_list else "Tensor"] * len(usual))
        arguments = ", ".join(_argument(called, p, rest) for p in parameters.values())
        return formula(
            _kind(called, kinds.values()),
            f"{called}({arguments}) -> " + (f"({returns})" if len(usual) > 1 else returns),
            source=source or f"{FILE}: {called.partition('.')[0]}",
            shapes=shapes,
            results=results or usual,
            zeros=[n for n, kind in kinds.items() if kind in _ZEROS],
            ones=[n for n, kind in kinds.items() if kind == "Weight"],
            as_given=as_given,
            why=why,
            sample=sample,
            of=of,
            compared=compared,
        )(function)

    return decorate


def _kind(name: str, annotations: Collection[str]) -> Kind:
    if "double_backward" in name:
        return "double_backward"
    return "vjp" if {"Tangent", "Tangents"}.isdisjoint(annotations) else "jvp"


def _argument(name: str, parameter: inspect.Parameter, rest: str) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return rest
    if parameter.kind is parameter.VAR_KEYWORD:
        return _OPTIONS
    annotation = str(parameter.annotation)
    if annotation not in _TYPES:
        raise TypeError(
            f"{name}: expected {parameter.name} to be one of {', '.join(_TYPES)}; "
            f"found {annotation}"
        )
    default = "" if parameter.default is parameter.empty else f"={parameter.default}"
    return f"{_TYPES[annotation]} {parameter.name}{default}"


def _usual(result: str, kinds: Mapping[str, str]) -> DType:
    """The dtype of a result of this name: of dx or x_t that of x."""
    tensors = [n for n, kind in kinds.items() if kind in (*_ZEROS, "Tensor", "Tensors")]
    names = (*(result[1:] + end for end in ("", "_t", "_opt")), result.removesuffix("_t"))
    mine = [n for n in names if n in kinds]
    of_one = mine and kinds[mine[0]] == "Weight"  # without it there is no result
    return like(*mine[:1], *(() if of_one else tensors))
