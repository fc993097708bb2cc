"""What all batching rules share: named batch axes in, batch dimensions out.

A batching rule is f(info, in_dims, *args) -> (outs, out_dims), as torch.library.register_vmap has
it. Inside, every tensor begins with the batch axis v: a tensor that is not batched has one of size
one, so that broadcasting does the rest. Both are views, and nothing is expanded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from normpass.decomps.axes import pad_to_rank
from normpass.decomps.conventions import working_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

    Outputs = tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]
    BatchingRule = Callable[..., Outputs]


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
    return any(dim is not None for dim in tree_leaves(dims))


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


def per_channel(value: Tensor, rank: int) -> Tensor:
    """value: v c -> v 1 c 1 1 ..., against an x: v n c *s of this rank."""
    return pad_to_rank(value.unsqueeze(1), rank)


def trailing(value: Tensor, rank: int) -> Tensor:
    """value: v *d -> v 1 1 ... *d, against an x: v *n *d of this rank."""
    batch, *sizes = value.shape
    return value.view(batch, *(1,) * (rank - value.dim()), *sizes)
