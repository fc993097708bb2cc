"""The region: what one fused op computes, as data and as text.

A region is a small program over named axes. Every value in it varies over some of the axes; views
and permutes of the graph it came from are gone, only the layout of inputs and outputs remembers
them.

    region layer_norm_backward
    axes    r=? c=1024
    input   g: f32[r c]
    input   w: f32[c]
    input   x: f32[r c]
    input   mean: f32[r 1]
    input   rstd: f32[r 1]
    sub     = sub(x, mean)
    x_hat   = mul(sub, rstd)
    gw      = mul(g, w)
    a       = sum[c](gw)
    ...
    output  dx: f32[r c] = mul_3
    output  dw: f32[c] = sum_2

The grammar, line by line:

    region NAME
    axes    AXIS=EXTENT ...       an extent is an integer, or ? for one that is given at run time
    sizes   SIZE=? ...            further run-time integers (strides that no axis explains)
    dialect triton|cuda|...       what its kernel for a GPU is to be written in, if that was chosen
    input   NAME: DTYPE[DIMS] STRIDES?
    NAME    = FN(ARGS)            pointwise; an argument is a value, a number, true or false
    NAME    = FN[AXES](VALUE)     reduction over the axes
    output  NAME: DTYPE[DIMS] STRIDES? = VALUE
    joined  NAME NAME ... [DIM]   outputs that are one tensor, side by side along a dimension
    in turn NAME NAME ... [DIM]   the same where an element of each follows one of the other

A dimension is an axis, a product of axes in parentheses (outermost first), or 1. Strides are in
elements, one per dimension, and left out when the tensor is contiguous. Run-time integers are
passed in the order in which their question marks stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "b8": torch.bool,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

REDUCTIONS = ("sum", "amax", "amin", "prod")
# In plans only (backend/program/regroup.py): a value that repeats along axes it does not vary over,
# and one that is looked at by other axes of the same elements: by those among `axes` that it has
# not.
EXPAND, REGROUP = "expand", "regroup"

Stride = int | str  # a number of elements, or the name of a run-time size
Arg = str | float | bool


# What kernels for GPUs are written in; "" where nobody asked.
DIALECTS = ("", "triton", "cuda", "cuda_bulk", "tuned")


class RegionError(ValueError):
    """A region's text or data breaks the grammar. The message says where, and what was expected."""


@dataclass(frozen=True)
class Axis:
    """A named axis. `extent` is None when it is given at run time."""

    name: str
    extent: int | None

    def __str__(self) -> str:
        return f"{self.name}={'?' if self.extent is None else self.extent}"


@dataclass(frozen=True)
class Buffer:
    """A tensor that enters or leaves a region.

    dims: for every dimension the axes it is made of, outermost first; () is a dimension of size
    one. strides: elements between neighbours, per dimension; None for a contiguous tensor.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[tuple[str, ...], ...]
    strides: tuple[Stride, ...] | None = None

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes along which elements differ (a stride of zero repeats one element)."""
        return frozenset(
            axis
            for k, dim in enumerate(self.dims)
            if self.strides is None or self.strides[k] != 0
            for axis in dim
        )

    def __str__(self) -> str:
        dims = " ".join(
            "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
            for dim in self.dims
        )
        strides = "" if self.strides is None else f" ({', '.join(map(str, self.strides))})"
        return f"{self.name}: {DTYPE_NAMES[self.dtype]}[{dims}]{strides}"


@dataclass(frozen=True)
class Op:
    """One value of a region: a pointwise function, or a reduction if `axes` is not empty.

    The pointwise function `numel` stands apart: it takes axes and no arguments, and is the number
    of elements they span.
    """

    name: str
    fn: str
    args: tuple[Arg, ...]
    axes: tuple[str, ...] = ()

    @property
    def is_reduction(self) -> bool:
        return self.fn in REDUCTIONS

    def __str__(self) -> str:
        axes = f"[{' '.join(self.axes)}]" if self.axes else ""
        return f"{self.name:<7} = {self.fn}{axes}({', '.join(map(format_arg, self.args))})"


@dataclass(frozen=True)
class Output:
    """A value that leaves the region, and the tensor it is written to."""

    buffer: Buffer
    value: str

    def __str__(self) -> str:
        return f"{self.buffer} = {self.value}"


