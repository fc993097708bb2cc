"""What all batching rules share: named batch axes in, batch dimensions out.

A batching rule is f(info, in_dims, *args) -> (outs, out_dims), as torch.library.register_vmap has
it. Inside, every tensor begins with the batch axis v: a tensor that is not batched has one of size
one, so that broadcasting does the rest. Both are views, and nothing is expanded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.conventions import working_dtype
from normpass.decomps.registry import find_op, register_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

    Outputs = tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]
    BatchingRule = Callable[..., Outputs]


def batching_rule(
    op: OpOverload | str,
    *,
    source: str,
    shapes: str,
    why: str = "",
    constants: Sequence[int] = (),
) -> Callable[[BatchingRule], BatchingRule]:
    """Decorator: enters the batching rule of an operator, asked where an argument is batched.

    `op` may be a string where some supported version of torch lacks the operator: there the rule
    does not exist. constants: as in registry.Rule.
    """

    def decorate(rule: BatchingRule) -> BatchingRule:
        found = find_op(op) if isinstance(op, str) else op
        if found is None:
            return rule
        guarded = unless_unbatched(found)(rule)
        enter = register_rule(
            "batching", found, source=source, shapes=shapes, why=why, constants=constants
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
            outs = op(*args)
            outs = tuple(outs) if isinstance(outs, tuple | list) else (outs,)
            return outs, (None,) * len(outs)

        return guarded

    return decorate


def any_of(*dims: Any) -> bool:
    """Whether one of these batch dimensions is there; lists of them are looked into."""
    return any(any_of(*d) if isinstance(d, list | tuple) else d is not None for d in dims)


def front(value: Tensor, dim: int | None) -> Tensor:
    """value: ... v ... -> v ..., or ... -> 1 ... where it is not batched: a view."""
    if dim is None:
        return value.unsqueeze(0)
    return value if dim == 0 else value.movedim(dim, 0)


def fronts(values: Sequence[Tensor | None], dims: Sequence[int | None]) -> list[Any]:
    """Each of the tensors as v ..., in the one working precision of all; None stays None."""
    dtype = working_dtype(values) or torch.get_default_dtype()
    return [
        None if value is None else front(value, dim).to(dtype)
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


def trailing(value: Tensor | None, rank: int) -> Any:
    """value: v *d -> v 1 1 ... *d, against an x: v *n *d of this rank; None stays None."""
    if value is None:
        return None
    batch, *sizes = value.shape
    return value.view(batch, *(1,) * (rank - value.dim()), *sizes)


def example_sizes(x: Tensor, dim: int | None) -> list[int]:
    """The sizes of one example."""
    sizes = list(x.shape)
    if dim is not None:
        del sizes[dim]
    return sizes


def check_rank(x: Tensor, dim: int | None, normalized_shape: Sequence[int]) -> None:
    """The norm may not reach into the batch axis, which the operator itself cannot know."""
    sizes = example_sizes(x, dim)
    if len(sizes) < len(normalized_shape):
        expected = ", ".join(str(size) for size in normalized_shape)
        raise RuntimeError(
            f"Given normalized_shape=[{expected}], expected input with shape [*, {expected}], but "
            f"got input of size{sizes}"
        )
