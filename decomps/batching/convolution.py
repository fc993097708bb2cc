"""Convolutions under vmap: y = x * w + b, and the gradients of x, w and b.

    x: n (g i) *s     w: (g o) i *k, of a transposed one (g i) o *k     y: n (g o) *t

Each of the three is bilinear in the two others, and of the axes n, i and o each has two. So the
axis v of vmap has one place in an argument and in a result:

    one argument has v    beside the axis that it shares with the result and not with the other
                          argument: of y that is n with x and o with w; of w's gradient i with x
                          and o with y. It is one convolution, and as large as the mathematics.
    both have v           outside of the groups of all three: v times as many groups. Or there is a
                          convolution for each example: which is faster says formulations.py.

What lies beside each other in memory is merged without a copy: v goes inside of n where it lies so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn import functional as F

from normpass.decomps.axes import all_but
from normpass.decomps.batching import batching_rule, example_sizes, front
from normpass.decomps.batching.formulations import by_columns, one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from normpass.decomps.batching import Outputs

    Operands = Mapping[str, "Batched"]

aten = torch.ops.aten

RULES = "aten/src/ATen/functorch/BatchRulesConvolution.cpp"

# The axes of each of the three, and the one that has the groups outside.
_AXES = {"x": "ni", "w": "oi", "y": "no"}
_GROUPED = {"x": 1, "w": 0, "y": 1}


@dataclass(frozen=True)
class Convolution:
    """A convolution without its tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Convolution:
        """Of an operator's arguments by name, with others among them."""
        return cls(*(given[name] for name in cls.__annotations__))

    def axis(self, tensor: str, name: str) -> int:
        """The number of the axis n, i or o of x, w or y."""
        if tensor == "w":
            return int((name == "o") == self.transposed)
        return int(name != "n")

    def groups_of(self, tensor: str, axis: int) -> int:
        """The groups that an axis is made of."""
        return self.groups if axis == _GROUPED[tensor] else 1

    def __call__(
        self, result: str, *, x: Tensor, w: Tensor, y: Any, bias: Any = None, times: int = 1
    ) -> Tensor:
        """y, or the gradient of x or of w, where y is the result's own gradient.

        Of the tensor whose gradient it is only the shape matters. times: as many times the groups.
        """
        numbers = (self.stride, self.padding, self.dilation, self.transposed, self.output_padding)
        groups = self.groups * times
        if result == "y":
            return aten.convolution(x, w, bias, *numbers, groups)
        mask = [result == "x", result == "w", False]
        return aten.convolution_backward(y, x, w, None, *numbers, groups, mask)["xw".index(result)]