@dataclass(frozen=True)
class Join:
    """Outputs that follow one another and are one tensor: side by side along a dimension, all with
    the strides of the whole; or in turn, with a stride that much longer along it.
    """

    outputs: tuple[str, ...]
    dim: int
    in_turn: bool = False

    def __str__(self) -> str:
        return f"{'in turn' if self.in_turn else 'joined '} {' '.join(self.outputs)} [{self.dim}]"


@dataclass(frozen=True)
class Result:
    """A tensor that leaves a region: one of its outputs, or several along `dim`, side by side or in
    turn.
    """

    buffers: tuple[Buffer, ...]
    dim: int = 0
    in_turn: bool = False

    @property
    def is_joined(self) -> bool:
        return len(self.buffers) > 1

    @property
    def stride_of_parts(self) -> int:
        """How many elements of the whole lie from one of a part to its next along `dim`."""
        return len(self.buffers) if self.in_turn else 1


@dataclass(frozen=True)
class Region:
    """A fused op as data. `parse(str(region)) == region` (region_text.py).

    dialect: what its kernel for a GPU is to be written in, where somebody asked for one.
    """

    name: str
    axes: tuple[Axis, ...]
    inputs: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    sizes: tuple[str, ...] = field(default=())
    joins: tuple[Join, ...] = field(default=())
    dialect: str = ""

    def __str__(self) -> str:
        lines = [f"region {self.name}", f"axes    {' '.join(map(str, self.axes))}"]
        if self.sizes:
            lines.append(f"sizes   {' '.join(f'{size}=?' for size in self.sizes)}")
        lines += [f"dialect {self.dialect}"] if self.dialect else []
        lines += [f"input   {buffer}" for buffer in self.inputs]
        lines += [str(op) for op in self.ops]
        lines += [f"output  {output}" for output in self.outputs]
        lines += map(str, self.joins)
        return "\n".join(lines)

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    def behind(self, value: Arg) -> list[Op]:
        """The ops that a value is made by."""
        stack, seen = [value], list[Op]()
        while stack:
            op = self.producer.get(str(stack.pop()))
            if op and op not in seen:
                seen.append(op)
                stack += op.args
        return seen

    @cached_property
    def varies(self) -> Mapping[str, frozenset[str]]:
        """The axes over which each value differs."""
        varies = {buffer.name: buffer.axes for buffer in self.inputs}
        for op in self.ops:
            names = [arg for arg in op.args if isinstance(arg, str)]
            axes = frozenset().union(*(varies[name] for name in names))
            if op.is_reduction:
                axes -= set(op.axes)
            elif op.fn == EXPAND:
                axes |= set(op.axes)
            elif op.fn == REGROUP:
                axes ^= set(op.axes)
            varies[op.name] = axes
        return varies

    @cached_property
    def runtime_sizes(self) -> tuple[str, ...]:
        """Names of the integers given at run time, in order."""
        return (*(axis.name for axis in self.axes if axis.extent is None), *self.sizes)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """float64 where any tensor is float64, else float32."""
        dtypes = {b.dtype for b in self.inputs} | {o.buffer.dtype for o in self.outputs}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    @cached_property
    def results(self) -> tuple[Result, ...]:
        """The tensors that leave the region, in order."""
        joins = {name: join for join in self.joins for name in join.outputs}
        found: dict[str, Result] = {}
        for output in self.outputs:
            name = output.buffer.name
            join = joins.get(name)
            first = join.outputs[0] if join else name
            before = found[first].buffers if first in found else ()
            found[first] = Result(
                (*before, output.buffer), *((join.dim, join.in_turn) if join else ())
            )
        return tuple(found.values())

    def extents(self, sizes: Sequence[int]) -> dict[str, int]:
        """Every axis' extent and every run-time size, by name."""
        if len(sizes) != len(self.runtime_sizes):
            raise RegionError(
                f"region {self.name}: expected {len(self.runtime_sizes)} run-time sizes "
                f"({', '.join(self.runtime_sizes)}), found {len(sizes)}"
            )
        values = dict(zip(self.runtime_sizes, sizes, strict=True))
        return {a.name: a.extent for a in self.axes if a.extent is not None} | values

    def shape(self, buffer: Buffer, extents: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(product(extents[axis] for axis in dim) for dim in buffer.dims)

    def whole_shape(self, result: Result, extents: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a tensor that leaves the region."""
        first, *others = (list(self.shape(buffer, extents)) for buffer in result.buffers)
        for other in others:
            first[result.dim] = first[result.dim] + other[result.dim]
        return tuple(first)

    def whole_strides(self, result: Result, extents: Mapping[str, int]) -> tuple[int, ...]:
        """The strides of a tensor that leaves the region."""
        steps = enumerate(self.strides(result.buffers[0], extents))
        count = result.stride_of_parts
        return tuple(step // count if k == result.dim else step for k, step in steps)

    def strides(self, buffer: Buffer, extents: Mapping[str, int]) -> tuple[int, ...]:
        if buffer.strides is not None:
            return tuple(extents[s] if isinstance(s, str) else s for s in buffer.strides)
        strides, step = [], 1
        for size in reversed(self.shape(buffer, extents)):
            strides.append(step)
            step *= torch.sym_max(size, 1) if isinstance(size, torch.SymInt) else max(size, 1)
        return tuple(reversed(strides))


def product(factors: Iterable[int]) -> int:
    """Like math.prod, and as good for symbolic integers."""
    result = 1
    for factor in factors:
        result = result * factor
    return result


def format_arg(arg: Arg) -> str:
    if isinstance(arg, bool):
        return "true" if arg else "false"
    return arg if isinstance(arg, str) else repr(float(arg))


def verify(region: Region) -> None:
    """Checks that names are defined before use and once, and that axes and sizes exist.

    Raises:
        RegionError: naming the region, the offender, and what was expected.
    """

    def expect(condition: bool, message: str) -> None:
        if not condition:
            raise RegionError(f"region {region.name!r}: {message}")

    axes = {axis.name for axis in region.axes}
    expect(bool(region.name), "expected a name")
    expect(region.dialect in DIALECTS, f"expected one of {DIALECTS}, found {region.dialect}")
    expect(len(axes) == len(region.axes), "expected every axis once")
    for buffer in (*region.inputs, *(output.buffer for output in region.outputs)):
        unknown = {axis for dim in buffer.dims for axis in dim} - axes
        expect(not unknown, f"{buffer.name} has undeclared axes {sorted(unknown)}")
        if buffer.strides is not None:
            expect(
                len(buffer.strides) == len(buffer.dims), f"{buffer.name}: one stride a dimension"
            )
            unknown = {s for s in buffer.strides if isinstance(s, str)} - set(region.sizes)
            expect(not unknown, f"{buffer.name} has undeclared sizes {sorted(unknown)}")
    defined = {buffer.name for buffer in region.inputs}
    expect(len(defined) == len(region.inputs), "expected every input once")
    for op in region.ops:
        unknown = {arg for arg in op.args if isinstance(arg, str)} - defined
        expect(not unknown, f"{op.name} uses {sorted(unknown)} before definition")
        expect(op.name not in defined, f"{op.name} is defined twice")
        expect(set(op.axes) <= axes, f"{op.name} reduces undeclared axes {sorted(op.axes)}")
        expect(
            op.is_reduction == bool(op.axes) or op.fn == "numel",
            f"{op.name}: axes mean a reduction",
        )
        defined.add(op.name)
    for op in filter(lambda op: op.is_reduction, region.ops):
        constant = set(op.axes).difference(*(region.varies[str(arg)] for arg in op.args))
        expect(not constant, f"{op.name}: its value does not vary over {sorted(constant)}")
    outputs = [output.buffer.name for output in region.outputs]
    together = [name for join in region.joins for name in join.outputs]
    expect(len(set(together)) == len(together), "expected every output in one tensor")
    for join in region.joins:
        first = outputs.index(join.outputs[0]) if join.outputs[0] in outputs else 0
        follow = tuple(outputs[first : first + len(join.outputs)]) == join.outputs
        expect(follow, f"joined {join}: expected outputs that follow one another")
        buffers = [region.outputs[first + k].buffer for k in range(len(join.outputs))]
        alike = {(b.dtype, b.strides, len(b.dims)) for b in buffers}
        expect(
            len(alike) == 1 and buffers[0].strides is not None and join.dim < len(buffers[0].dims),
            f"joined {join}: expected outputs of one type with the strides of the whole",
        )
    for output in region.outputs:
        expect(
            output.value in defined, f"output {output.buffer.name} is {output.value}, not defined"
        )
        missing = region.varies[output.value] - output.buffer.axes
        expect(not missing, f"output {output.buffer.name} lacks its value's axes {sorted(missing)}")
