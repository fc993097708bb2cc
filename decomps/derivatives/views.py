"""What only moves, casts and takes apart, and puts together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normpass.decomps.conventions import Arguments, DType, absent, like, promoted
from normpass.decomps.manual import (
    DTypes,
    Gradient,
    Gradients,
    Ints,
    Shapes,
    Size,
    Tangents,
    Tensors,
    manual,
)

aten = torch.ops.aten


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


@manual(
    "grad: *n k *m -> dtensors: *n d *m",
    dtype=_real_as_each,
    sample=_parts,
    of=aten.cat.default,
    as_given=True,
    why="copies, where upstream returns views of the gradient: an operator's results are its own",
)
def cat_tensors_backward(grad: Gradient, sizes: Shapes, dtypes: DTypes, dim: int) -> list[Tensor]:
    """y = cat(x_1, x_2, ..):  each has the part of grad at its place.

    What has one axis among tensors of more is empty: cat ignores it.
    """
    parts = []
    start = 0
    for shape in sizes:
        if len(shape) < grad.dim():
            parts.append(grad.new_zeros(0))
            continue
        parts.append(grad.narrow(dim, start, shape[dim]).clone())
        start = start + shape[dim]
    return parts


def _told_or_like(name: str) -> DType:
    return lambda given: given["dtype"] or like(name)(given)


def _sizes_of_parts(grads: Tensors, dim: int) -> dict[str, Any]:
    """What is split into tensors of these gradients."""
    sizes, split_sizes = list(grads[0].shape), [grad.shape[dim] for grad in grads]
    sizes[dim] = sum(split_sizes)
    return {"sizes": sizes, "split_sizes": split_sizes, "self": grads[0].new_ones(sizes)}


@manual(
    "grads: *n d *m -> dself: *n k *m",
    dtype=_told_or_like("grads"),
    sample=_sizes_of_parts,
    of=aten.split_with_sizes.default,
    as_given=True,
    why="the options say what the zeros are made like that stand for the gradients not there; "
    "without them, they are made like the first gradient that is",
)
def split_with_sizes_backward(
    grads: Gradients, split_sizes: Ints, dim: int, sizes: Ints, **options: Any
) -> Tensor:
    """x_1, x_2, .. = split(x):  dself = cat(dx_1, dx_2, ..), with zeros for what is not there"""
    dim, given = dim % len(sizes), _first(grads)

    def zeros(size: int) -> Tensor:
        return given.new_zeros((*sizes[:dim], size, *sizes[dim + 1 :]), **options)

    pairs = zip(grads, split_sizes, strict=True)
    return torch.cat([zeros(size) if absent(grad) else grad for grad, size in pairs], dim)


def _first(grads: Gradients) -> Tensor:
    return next(grad for grad in grads if not absent(grad))


@manual(
    "grads: *n d *m -> dself: *n 2d *m",
    dtype=_told_or_like("grads"),
    of="split.Tensor",
    as_given=True,
)
def split_backward(
    grads: Gradients, split_size: Size, dim: int, sym_sizes: Ints, **options: Any
) -> Tensor:
    """As above, of parts of one size, but for the last."""
    before = len(grads) - 1
    parts = [split_size] * before + [sym_sizes[dim] - split_size * before]
    return split_with_sizes_backward(grads, parts, dim, sym_sizes, **options)


@manual(
    "grad: m n -> dself: n m",
    sample=lambda: {"fwd_dims": [1, 0]},
    of=lambda self, fwd_dims: self.permute(fwd_dims),
    as_given=True,
)
def permute_backwards(grad: Gradient, fwd_dims: Ints) -> Tensor:
    """y = x with its axes in another order:  dx = grad with them put back"""
    rank = len(fwd_dims)
    inverse = sorted(range(rank), key=lambda axis: fwd_dims[axis] % rank)
    return grad.permute(inverse).clone()


@manual(
    "grad: 2d -> dself: d",
    sample=lambda grad: {"repeats": [2], "input_shape": [grad.shape[0] // 2]},
    of=aten.repeat.default,
)
def repeat_backward(grad: Gradient, repeats: Ints, input_shape: Ints) -> Tensor:
    """y = x, repeated:  dx = the sum of grad over the repetitions"""
    if 0 in repeats:
        return grad.new_zeros(input_shape)
    new = len(repeats) - len(input_shape)
    split = [*repeats[:new]]
    for times, size in zip(repeats[new:], input_shape, strict=True):
        split += [times, size]
    axes = [*range(new), *range(new, len(split), 2)]
    grad = grad.reshape(split)
    return grad.sum(axes) if axes else grad


@manual(
    "grad: n d -> dself: n 2d",
    sample=lambda grad: {
        "input_sizes": [grad.shape[0], 2 * grad.shape[1]],
        "dim": 1,
        "start": grad.shape[1],
        "end": None,
        "step": 1,
    },
    of=aten.slice.Tensor,
    as_given=True,
)
def slice_backward_wrapper(
    grad: Gradient, input_sizes: Ints, dim: int, start: int | None, end: int | None, step: int
) -> Tensor:
    """y = x[start:end:step]:  dx = grad there, zero elsewhere"""
    start = 0 if start is None else start
    end = input_sizes[dim] if end is None else end
    return aten.slice_backward(grad, input_sizes, dim, start, end, step)


@manual("grads: *n -> dself: *n 2", of=aten.unbind.int, as_given=True)
def unbind_backward(grads: Gradients, dim: int) -> Tensor:
    """x_1, x_2, .. = the parts of x along dim:  dx = stack(dx_1, dx_2, ..)"""
    nothing = torch.zeros_like(_first(grads))
    return torch.stack([nothing if absent(grad) else grad for grad in grads], dim)


@manual(
    "grad: *n 2 -> dtensors: *n",
    dtype=_real_as_each,
    sample=lambda grad: {
        "dtypes": [grad.dtype] * 2,
        "tensors": list(grad.new_ones(grad.shape).unbind(-1)),
    },
    of=aten.stack.default,
    as_given=True,
)
def stack_tensors_backward(grad: Gradient, dim: int, dtypes: DTypes) -> list[Tensor]:
    """y = stack(x_1, x_2, ..):  each has the part of grad at its place"""
    return [part.clone() for part in grad.unbind(dim)]


def _blocks(grad: Tensor) -> dict[str, Any]:
    """Two tensors whose block diagonal has this gradient."""
    shape = [size // 2 for size in grad.shape]
    tensors = [grad.new_ones(shape) for _ in range(2)]
    return {"sizes": [shape] * 2, "dtypes": [grad.dtype] * 2, "tensors": tensors}


@manual(
    "grad: 2n 2d -> dtensors: n d",
    dtype=_real_as_each,
    sample=_blocks,
    of=aten.block_diag.default,
    as_given=True,
)
def block_diag_backward(grad: Gradient, sizes: Shapes, dtypes: DTypes) -> list[Tensor]:
    """y = diag(x_1, x_2, ..):  each has its block of grad; a vector is a row, a number a block"""
    parts, row, column = [], 0, 0
    for shape in sizes:
        height, width = (1, 1, *shape)[-2:]
        block = grad.narrow(0, row, height).narrow(1, column, width)
        parts.append(block.reshape(list(shape)).clone())
        row, column = row + height, column + width
    return parts


def _tangents(tensors: Tensors, tangents: Tensors) -> list[Tensor]:
    pairs = zip(tensors, tangents, strict=True)
    return [torch.zeros_like(x) if absent(t) else t for x, t in pairs]


@manual(
    "tensors: *n d, tensors_t: *n d -> y_t: *n 2d",
    dtype=promoted("tensors"),
    of="cat",
    as_given=True,
)
def cat_jvp(tensors: Tensors, tensors_t: Tangents, dim: int) -> Tensor:
    """The concatenation of the tangents. Upstream finds them within the tensors."""
    return torch.cat(_tangents(tensors, tensors_t), dim)


@manual(
    "tensors: *n, tensors_t: *n -> y_t: *n 2", dtype=promoted("tensors"), of="stack", as_given=True
)
def stack_jvp(tensors: Tensors, tensors_t: Tangents, dim: int) -> Tensor:
    """The tangents, stacked"""
    return torch.stack(_tangents(tensors, tensors_t), dim)


@manual(
    "tensors: n d, tensors_t: n d -> y_t: 2n 2d",
    dtype=promoted("tensors"),
    of="block_diag",
    as_given=True,
)
def block_diag_jvp(tensors: Tensors, tensors_t: Tangents) -> Tensor:
    """The block diagonal of the tangents"""
    return torch.block_diag(*_tangents(tensors, tensors_t))


@manual(
    "grad: *n, mask: *n -> dvalue: ",
    sample=lambda grad: {"mask": grad.real > 0},
    of=lambda value, mask: torch.where(mask, value, 0),
)
def masked_fill_backward(grad: Gradient, mask: Tensor) -> Tensor:
    """y = v at the mask:  dv = the sum of grad there"""
    return grad.masked_fill(~mask, 0).sum()


@manual(
    "grad: m k -> dself: n d",
    sample=lambda: {"pad": [2, 1, -1, 3]},
    of="constant_pad_nd",
    as_given=True,
)
def constant_pad_nd_backward(grad: Gradient, pad: Ints) -> Tensor:
    """y = x with so much around it:  dx = grad without it"""
    return aten.constant_pad_nd(grad, [-width for width in pad], 0)


@manual(
    "grad_: *n -> dself: *n",
    dtype=_told_or_like("grad_"),
    of="_to_copy",
    as_given=True,
    why="of a real tensor the gradient is real: a result's dtype sees to both",
)
def _to_copy_backward(grad_: Gradient, **options: Any) -> Tensor:
    """y = x in another dtype or place:  dx = grad in that of x"""
    return grad_.to(options["device"] or grad_.device, copy=True)


@torch.library.register_fake("normpass::_to_copy_backward")  # type: ignore[untyped-decorator]
def _(grad_: Tensor | None, **options: Any) -> Tensor | None:
    """What fake tensors do not see through a formula: that the result is in another place."""
    return None if grad_ is None else torch.empty_like(grad_, **options)
