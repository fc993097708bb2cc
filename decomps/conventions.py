"""What every rule owes its caller, stated once.

A formula sees its tensors in working precision and returns every result; `with_conventions` makes
an operator's rule of it: it raises the arguments, puts ZERO and ONE for gradients and weights that
are not there, drops the results that a mask leaves out, and gives each of the others the dtype and
memory format that eager gives it; the gradient of a real tensor is real.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from normpass.decomps.activation.torch_internals import suggest_memory_format
from normpass.decomps.neutral import ONE, ZERO
from normpass.decomps.torch_versions import dtypes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

F = TypeVar("F", bound=Callable[..., Any])
Arguments = Mapping[str, Any]
"""The arguments of one call by the names of the operator's schema, as the caller gave them."""

_WORKING = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of this dtype are computed: float32 for the two halves."""
    return _WORKING.get(dtype, dtype)


def working_dtype(values: Iterable[Any]) -> torch.dtype | None:
    """The one working dtype of a call: that of its floating and complex tensors together."""
    dtypes = {working(dtype) for dtype in _dtypes(values)}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _dtypes(values: Iterable[Any]) -> Iterator[torch.dtype]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _dtypes(value)
        elif _is_number(value):
            yield value.dtype


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


# --- dtypes of results --------------------------------------------------------------------------

DType = Callable[[Arguments], "torch.dtype | Sequence[torch.dtype] | None"]
"""A dtype for each tensor where the result is a list of them."""


def like(*names: str) -> DType:
    """The dtype of the first of these arguments, or of what they are lists of, that is given; if
    none is, there is no result.
    """

    return lambda given: next(_given_dtypes(given, names), None)


def _given_dtypes(given: Arguments, names: Iterable[str]) -> Iterator[torch.dtype]:
    for name in names:
        value = given[name]
        for one in value if isinstance(value, list | tuple) else (value,):
            if one is not None:
                yield one.dtype


def raised(name: str) -> DType:
    """The working dtype of an argument."""
    return lambda given: working(given[name].dtype)


def real(name: str) -> DType:
    """The dtype of an argument's real part; if there is no argument, there is no result."""
    return lambda given: None if given[name] is None else given[name].dtype.to_real()


def promoted(*names: str) -> DType:
    """The dtype that arithmetic of these arguments has."""

    def dtype(given: Arguments) -> torch.dtype | None:
        dtypes = list(_given_dtypes(given, names))
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    return dtype


def statistic(given: Arguments) -> torch.dtype:
    """Eager's dtype for a saved statistic: the input's, or float32 where parameters are wider.

    ATen/native/cpu/mixed_data_type.h: param_scalar_type. The meta functions of torch 2.13 say
    bfloat16 in the mixed case too; eager does not.
    """
    x = given["input"]
    parameters = [given[name] for name in ("weight", "bias") if given[name] is not None]
    if parameters and parameters[0].dtype != x.dtype:
        return working(x.dtype)
    return x.dtype


def statistic_by_device(given: Arguments) -> torch.dtype:
    """As `statistic` on the CPU; the working dtype on accelerators."""
    x = given["input"]
    return statistic(given) if x.device.type in ("cpu", "mtia") else working(x.dtype)


# --- memory formats of results ------------------------------------------------------------------

Layout = Callable[[Arguments], torch.memory_format]


def contiguous(_: Arguments) -> torch.memory_format:
    return torch.contiguous_format


def as_input(given: Arguments) -> torch.memory_format:
    """Channels last where the input is, else contiguous."""
    return suggest_memory_format(given["input"])


def as_input_on_cpu(given: Arguments) -> torch.memory_format:
    """As the input on the CPU; eager's kernels for accelerators write contiguous results."""
    return as_input(given) if given["input"].device.type == "cpu" else torch.contiguous_format


@dataclass(frozen=True)
class Result:
    """Dtype and layout of one result; a layout of None leaves the strides as they come."""

    dtype: DType
    layout: Layout | None = contiguous

    def finish(self, value: Any, given: Arguments) -> Any:
        dtype = self.dtype(given)
        if value is ZERO and isinstance(dtype, list):
            return [None] * len(dtype)
        if isinstance(value, list):  # Tensor[]
            dtypes = dtype if isinstance(dtype, list | tuple) else [dtype] * len(value)
            return [self._finish(v, d, given) for v, d in zip(value, dtypes, strict=True)]
        return self._finish(value, dtype, given)

    def typed(self, value: Any, given: Arguments) -> torch.Tensor | None:
        """The result with its dtype, and strides as they come: of a batching rule."""
        dtype = self.dtype(given)
        return None if value is None or dtype is None else value.to(dtype)

    def _finish(self, value: Any, dtype: Any, given: Arguments) -> torch.Tensor | None:
        if dtype is None or value is ZERO:
            return None
        if value.is_complex() and not dtype.is_complex:
            value = value.real
        # Both are no-ops, without a node in the trace, where nothing has to change.
        value = value.to(dtype)
        return value if self.layout is None else value.contiguous(memory_format=self.layout(given))


