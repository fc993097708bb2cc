"""What all batching rules share: named batch axes in, batch dimensions out.

A batching rule is f(info, in_dims, *args) -> (outs, out_dims), as torch.library.register_vmap has
it. Inside, every tensor begins with the batch axis v: a tensor that is not batched has one of size
one, so that broadcasting does the rest. Both are views, and nothing is expanded.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from normpass.decomps.conventions import working_dtype
from normpass.decomps.registry import decomposition, find_op, register_rule
from normpass.decomps.shapes import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

    from normpass.decomps.conventions import Result

    Outputs = tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]
    BatchingRule = Callable[..., Outputs]

F = TypeVar("F", bound="Callable[..., Any]")


def batching_rule(
    op: OpOverload | str,
    *,
    source: str,
    shapes: str,
    why: str = "",
    constants: Sequence[int] = (),
    sample: Callable[..., Mapping[str, Any]] | None = None,
    eager: bool = True,
) -> Callable[[BatchingRule], BatchingRule]:
    """Decorator: enters the batching rule of an operator, asked where an argument is batched.

    `op` may be a string where some supported version of torch lacks the operator: there the rule
    does not exist. constants, sample, eager: as in registry.Rule.
    """

    def decorate(rule: BatchingRule) -> BatchingRule:
        found = find_op(op) if isinstance(op, str) else op
        if found is None:
            return rule
        guarded = unless_unbatched(found)(rule)
        enter = register_rule(
            "batching",
            found,
            source=source,
            shapes=shapes,
            why=why,
            constants=constants,
            sample=sample,
            eager=eager,
        )
        return enter(guarded)

    return decorate


def unless_unbatched(op: OpOverload) -> Callable[[BatchingRule], BatchingRule]:
    """Decorator: the operator itself where no argument is batched, else the rule."""

    def decorate(rule: BatchingRule) -> BatchingRule:
        @functools.wraps(rule)
        def guarded(info: Any, in_dims: Sequence[Any], *args: Any) -> Outputs:
            if any_of(*in_dims):
                return rule(info, in_dims, *args)
            outs = by_position(op)(*args)
            outs = tuple(outs) if isinstance(outs, tuple | list) else (outs,)
            return outs, (None,) * len(outs)

        return guarded

    return decorate


def by_position(op: OpOverload) -> Callable[..., Any]:
    """The operator as a function of all its arguments in order, those of keywords too."""
    arguments = op._schema.arguments
    named = [argument.name for argument in arguments if argument.kwarg_only]
    if not named:
        return op
    places = len(arguments) - len(named)
    return lambda *args: op(*args[:places], **dict(zip(named, args[places:], strict=True)))


def batched_decomposition(
    op: OpOverload | str,
    *,
    source: str,
    shapes: str,
    results: Sequence[Result],
    of: Sequence[str],
    batching: str,
    why: str = "",
    batching_why: str = "",
    autograd: bool = False,
) -> Callable[[F], F]:
    """Decorator: enters a formula as the decomposition of an operator and as its batching rule.

    The formula's keyword `v` is the number of axes before those that it is written for, which it
    may not sum over: none for the decomposition, one for the batching rule. of: the parameters that
    each result is made of, which say whether it varies over v: ("g x", "g"). batching,
    batching_why: source and why of the batching rule; the rest is as in registry.decomposition.
    """

    def decorate(formula: F) -> F:
        decomposition(
            op, source=source, shapes=shapes, results=results, why=why, autograd=autograd
        )(formula)
        found = find_op(op) if isinstance(op, str) else op
        if found is None:
            return formula
        arguments = [argument.name for argument in found._schema.arguments]
        names = dict(zip(inspect.signature(formula).parameters, arguments, strict=False))

        def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Outputs:
            given = dict(zip(arguments, args, strict=True))
            dims = dict(zip(names, in_dims, strict=True))
            values = formula(*fronts(args, in_dims), v=1)
            values = values if isinstance(values, tuple) else (values,)
            mask = given.get("output_mask", (True,) * len(results))
            finished = (
                result.typed(value, given) if wanted else None
                for result, value, wanted in zip(results, values, mask, strict=True)
            )
            varies = (any_of(*map(dims.get, parameters.split())) for parameters in of)
            return outputs(*zip(finished, varies, strict=True))

        rule.__doc__, rule.__module__ = formula.__doc__, formula.__module__
        batching_rule(found, source=batching, shapes=_with_v(shapes, names), why=batching_why)(rule)
        return formula

    return decorate


def _with_v(shapes: str, names: Mapping[str, str]) -> str:
    """A formula's shapes by the operator's names, v before each."""
    read = parse(shapes)
    left, right = (
        ", ".join(
            f"{names.get(name, name)}: {' '.join(('v', *axes))}" for name, axes in side.items()
        )
        for side in (read.arguments, read.results)
    )
    return f"{left} -> {right}"


def any_of(*dims: Any) -> bool:
    """Whether one of these batch dimensions is there; lists of them are looked into."""
    return any(any_of(*d) if isinstance(d, list | tuple) else d is not None for d in dims)


def front(value: Tensor, dim: int | None) -> Tensor:
    """value: ... v ... -> v ..., or ... -> 1 ... where it is not batched: a view."""
    if dim is None:
        return value.unsqueeze(0)
    return value if dim == 0 else value.movedim(dim, 0)


def fronts(values: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Each of the tensors as v ..., in the one working precision of all; the rest stays.

    Raises RuntimeError where that is none: torch has no norms of integers.
    """
    dtype = working_dtype(values)
    if dtype is None:
        found = sorted({str(v.dtype) for v in values if isinstance(v, torch.Tensor)})
        raise RuntimeError(f"expected tensors of a floating or complex dtype, found {found}")
    return [
        front(value, dim).to(dtype) if isinstance(value, torch.Tensor) else value
        for value, dim in zip(values, dims, strict=True)
    ]


def outputs(*results: tuple[Tensor | None, bool]) -> Outputs:
    """Results v ..., each with whether it varies over v -> the outs and out_dims of a rule."""
    outs = tuple(
        value if value is None or varies else value.squeeze(0) for value, varies in results
    )
    return outs, tuple(0 if varies and value is not None else None for value, varies in results)


def typed_as(value: Tensor | None, x: Tensor | None) -> Tensor | None:
    """A result in the dtype of this argument; nothing where there is no argument."""
    return None if value is None or x is None else value.to(x.dtype)


def trailing(value: Tensor | None, rank: int, v: int = 1) -> Any:
    """value: v *d -> v 1 1 ... *d, against an x: v *n *d of this rank; None stays None."""
    if value is None or not v:
        return value
    batch, *sizes = value.shape
    return value.view(batch, *(1,) * (rank - value.dim()), *sizes)


def example_sizes(x: Tensor, dim: int | None) -> list[int]:
    """The sizes of one example."""
    sizes = list(x.shape)
    if dim is not None:
        del sizes[dim]
    return sizes


def check_rank(sizes: Sequence[int], normalized_shape: Sequence[int]) -> None:
    """The norm may not reach into the batch axis, which the operator itself cannot know."""
    if len(sizes) < len(normalized_shape):
        expected = ", ".join(str(size) for size in normalized_shape)
        raise RuntimeError(
            f"Given normalized_shape=[{expected}], expected input with shape [*, {expected}], but "
            f"got input of size{list(sizes)}"
        )
