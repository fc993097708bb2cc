"""What a region may be made of: the ATen ops that are pointwise, reductions or views, and what each
means.

To fuse one more pointwise op, add a row here: to FUNCTIONS if a region's function computes it with
the same arguments, else to COMPOSED. A function that regions do not have yet needs a row in
backend/program/pointwise.py too.
"""

from __future__ import annotations

import operator
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._inductor import inductor_prims
from torch.fx import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from normpass.passes.region import Arg

aten, prims = torch.ops.aten, torch.ops.prims


class Kind(Enum):
    """What a node is to a region. ITEM picks one result of a reduction that has several. PART is of
    a tensor, along one dimension, or a split in such; JOIN puts tensors side by side, or one in
    place of a part.
    """

    POINTWISE = auto()
    REDUCTION = auto()
    VIEW = auto()
    ITEM = auto()
    PART = auto()
    JOIN = auto()
    OTHER = auto()


PIECEWISE = frozenset({Kind.PART, Kind.JOIN})


class Writer(Protocol):
    """Where a composed op's values are written to."""

    def emit(self, fn: str, *args: Arg) -> Arg: ...


FUNCTIONS: dict[Any, str] = {
    aten.add.Scalar: "add",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.clamp_min.default: "maximum",
    aten.clamp_max.default: "minimum",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.reciprocal.default: "reciprocal",
    aten.exp.default: "exp",
    aten.expm1.default: "expm1",
    aten.log.default: "log",
    aten.log1p.default: "log1p",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.erf.default: "erf",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.round.default: "round",
    aten.floor.default: "floor",
    aten.ceil.default: "ceil",
    aten.trunc.default: "trunc",
    **{
        getattr(getattr(aten, fn), overload): fn
        for fn in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload in ("Tensor", "Scalar")
    },
    aten.logical_and.default: "logical_and",
    aten.logical_or.default: "logical_or",
    aten.logical_not.default: "logical_not",
    aten.bitwise_and.Tensor: "logical_and",
    aten.bitwise_or.Tensor: "logical_or",
    aten.bitwise_not.default: "logical_not",
    aten.where.self: "where",
    aten.where.ScalarOther: "where",
    aten.where.ScalarSelf: "where",
}

_CHEAP = frozenset(
    {
        *("add", "mul", "neg", "abs", "maximum", "minimum", "where"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        *("round", "floor", "ceil", "trunc"),
    }
)

# Functions that take as long as reading several numbers from a cache.
EXPENSIVE = frozenset(
    ("exp", "expm1", "log", "log1p", "pow", "tanh", "erf", "sin", "cos", "sigmoid")
)

# And those that take longer than reading one.
COSTLY = EXPENSIVE | {"div", "reciprocal", "sqrt", "rsqrt"}

# Truth values that are added are a truth value again.
ADDITIONS = frozenset({aten.add.Tensor, aten.add.Scalar})

# Ops that change nothing but dtype and layout; the position of the argument that they return.
IDENTITY: dict[Any, int] = {
    aten.clone.default: 0,
    aten.alias.default: 0,
    aten.detach.default: 0,
    aten.lift_fresh_copy.default: 0,
    aten._to_copy.default: 0,
    aten.copy.default: 1,
    prims.convert_element_type.default: 0,
}


def _scaled(w: Writer, x: Arg, alpha: float) -> Arg:
    return x if alpha == 1 else w.emit("mul", x, float(alpha))


def _power(w: Writer, x: Arg, exponent: float) -> Arg:
    """Powers that multiplication or a root gives; exact, and what PyTorch does too."""
    match exponent:
        case 0:
            return 1.0  # of NaN too
        case 1:
            return x
        case 2:
            return w.emit("mul", x, x)
        case 3:
            return w.emit("mul", w.emit("mul", x, x), x)
        case 0.5:
            return w.emit("sqrt", x)
        case -0.5:
            return w.emit("rsqrt", x)
        case -1:
            return w.emit("reciprocal", x)
    return w.emit("pow", x, float(exponent))


def _clamp(w: Writer, x: Arg, low: Arg | None = None, high: Arg | None = None) -> Arg:
    if low is not None:
        x = w.emit("maximum", x, low)
    return x if high is None else w.emit("minimum", x, high)


def _relu(w: Writer, x: Arg) -> Arg:
    return w.emit("maximum", x, 0.0)


COMPOSED: dict[Any, Callable[..., Arg]] = {
    aten.add.Tensor: lambda w, x, y, alpha=1: w.emit("add", x, _scaled(w, y, alpha)),
    aten.sub.Tensor: lambda w, x, y, alpha=1: w.emit("sub", x, _scaled(w, y, alpha)),
    aten.sub.Scalar: lambda w, x, y, alpha=1: w.emit("sub", x, _scaled(w, y, alpha)),
    aten.rsub.Scalar: lambda w, x, y, alpha=1: w.emit("sub", y, _scaled(w, x, alpha)),
    aten.square.default: lambda w, x: w.emit("mul", x, x),
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: lambda w, x, y: w.emit("pow", x, y),
    aten.relu.default: _relu,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.addcmul.default: lambda w, x, a, b, value=1: w.emit(
        "add", x, _scaled(w, w.emit("mul", a, b), value)
    ),
}

# Inductor's own op, which its decompositions use from torch 2.12 on.
if hasattr(inductor_prims, "fma"):
    COMPOSED[inductor_prims.fma] = lambda w, x, y, z: w.emit("add", w.emit("mul", x, y), z)

# Functions that round to half precision and leave the result in what the region computes in.
ROUNDINGS = {torch.bfloat16: "to_bfloat16", torch.float16: "to_float16"}

# The same for numbers of one byte, as quantization leaves them. They are read and written; nothing
# is computed in them.
QUANTIZED = {
    torch.int8: "to_int8",
    torch.uint8: "to_uint8",
    torch.float8_e4m3fn: "to_float8_e4m3fn",
    torch.float8_e5m2: "to_float8_e5m2",
}

# One number everywhere; the name of the argument that says which.
CONSTANTS: dict[Any, str] = {
    aten.full.default: "fill_value",
    aten.full_like.default: "fill_value",
    aten.scalar_tensor.default: "s",
}

VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
    }
)

