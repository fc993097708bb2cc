"""Named-axis helpers: which axes a norm reduces, and broadcasting against them.

None of them copies: each is a view, a plain reduction or arithmetic on sizes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normpass.decomps.neutral import ONE, ZERO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def outer_and_inner(x: Tensor, normalized_shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """x: *n *d, where *d are the axes of normalized_shape -> the numbers of *n, of *d."""
    first = x.dim() - len(normalized_shape)
    return list(range(first)), list(range(first, x.dim()))


def sum_over(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The sum over these axes; over none it is x, where torch.sum would take all."""
    return x.sum(list(axes)) if axes else x


def all_but(x: Tensor, axis: int) -> list[int]:
    """The numbers of all axes of x but one."""
    return [i for i in range(x.dim()) if i != axis]


def pad_to_rank(x: Tensor, rank: int) -> Tensor:
    """x: *n -> *n 1 1 ..., with axes of size one appended up to this rank."""
    missing = rank - x.dim()
    return x.view(*x.shape, *(1,) * missing) if missing > 0 else x


def per_channel(v: Any, rank: int, *split: int) -> Any:
    """v: *v c -> *v 1 c 1 1 ..., against an x: *v n c *s of this rank; c split into these sizes.

    ZERO and ONE stay as they are.
    """
    if v is ZERO or v is ONE:
        return v
    *batch, channels = v.shape
    sizes = split or (channels,)
    return v.view(*batch, 1, *sizes, *(1,) * (rank - len(batch) - 1 - len(sizes)))


def reduced(x: Tensor, dim: Sequence[int] | None) -> list[int]:
    """The numbers of the axes that a reduction over `dim` takes; all for None, [] and a 0-d x."""
    if not dim or x.dim() == 0:
        return list(range(x.dim()))
    return sorted(axis % x.dim() for axis in dim)


def size_of(x: Tensor, axes: Sequence[int]) -> int:
    """The product of the sizes of these axes."""
    return math.prod(x.shape[axis] for axis in axes)


def put_back(v: Tensor, axes: Sequence[int]) -> Tensor:
    """v, of which these axes were reduced -> with them again, of size one. ZERO stays ZERO."""
    for axis in sorted(axes):
        v = v.unsqueeze(axis)
    return v
