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
    input   NAME: DTYPE[DIMS] STRIDES?
    NAME    = FN(ARGS)            pointwise; an argument is a value, a number, true or false
    NAME    = FN[AXES](VALUE)     reduction over the axes
    output  NAME: DTYPE[DIMS] STRIDES? = VALUE

A dimension is an axis, a product of axes in parentheses (outermost first), or 1. Strides are in
elements, one per dimension, and left out when the tensor is contiguous. Run-time integers are
passed in the order in which their question marks stand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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
class Region:
    """A fused op as data. `parse(str(region)) == region`."""

    name: str
    axes: tuple[Axis, ...]
    inputs: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    sizes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"region {self.name}", f"axes    {' '.join(map(str, self.axes))}"]
        if self.sizes:
            lines.append(f"sizes   {' '.join(f'{size}=?' for size in self.sizes)}")
        lines += [f"input   {buffer}" for buffer in self.inputs]
        lines += [str(op) for op in self.ops]
        lines += [f"output  {output}" for output in self.outputs]
        return "\n".join(lines)

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

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

    def strides(self, buffer: Buffer, extents: Mapping[str, int]) -> tuple[int, ...]:
        if buffer.strides is not None:
            return tuple(extents[s] if isinstance(s, str) else s for s in buffer.strides)
        strides, step = [], 1
        for size in reversed(self.shape(buffer, extents)):
            strides.append(step)
            step *= max(size, 1)
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


_LINE = re.compile(r"(?P<head>[\w.]+)\s+(?P<rest>\S.*)$")
_OP = re.compile(r"(?P<fn>\w+)(?:\[(?P<axes>[\w ]+)\])?\((?P<args>[^()]*)\)$")
_BUFFER = re.compile(
    r"(?P<name>\w+): (?P<dtype>\w+)\[(?P<dims>[\w() ]*)\](?: \((?P<strides>[^()]*)\))?$"
)


@lru_cache(maxsize=1024)
def parse(text: str) -> Region:
    """Reads a region's text and verifies it. A semicolon ends a line as well.

    Raises:
        RegionError: where a line breaks the grammar, or names what was not defined before it.
    """
    name = ""
    axes: tuple[Axis, ...] = ()
    sizes: tuple[str, ...] = ()
    inputs: list[Buffer] = []
    ops: list[Op] = []
    outputs: list[Output] = []
    for line in filter(None, map(str.strip, text.replace(";", "\n").splitlines())):
        match = _LINE.match(line)
        if match is None:
            raise RegionError(f"expected 'WORD REST' in a region's line, found {line!r}")
        head, rest = match["head"], match["rest"]
        if rest.startswith("= "):
            ops.append(_parse_op(head, rest[2:]))
        elif head == "region":
            name = rest
        elif head == "axes":
            axes = tuple(_parse_axis(word) for word in rest.split())
        elif head == "sizes":
            sizes = tuple(word.removesuffix("=?") for word in rest.split())
        elif head == "input":
            inputs.append(_parse_buffer(rest))
        elif head == "output":
            buffer, _, value = rest.partition(" = ")
            outputs.append(Output(_parse_buffer(buffer), value))
        else:
            raise RegionError(
                f"expected region, axes, sizes, input, output or a value, found {line!r}"
            )
    region = Region(name, axes, tuple(inputs), tuple(ops), tuple(outputs), sizes)
    verify(region)
    return region


def _parse_axis(word: str) -> Axis:
    name, _, extent = word.partition("=")
    if extent != "?" and not extent.isdigit():
        raise RegionError(f"expected an axis as NAME=INTEGER or NAME=?, found {word!r}")
    return Axis(name, None if extent == "?" else int(extent))


def _parse_buffer(text: str) -> Buffer:
    match = _BUFFER.match(text)
    if match is None or match["dtype"] not in DTYPES:
        raise RegionError(f"expected 'NAME: DTYPE[DIMS] (STRIDES)', found {text!r}")
    dims = tuple(
        () if word == "1" else tuple(word.strip("()").split())
        for word in re.findall(r"\([^()]*\)|\w+", match["dims"])
    )
    strides = None
    if match["strides"] is not None:
        words = match["strides"].replace(",", " ").split()
        strides = tuple(int(w) if w.lstrip("-").isdigit() else w for w in words)
    return Buffer(match["name"], DTYPES[match["dtype"]], dims, strides)


def _parse_op(name: str, text: str) -> Op:
    match = _OP.match(text)
    if match is None:
        raise RegionError(f"expected 'FN(ARGS)' or 'FN[AXES](VALUE)' for {name}, found {text!r}")
    args = tuple(_parse_arg(word) for word in match["args"].replace(",", " ").split())
    return Op(name, match["fn"], args, tuple((match["axes"] or "").split()))


def _parse_arg(word: str) -> Arg:
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word) if word[0] in "-+.0123456789" or word in ("inf", "nan") else word
    except ValueError:
        raise RegionError(f"expected a value's name or a number, found {word!r}") from None


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
    for output in region.outputs:
        expect(
            output.value in defined, f"output {output.buffer.name} is {output.value}, not defined"
        )
        missing = region.varies[output.value] - output.buffer.axes
        expect(not missing, f"output {output.buffer.name} lacks its value's axes {sorted(missing)}")