# Splits, of which each result is a part.
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
CUTS = frozenset({aten.slice.Tensor, aten.select.int, *SPLITS})
# A tensor in place of a part of another, as gradients of parts are written.
SCATTERS = frozenset({aten.slice_scatter.default, aten.select_scatter.default})
JOINS = frozenset({aten.cat.default, *SCATTERS})

REDUCTIONS: dict[Any, str] = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.amax.default: "amax",
    aten.amin.default: "amin",
    aten.prod.dim_int: "prod",
    aten.var.correction: "var",
    aten.var_mean.correction: "var_mean",
}

# What takes less time than reading its arguments from memory, or as long: a mean's gradient is
# divided by a number of elements.
CHEAP = frozenset(
    {
        *(target for target, fn in FUNCTIONS.items() if fn in _CHEAP),
        *IDENTITY,
        *CONSTANTS,
        *(aten.add.Tensor, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.square.default),
        *(aten.relu.default, aten.clamp.default, aten.addcmul.default),
        *(aten.div.Tensor, aten.div.Scalar),
    }
)

# Operators that draw numbers, where Inductor has not made a function of a seed of them.
RANDOM = frozenset(
    {
        inductor_prims.random,
        inductor_prims.randint,
        *(aten.rand.default, aten.rand_like.default, aten.randn.default, aten.randn_like.default),
        *(aten.bernoulli.p, aten.bernoulli.default),
    }
)

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
DTYPES = FLOATS | QUANTIZED.keys() | {torch.bool}


def kind_of(node: Node) -> Kind:
    """What a node is to a region, by its target alone."""
    if node.op != "call_function":
        return Kind.OTHER
    target = node.target
    if any(target in table for table in (FUNCTIONS, COMPOSED, IDENTITY, CONSTANTS)):
        return Kind.POINTWISE
    if target in VIEWS:
        return Kind.VIEW
    if target in REDUCTIONS:
        return Kind.REDUCTION
    if target in CUTS:
        return Kind.PART
    if target in JOINS:
        return Kind.JOIN
    source = node.args[0] if node.args else None
    if target is operator.getitem and isinstance(source, Node):
        of = {Kind.REDUCTION: Kind.ITEM, Kind.PART: Kind.PART}
        return of.get(kind_of(source), Kind.OTHER)
    return Kind.OTHER


def without_views(node: Node) -> Node:
    """The tensor that a view shows; any other node itself."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node


def reduced_dims(node: Node) -> tuple[frozenset[int], bool]:
    """A reduction's dimensions, counted from the first, and whether they stay with size one."""
    rank = len(node.all_input_nodes[0].meta["val"].shape)
    dims = argument(node, "dim", None)
    if dims is None or dims == []:
        dims = list(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return frozenset(d % rank for d in dims), bool(argument(node, "keepdim", False))


def step_of_sum(node: Node, inside: Container[Node]) -> bool:
    """Whether a sum is only a step of another one among these nodes: of a sum of sums, axis after
    axis, as C++ formulas write sums over several.
    """
    if REDUCTIONS.get(node.target) != "sum" or len(node.users) != 1:
        return False
    user = next(iter(node.users))
    return user in inside and REDUCTIONS.get(user.target) == "sum"


def argument(node: Node, name: str, default: Any) -> Any:
    """An argument by its name in the op's schema, however it was passed."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = node.target._schema  # type: ignore[union-attr]
    for k, argument in enumerate(schema.arguments):
        if argument.name == name and k < len(node.args):
            return node.args[k]
    return default