@dataclass(frozen=True)
class Batched:
    """A tensor with its axis v, or none; or no tensor."""

    value: Any
    dim: int | None

    @property
    def is_batched(self) -> bool:
        return self.dim is not None

    @property
    def sizes(self) -> list[int]:
        """Of one example."""
        return example_sizes(self.value, self.dim)

    def example(self, v: int) -> Any:
        return self.value if self.dim is None else self.value.select(self.dim, v)

    def merged(self, axis: int, groups: int = 1, inside: bool = False) -> Tensor:
        """v beside an axis of the example: ... (g v c) ..., or inside of it: ... (c v) ..."""
        if groups == 1:
            return _moved(self.value, self.dim, axis + inside).flatten(axis, axis + 1)
        value = _moved(self.value, self.dim, 0)
        value = value.unflatten(axis + 1, (groups, value.shape[axis + 1] // groups))
        return value.movedim(0, axis + 1).flatten(axis, axis + 2)

    def like_merged(self, size: int, axis: int, groups: int = 1, inside: bool = False) -> Tensor:
        """A tensor of the shape of `merged`, with whatever in it."""
        if self.is_batched:
            return self.merged(axis, groups, inside)
        sizes = self.sizes
        sizes[axis] *= size
        return self.value.new_empty(()).expand(sizes)

    def lies_inside(self, axis: int) -> bool:
        """Whether v lies inside of this axis of the example."""
        assert self.dim is not None
        strides = list(self.value.stride())
        v = strides.pop(self.dim)
        return guard_or_false(v < strides[axis])


def _moved(value: Tensor, dim: Any, to: int) -> Tensor:
    return value if dim == to else value.movedim(dim, to)


def _split(
    value: Tensor, axis: int, size: int, c: int, groups: int = 1, inside: bool = False
) -> Batched:
    """The inverse of `Batched.merged`."""
    if groups == 1:
        return Batched(value.unflatten(axis, (c, size) if inside else (size, c)), axis + inside)
    value = value.unflatten(axis, (groups, size, c)).movedim(axis + 1, axis)
    return Batched(value.flatten(axis + 1, axis + 2), axis)


# --- a result over v ----------------------------------------------------------------------------


def bilinear(
    conv: Convolution, result: str, size: int, operands: Operands, bias: Tensor | None = None
) -> Batched:
    """y, or the gradient of x or of w (`Convolution`), over a v of this size.

    bias: o, or where w has v: v o.
    """
    batched = [name for name in _AXES if name != result and operands[name].is_batched]
    if len(batched) == 2:
        return _of_two(conv, result, size, operands, bias)
    if batched:
        return _beside_an_axis(conv, result, size, operands, batched[0], bias)
    values = {name: operand.example(0) for name, operand in operands.items()}
    return Batched(conv(result, **values, bias=bias), None)


def _of_two(conv: Convolution, result: str, size: int, operands: Operands, bias: Any) -> Batched:
    x, w, y = (operands[name] for name in "xwy")
    if result == "w":
        image, of = (y, x) if conv.transposed else (x, y)
        if by_columns(conv.groups, image.sizes, of.sizes, w.sizes[2:], x.value):
            return Batched(_of_columns(conv, image, of, w.sizes[2:]), 0)
    elif one_by_one(size, operands["x"].sizes, w.sizes, w.value):
        return _one_by_one(conv, result, size, operands, bias)
    return _outside_of_groups(conv, result, size, operands, bias)


def _beside_an_axis(
    conv: Convolution, result: str, size: int, operands: Operands, batched: str, bias: Any
) -> Batched:
    """One argument has v, which goes beside the axis that the result has too, and alone."""
    (name,) = set(_AXES[result]) & set(_AXES[batched])
    axis, at = conv.axis(batched, name), conv.axis(result, name)
    groups, merged = conv.groups_of(result, at), conv.groups_of(batched, axis)
    inside = name == "n" and operands[batched].lies_inside(axis)
    values = {other: operand.value for other, operand in operands.items()}
    values[batched] = operands[batched].merged(axis, merged, inside)
    if result != "y":
        values[result] = operands[result].like_merged(size, at, groups, inside)
    elif bias is not None and batched == "w":
        bias = Batched(bias, 0).merged(0, groups)
    c = operands[batched].sizes[axis] // merged
    return _split(conv(result, **values, bias=bias), at, size, c, groups, inside)


def _outside_of_groups(
    conv: Convolution, result: str, size: int, operands: Operands, bias: Any
) -> Batched:
    """All three have v: as many times the groups."""
    values: dict[str, Any] = {
        name: None if operand.value is None else operand.like_merged(size, _GROUPED[name])
        for name, operand in operands.items()
    }
    bias = None if bias is None else bias.flatten()
    found, axis = conv(result, **values, bias=bias, times=size), _GROUPED[result]
    return _split(found, axis, size, found.shape[axis] // size)


def _one_by_one(
    conv: Convolution, result: str, size: int, operands: Operands, bias: Any
) -> Batched:
    """A convolution for each example."""
    rows = []
    for v in range(size):
        values = {name: operand.example(v) for name, operand in operands.items()}
        rows.append(conv(result, **values, bias=None if bias is None else bias[v]))
    return Batched(torch.stack(rows), 0)


def _of_columns(
    conv: Convolution, image: Batched, result: Batched, kernel: Sequence[int]
) -> Tensor:
    """sum_nt(result * columns): v o i *k, where the columns of an image: v n i *s are what each
    element of the kernel meets: v n i *t *k
    """
    columns, g = front(image.value, image.dim), front(result.value, result.dim)
    rank = len(kernel)
    stride, padding, dilation = (
        list(n) * (rank // len(n)) for n in (conv.stride, conv.padding, conv.dilation)
    )
    columns = F.pad(columns, [p for p in reversed(padding) for _ in range(2)])
    for axis, (k, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), 3):
        columns = columns.unfold(axis, apart * (k - 1) + 1, step)[..., ::apart]
        columns = columns.narrow(axis, 0, g.shape[axis])
    space, windows = range(3, 3 + rank), range(3 + rank, 3 + 2 * rank)
    # The channels last, as they lie in memory: in the order of the weight it takes twice as long.
    columns = columns.permute(0, 1, *space, *windows, 2)
    sizes = columns.shape[2 + rank :]
    columns = columns.flatten(1, 1 + rank).flatten(2)
    g = g.permute(0, 1, *space, 2).flatten(1, 1 + rank)
    return (g.transpose(1, 2) @ columns).unflatten(2, sizes).movedim(-1, 2)


# --- the rules ----------------------------------------------------------------------------------


def sample() -> dict[str, Any]:
    """For the tests: along two axes, with a result as large as the input."""
    one, no = [1, 1], [0, 0]
    numbers = {"stride": one, "padding": one, "dilation": one, "output_padding": no}
    return {**numbers, "transposed": False, "groups": 1}


def convolution(
    conv: Convolution, size: int, x: Batched, w: Batched, b: Batched
) -> tuple[Tensor, int | None]:
    """y_v = x_v * w_v + b_v"""
    operands = {"x": x, "w": w, "y": Batched(None, None)}
    if b.is_batched and not w.is_batched:
        y = bilinear(conv, "y", size, operands)
        value, bias = front(y.value, y.dim), front(b.value, b.dim)
        return value + bias.view(size, 1, *bias.shape[1:], *(1,) * (value.dim() - 3)), 0
    bias = b.value
    if bias is not None and w.is_batched:
        bias = front(bias, b.dim).expand(size, -1)
    y = bilinear(conv, "y", size, operands, bias)
    return y.value, y.dim


@batching_rule(
    aten.convolution.default,
    source=f"{RULES}: convolution_batch_rule",
    shapes="input: v n c s m, weight: v d c 3 3, bias: v d -> y: v n d s m",
    sample=sample,
    eager=False,
)
def convolution_batch_rule(
    info: Any,
    in_dims: Sequence[Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *numbers: Any,
) -> Outputs:
    """y_v = x_v * w_v + b_v"""
    tensors = map(Batched, (input, weight, bias), in_dims)
    y, dim = convolution(Convolution(*numbers), info.batch_size, *tensors)
    return (y,), (dim,)


_BACKWARD: dict[str, Any] = {
    "source": f"{RULES}: convolution_backward_plumbing, convolution_backward_input_batch_rule, "
    "convolution_backward_weight_batch_rule",
    "shapes": "grad_output: v n d s m, input: v n c s m, weight: v d c 3 3 "
    "-> dinput: v n c s m, dweight: v d c 3 3, dbias: v d",
    "sample": sample,
}


@batching_rule(aten.convolution_backward.default, **_BACKWARD, eager=False)
def convolution_backward_batch_rule(
    info: Any,
    in_dims: Sequence[Any],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    *rest: Any,
) -> Outputs:
    """The gradients of y_v = x_v * w_v + b_v, each by itself, and db_v = sum_nt(g_v)"""
    return _gradients(info.batch_size, in_dims, (grad_output, input, weight), *rest)


@batching_rule(aten.convolution_backward_overrideable.default, **_BACKWARD)
def convolution_backward_overrideable_batch_rule(
    info: Any,
    in_dims: Sequence[Any],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    *rest: Any,
) -> Outputs:
    """As of convolution_backward, which has one argument more."""
    return _gradients(info.batch_size, in_dims, (grad_output, input, weight), *rest)


def _gradients(size: int, in_dims: Sequence[Any], values: Sequence[Tensor], *rest: Any) -> Outputs:
    *numbers, mask = rest
    conv = Convolution(*numbers)
    operands = dict(zip("yxw", map(Batched, values, in_dims), strict=False))
    dx, dw = (
        bilinear(conv, name, size, operands) if wanted else Batched(None, None)
        for name, wanted in zip("xw", mask, strict=False)
    )
    db = _over_channels(operands["y"]) if mask[2] else Batched(None, None)
    return (dx.value, dw.value, db.value), (dx.dim, dw.dim, db.dim)


def _over_channels(g: Batched) -> Batched:
    """sum_nt(g), of a g: v n o *t"""
    if not g.is_batched:
        return Batched(g.value.sum(all_but(g.value, 1)), None)
    value = front(g.value, g.dim)
    return Batched(value.sum([1, *range(3, value.dim())]), 0)