def absent(value: Any) -> bool:
    """Whether this is ZERO, or a list of nothing else."""
    return all(map(absent, value)) if isinstance(value, list | tuple) else value is ZERO


def linear(formula: F, schema: torch.FunctionSchema, zeros: Collection[str]) -> F:
    """The formula, which is linear in these arguments together: where none of them is there, ZERO
    for each of its results, without a call.
    """
    parameters = tuple(inspect.signature(formula).parameters)
    ours = zip((argument.name for argument in schema.arguments), parameters, strict=False)
    names, count = [name for of_schema, name in ours if of_schema in zeros], len(schema.returns)

    @functools.wraps(formula)
    def linear(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if all(absent(given[name]) for name in names):
            return ZERO if count == 1 else (ZERO,) * count
        return formula(*args, **kwargs)

    return cast("F", linear) if names else formula


# --- the rule -----------------------------------------------------------------------------------

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REST, _KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def with_conventions(
    formula: Callable[..., Any],
    schema: torch.FunctionSchema,
    results: Sequence[Result],
    *,
    zeros: Iterable[str] = (),
    ones: Iterable[str] = (),
    as_given: bool = False,
    check: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The rule of an operator, from a formula and what its results look like.

    The formula's parameters correspond to the schema's in order, *numbers to all that are left and
    **options to those that are given by name; it returns one tensor for each of `results`, or a
    tuple of them. zeros, ones: the parameters for which None means ZERO (an undefined gradient) and
    ONE (a weight that is not there); a result that comes out as ZERO is None. as_given: the formula
    only moves elements, or leaves the precision to a kernel that sees to it; its arguments are not
    raised. check: called first, with the arguments as they are given, to raise what is wrong with
    them. Raises ValueError when the numbers differ or a name is unknown.
    """
    names = tuple(argument.name for argument in schema.arguments)
    parameters = inspect.signature(formula).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    options = [a.name for a in schema.arguments if a.kwarg_only and _KEYWORDS in kinds]
    taken, left = sum(kind in _BY_PLACE for kind in kinds), len(names) - len(options)
    fits = taken == left or (taken < left and _REST in kinds)
    if not fits or len(results) != len(schema.returns):
        raise ValueError(
            f"{schema.name} takes ({', '.join(names)}) and returns {len(schema.returns)}; the "
            f"formula takes ({', '.join(parameters)}) and describes {len(results)} results"
        )
    neutral = {**dict.fromkeys(zeros, ZERO), **dict.fromkeys(ones, ONE)}
    if not neutral.keys() <= set(names):
        raise ValueError(
            f"{schema.name} takes ({', '.join(names)}); zeros and ones name "
            f"{', '.join(sorted(neutral.keys() - set(names)))}"
        )
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    masks = [a.name for a in schema.arguments if str(a.type) == "List[bool]"]
    lists = [a.name for a in schema.arguments if str(a.real_type) == "List[ScalarType]"]

    @functools.wraps(formula)
    def rule(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        given |= {name: dtypes(given[name]) for name in lists}
        if check is not None:
            check(*(given[name] for name in names))
        dtype = None if as_given else working_dtype(given.values())
        raised = {name: _raise(given[name], dtype, neutral.get(name)) for name in names}
        by_name = {name: raised.pop(name) for name in options}
        values = formula(*raised.values(), **by_name)
        values = values if isinstance(values, tuple) else (values,)
        # Masked results are computed all the same: dead code elimination removes them.
        mask = given[masks[0]] if masks else (True,) * len(results)
        finished = tuple(
            result.finish(value, given) if wanted else None
            for result, value, wanted in zip(results, values, mask, strict=True)
        )
        return finished if len(finished) > 1 else finished[0]

    return rule


def _raise(value: Any, dtype: torch.dtype | None, neutral: Any) -> Any:
    if value is None:
        return neutral
    if isinstance(value, list | tuple):  # Tensor[]
        return [_raise(v, dtype, ZERO) for v in value]
    return value.to(dtype) if dtype is not None and _is_number(value) else value
