"""What only moves, casts and takes apart, and puts together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.conventions import Result, absent, like
from normpass.decomps.manual import Gradient, Tangent, manual
from normpass.decomps.neutral import ZERO
from normpass.decomps.registry import formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.conventions import Arguments

aten = torch.ops.aten
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


@formula(
    "vjp",
    "split_backward(Tensor?[] grads, SymInt split_size, int dim, SymInt[] sym_sizes, *, "
    "ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) "
    "-> Tensor",
    source=f"{MANUAL}: split_backward",
    shapes="grads: *n d *m -> dself: *n 2d *m",
    results=(Result(_dtype, None),),
    zeros=("grads",),
    of="split.Tensor",
    as_given=True,
)
def split_backward(
    grads: Sequence[Tensor],
    split_size: int,
    dim: int,
    sym_sizes: Sequence[int],
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: torch.device | None,
    pin_memory: bool | None,
) -> Tensor:
    """As above, of parts of one size, but for the last."""
    before = len(grads) - 1
    parts = [split_size] * before + [sym_sizes[dim] - split_size * before]
    return split_with_sizes_backward(
        grads, parts, dim, sym_sizes, dtype, layout, device, pin_memory
    )


@manual(
    "grad: m n -> dself: n m",
    sample=lambda: {"fwd_dims": [1, 0]},
    of=lambda self, fwd_dims: self.permute(fwd_dims),
    as_given=True,
)
def permute_backwards(grad: Gradient, fwd_dims: Sequence[int]) -> Tensor:
    """y = x with its axes in another order:  dx = grad with them put back"""
    rank = len(fwd_dims)
    inverse = sorted(range(rank), key=lambda axis: fwd_dims[axis] % rank)
    return grad if absent(grad) else grad.permute(inverse).clone()


@manual(
    "grad: 2d -> dself: d",
    sample=lambda grad: {"repeats": [2], "input_shape": [grad.shape[0] // 2]},
    of=lambda self, repeats: self.repeat(repeats),
)
def repeat_backward(grad: Gradient, repeats: Sequence[int], input_shape: Sequence[int]) -> Tensor:
    """y = x, repeated:  dx = the sum of grad over the repetitions"""
    if absent(grad):
        return grad
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
    of=lambda self, dim, start, end, step: aten.slice(self, dim, start, end, step),
    as_given=True,
)
def slice_backward_wrapper(
    grad: Gradient,
    input_sizes: Sequence[int],
    dim: int,
    start: int | None,
    end: int | None,
    step: int,
) -> Tensor:
    """y = x[start:end:step]:  dx = grad there, zero elsewhere"""
    if absent(grad):
        return grad
    start = 0 if start is None else start
    end = input_sizes[dim] if end is None else end
    return aten.slice_backward(grad, input_sizes, dim, start, end, step)


def _first_dtype(given: Arguments) -> torch.dtype | None:
    return next((grad.dtype for grad in given["grads"] if grad is not None), None)


@manual(
    "grads: *n -> dself: *n 2",
    results=(Result(_first_dtype, None),),
    of=lambda self, dim: self.unbind(dim),
    as_given=True,
)
def unbind_backward(grads: Sequence[Gradient], dim: int) -> Tensor:
    """x_1, x_2, .. = the parts of x along dim:  dx = stack(dx_1, dx_2, ..)"""
    given = next((grad for grad in grads if not absent(grad)), None)
    if given is None:
        return ZERO  # type: ignore[return-value]
    return torch.stack([torch.zeros_like(given) if absent(g) else g for g in grads], dim)


@manual(
    "grad: *n 2 -> dtensors: *n",
    results=(Result(_real_as_each, None),),
    sample=lambda grad: {
        "dtypes": [grad.dtype] * 2,
        "tensors": list(grad.new_ones(grad.shape).unbind(-1)),
    },
    of=lambda tensors, dim: torch.stack(tensors, dim),
    as_given=True,
)
def stack_tensors_backward(grad: Gradient, dim: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """y = stack(x_1, x_2, ..):  each has the part of grad at its place"""
    if absent(grad):
        return [grad for _ in dtypes]
    return [part.clone() for part in grad.unbind(dim)]


def _blocks(grad: Tensor) -> dict[str, Any]:
    """Two tensors whose block diagonal has this gradient."""
    shape = [size // 2 for size in grad.shape]
    tensors = [grad.new_ones(shape) for _ in range(2)]
    return {"sizes": [shape] * 2, "dtypes": [grad.dtype] * 2, "tensors": tensors}


@manual(
    "grad: 2n 2d -> dtensors: n d",
    results=(Result(_real_as_each, None),),
    sample=_blocks,
    of=lambda tensors: torch.block_diag(*tensors),
    as_given=True,
)
def block_diag_backward(
    grad: Gradient, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """y = diag(x_1, x_2, ..):  each has its block of grad; a vector is a row, a number a block"""
    if absent(grad):
        return [grad for _ in sizes]
    parts, row, column = [], 0, 0
    for shape in sizes:
        height, width = (1, 1, *shape)[-2:]
        block = grad.narrow(0, row, height).narrow(1, column, width)
        parts.append(block.reshape(list(shape)).clone())
        row, column = row + height, column + width
    return parts


def _tangents(tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(tensors, tangents, strict=True)
    return [torch.zeros_like(x) if absent(t) else t for x, t in pairs]


_JOINED = (Result(lambda given: functools.reduce(torch.promote_types, _dtypes(given)), None),)


def _dtypes(given: Arguments) -> list[torch.dtype]:
    return [x.dtype for x in given["tensors"]]


@manual("tensors: *n d, tensors_t: *n d -> y_t: *n 2d", results=_JOINED, of="cat", as_given=True)
def cat_jvp(tensors: Sequence[Tensor], tensors_t: Sequence[Tangent], dim: int) -> Tensor:
    """The concatenation of the tangents. Upstream finds them within the tensors."""
    return torch.cat(_tangents(tensors, tensors_t), dim)


@manual("tensors: *n, tensors_t: *n -> y_t: *n 2", results=_JOINED, of="stack", as_given=True)
def stack_jvp(tensors: Sequence[Tensor], tensors_t: Sequence[Tangent], dim: int) -> Tensor:
    """The tangents, stacked"""
    return torch.stack(_tangents(tensors, tensors_t), dim)


@manual(
    "tensors: n d, tensors_t: n d -> y_t: 2n 2d", results=_JOINED, of="block_diag", as_given=True
)
def block_diag_jvp(tensors: Sequence[Tensor], tensors_t: Sequence[Tangent]) -> Tensor:
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
def constant_pad_nd_backward(grad: Gradient, pad: Sequence[int]) -> Tensor:
    """y = x with so much around it:  dx = grad without it"""
    return grad if absent(grad) else aten.constant_pad_nd(grad, [-width for width in pad], 0)


@formula(
    "vjp",
    "_to_copy_backward(Tensor? grad_, *, ScalarType? dtype=None, Layout? layout=None, "
    "Device? device=None, bool? pin_memory=None) -> Tensor",
    source=f"{MANUAL}: _to_copy_backward",
    shapes="grad_: *n -> dself: *n",
    results=(Result(lambda given: given["dtype"] or like("grad_")(given), None),),
    zeros=("grad_",),
    of="_to_copy",
    as_given=True,
    why="of a real tensor the gradient is real: a result's dtype sees to both",
)
def _to_copy_backward(
    grad_: Tensor,
    dtype: torch.dtype | None,
    layout: torch.layout | None,
    device: torch.device | None,
    pin_memory: bool | None,
) -> Tensor:
    """y = x in another dtype or place:  dx = grad in that of x"""
    return grad_ if absent(grad_) else grad_.to(device or grad_.device, copy=True)


@torch.library.register_fake("normpass::_to_copy_backward")  # type: ignore[untyped-decorator]
def _(grad_: Tensor | None, **options: Any) -> Tensor | None:
    """What fake tensors do not see through a formula: that the result is in another place."""
    return None if grad_ is None else torch.empty_like(grad_, **options)
