"""Convolutions under vmap: their tensors over v, and the loop over examples that they stand for."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

aten = torch.ops.aten

V = 3
INFO = SimpleNamespace(batch_size=V, randomness="error")
DIMS = (None, 0, 1, -1)


class Case(NamedTuple):
    """A convolution of two images of 2g channels, 7 pixels along each of `rank` axes."""

    rank: int
    transposed: bool
    groups: int
    stride: int
    padding: int
    dilation: int
    output_padding: int

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The last arguments of aten.convolution."""
        along = [[n] * self.rank for n in (self.stride, self.padding, self.dilation)]
        return (*along, self.transposed, [self.output_padding] * self.rank, self.groups)

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and b of one example."""
        g, space = self.groups, (7,) * self.rank
        channels = (2 * g, 3) if self.transposed else (3 * g, 2)
        sizes = (2, 2 * g, *space), (*channels, *(2,) * self.rank), (3 * g,)
        x, w, b = (torch.randn(s, dtype=dtype) for s in sizes)
        return x, w, b


CASES = {
    f"{rank}d{'_transposed' * transposed}_groups{groups}_{name}": Case(
        rank, transposed, groups, stride, padding, dilation, transposed * extra
    )
    for rank, transposed, groups in product((1, 2, 3), (False, True), (1, 2))
    for name, stride, padding, dilation, extra in (
        ("plain", 1, 1, 1, 0),
        ("strided", 2, 1, 1, 1),
        ("dilated", 2, 0, 2, 0),
        ("padded beyond its strides", 1, 0, 2, 1),  # only where dilation allows it
    )
}


def over_v(value: Tensor, dim: int | None) -> Tensor:
    """Examples that differ, as v lies first in memory; of dim -1 where it lies last."""
    if dim is None:
        return value
    value = torch.stack([value * (1 + i / 3) + i for i in range(V)]).movedim(0, dim)
    return value.contiguous() if dim == -1 else value


def example(value: Any, dim: int | None, i: int) -> Any:
    return value if dim is None else value.select(dim, i)


def loop(op: Callable[..., Any], args: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """The results of the examples one by one, stacked along v."""
    rows = []
    for i in range(V):
        found = op(*(example(a, d, i) for a, d in zip(args, dims, strict=True)))
        rows.append(found if isinstance(found, tuple) else (found,))
    return [None if r[0] is None else torch.stack(r) for r in zip(*rows, strict=True)]


def stacked(outs: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """The results of a rule along v."""
    return [
        o if o is None else o.expand(V, *o.shape) if d is None else o.movedim(d, 0)
        for o, d in zip(outs, dims, strict=True)
    ]


def batchings(tensors: int) -> Iterator[tuple[int | None, ...]]:
    """Every place of v in so many tensors, but for that it is in none."""
    return (dims for dims in product(DIMS, repeat=tensors) if any(d is not None for d in dims))
