"""What only takes tensors apart and puts them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.conventions import Result, absent
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.conventions import Arguments

MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


def _real_as_each(given: Arguments) -> list[torch.dtype]:
    """The gradient's dtype, or its real one where the tensor is real."""
    grad, dtypes = given["grad"], given["dtypes"]
    if grad is None:
        return list(dtypes)
    return [
        grad.dtype if d.is_complex or not grad.is_complex() else grad.dtype.to_real()
        for d in dtypes
    ]


def _parts(grad: Tensor, dim: int) -> dict[str, Any]:
    """Two tensors whose concatenation has this gradient."""
    shapes = []
    for size in (1, grad.shape[dim] - 1):
        shapes.append(list(grad.shape))
        shapes[-1][dim] = size
    tensors = [grad.new_ones(shape) for shape in shapes]
    return {"sizes": shapes, "dtypes": [grad.dtype] * 2, "tensors": tensors}


@formula(
    "vjp",
    "cat_tensors_backward(Tensor? grad, SymInt[][] sizes, ScalarType[] dtypes, int dim) "
    "-> Tensor[]",
    source=f"{MANUAL}: cat_tensors_backward",
    shapes="grad: *n k *m -> dtensors: *n d *m",
    results=(Result(_real_as_each, None),),
    zeros=("grad",),
    sample=_parts,
    of=lambda tensors, dim: torch.cat(tensors, dim),
    as_given=True,
    why="copies, where upstream returns views of the gradient: an operator's results are its own",
)
def cat_tensors_backward(
    grad: Tensor, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dim: int
) -> list[Tensor]:
    """y = cat(x_1, x_2, ..):  each has the part of grad at its place.

    What has one axis among tensors of more is empty: cat ignores it.
    """
    if absent(grad):
        return [grad for _ in sizes]
    parts = []
    start = 0
    for shape in sizes:
        if len(shape) < grad.dim():
            parts.append(grad.new_zeros(0))
            continue
        parts.append(grad.narrow(dim, start, shape[dim]).clone())
        start = start + shape[dim]
    return parts


def _dtype(given: Arguments) -> torch.dtype | None:
    dtypes = [grad.dtype for grad in given["grads"] if grad is not None]
    return given["dtype"] or (dtypes[0] if dtypes else torch.get_default_dtype())


def _sizes_of_parts(grads: Sequence[Tensor], dim: int) -> dict[str, Any]:
    """What is split into tensors of these gradients."""
    sizes, split_sizes = list(grads[0].shape), [grad.shape[dim] for grad in grads]
    sizes[dim] = sum(split_sizes)
    return {"sizes": sizes, "split_sizes": split_sizes, "self": grads[0].new_ones(sizes)}


@formula(
    "vjp",
    "split_with_sizes_backward(Tensor?[] grads, SymInt[] split_sizes, int dim, SymInt[] sizes, *, "
    "ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) "
    "-> Tensor",
    source=f"{MANUAL}: split_with_sizes_backward",
    shapes="grads: *n d *m -> dself: *n k *m",
    results=(Result(_dtype, None),),
    zeros=("grads",),
    sample=_sizes_of_parts,
    of=lambda self, split_sizes, dim: self.split_with_sizes(split_sizes, dim),
    as_given=True,
    why="the options say what the zeros are made like that stand for the gradients not there; "
    "without them, they are made like the first gradient that is",
)
def split_with_sizes_backward(
    grads: Sequence[Tensor],
    split_sizes: Sequence[int],
    dim: int,
    sizes: Sequence[int],
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: torch.device | None,
    pin_memory: bool | None,
) -> Tensor:
    """x_1, x_2, .. = split(x):  dself = cat(dx_1, dx_2, ..), with zeros for what is not there"""
    dim = dim % len(sizes)
    given = next((grad for grad in grads if not absent(grad)), None)
    if given is not None:
        dtype, device = dtype or given.dtype, device or given.device
    parts = [
        torch.zeros(
            (*sizes[:dim], size, *sizes[dim + 1 :]),
            dtype=dtype,
            layout=layout,
            device=device,
            pin_memory=pin_memory,
        )
        if absent(grad)
        else grad
        for grad, size in zip(grads, split_sizes, strict=True)
    ]
    return torch.cat(parts, dim)
