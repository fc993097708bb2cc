"""Where things lie in a Triton kernel, as text: block dimensions, masks, offsets, tiles."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import sympy

from normpass.backend.codegen.text import extent_name, factor, index_expression
from normpass.backend.program.tree import SHARED, Launch, Load, LoopAxis, Plan, Store, walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from normpass.backend.codegen.names import Names

# Elements of a vector of 16 bytes, at most.
LANES = 16
# Offsets from here on need 64 bits.
WIDE = 2**31
RESERVED = frozenset({"tl", "lib", "libdevice", "triton", "torch", "float", "range"})
RESERVED |= {"STAGES", "program", "share", "shares", "first", "last", "rows", "row", "part"}
RESERVED |= {"row_0", "part_0", "mask_row", "mask_part"}


def size_text(expression: sympy.Expr) -> str:
    """A size in a kernel or its launcher."""
    return index_expression(expression, "//")


def times(*factors: str) -> str:
    """A product as text."""
    return " * ".join(factor for factor in factors if factor != "1") or "1"


def divided(count: str) -> str:
    """` // count` as text."""
    return "" if count == "1" else f" // ({count})" if " " in count else f" // {count}"


def divide_up(extent: str, block: int, cdiv: str) -> str:
    """Blocks along an axis, as text."""
    if block == 1:
        return extent
    return str(-(-int(extent) // block)) if extent.isdigit() else f"{cdiv}({extent}, {block})"


def is_power_of_two(value: float) -> bool:
    """Whether dividing by the value is exactly multiplying by its reciprocal, in float32 too."""
    mantissa, exponent = math.frexp(value)
    return abs(mantissa) == 0.5 and abs(exponent) < 100


def number(value: float) -> str:
    """A literal."""
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return f'float("{"-" if value < 0 else ""}inf")'
    return repr(value) if value >= 0 else f"({value!r})"


class Layout:
    """How one launch's blocks lie over the axes of the plan."""

    def __init__(self, plan: Plan, launch: Launch, names: Names) -> None:
        self.plan = plan
        self.launch = launch
        self.blocks = launch.blocks
        self.names = names
        self.tiles = [axis for axis in launch.outer if axis.name not in launch.blocks.shares]
        self.dims = self._dimensions()
        self.masks: dict[str, str] = {}
        self.piece: dict[str, int] = {}  # of each axis in pieces, the one that the text is at
        self.used: set[str] = set()  # of what a kernel can be given, and of extents
        self.program = "program"

    # -- dimensions

    def _dimensions(self) -> list[str]:
        """The axes along which blocks have more than one element, outermost first. "" is the
        shared axes as
        one, "part" the partial results."""
        size = self.blocks.size
        outer = [a.name for a in self.tiles if size[a.name] > 1]
        shared = [SHARED] if size.get(SHARED, 1) > 1 else []
        inner = [a.name for a in self.launch.inner if size[a.name] > 1]
        parts = ["part"] if self.blocks.parts > 1 else []
        order = {a.name: k for k, a in enumerate(self.plan.axes)}
        return [*parts, *shared, *sorted([*outer, *inner], key=lambda a: order[a])]

    def dims_of(self, axes: Iterable[str]) -> list[str]:
        wanted = {SHARED if axis in self.blocks.shares else axis for axis in axes}
        return [dim for dim in self.dims if dim in wanted]

    def size_of(self, dim: str) -> int:
        return self.blocks.parts if dim == "part" else self.blocks.size[dim]

    def shape(self, dims: Sequence[str]) -> str:
        if not dims:
            return "[]"
        return f"[{', '.join(str(self.size_of(d)) if d in dims else '1' for d in self.dims)}]"

    def lanes(self, dim: str) -> str:
        """0, 1, 2, ... along a dimension."""
        text = f"tl.arange(0, {self.size_of(dim)})"
        if len(self.dims) == 1:
            return text
        return f"{text}[{', '.join(':' if d == dim else 'None' for d in self.dims)}]"

    def mask(self, dims: Sequence[str]) -> str:
        here = [f"{dim}{self.suffix([dim])}" for dim in dims]
        return " & ".join(self.masks[dim] for dim in here if dim in self.masks)

    # -- pieces

    def suffix(self, axes: Iterable[str]) -> str:
        """What tells a piece of what varies along some axes from the others."""
        return "".join(f"_piece{self.piece[axis]}" for axis in axes if axis in self.blocks.pieces)

    def each_piece(self, axes: Iterable[str]) -> Iterator[None]:
        """Comes to every piece of those among some axes that are in pieces."""
        found = [axis for axis in axes if axis in self.blocks.pieces]
        for numbers in itertools.product(*(range(self.blocks.pieces[axis]) for axis in found)):
            before = dict(self.piece)
            self.piece |= dict(zip(found, numbers, strict=True))
            yield
            self.piece = before

    def index(self, axis: str) -> str:
        return f"{self.names.axis[axis]}{self.suffix([axis])}"

    def value(self, value: str) -> str:
        return f"{self.names.value[value]}{self.suffix(self.plan.region.varies[value])}"

    # -- extents and offsets

    def divisor(self, size: sympy.Symbol) -> int:
        """What is known to divide a run-time size, up to a vector's elements, where that says how
        elements lie: it is in a stride, or how far those side by side go.
        """
        nodes = walk(*self.launch.body)
        accesses = [node.access for node in nodes if isinstance(node, (Load, Store))]
        along = self.plan.axis[self.plan.vector].extent
        steps = [along, *(step for access in accesses for step in access.strides.values())]
        if not accesses or not any(size in sympy.sympify(step).free_symbols for step in steps):
            return 1
        return math.gcd(accesses[0].sizes.divisor(size), LANES)

    def use(self, name: str) -> str:
        """A name that is a parameter of the kernel then, or an extent that is defined in it."""
        self.used.add(name)
        return name

    def size(self, expression: sympy.Expr) -> str:
        """A size in a kernel."""
        for symbol in sympy.sympify(expression).free_symbols:
            self.use(f"n_{symbol}")
        return size_text(expression)

    def extent(self, axis: str) -> str:
        """An extent in a kernel: a literal, or a name of 64 bits."""
        of = self.plan.axis[axis]
        literal = of.extent.is_number and not self.wide(axis)
        return str(of.extent) if literal else self.use(extent_name(of, self.plan.region))

    def wide(self, axis: str) -> bool:
        """Whether offsets along an axis need 64 bits."""
        extent = self.plan.axis[axis].extent
        if not extent.is_number:
            return True
        steps = [
            node.access.strides.get(axis, 0)
            for node in walk(*self.launch.body)
            if isinstance(node, (Load, Store))
        ]
        return any(step.is_number and extent * step >= WIDE for step in map(sympy.sympify, steps))

    def tiles_text(self, axes: Sequence[LoopAxis], cdiv: str) -> str:
        """How many tiles some axes have together; for a kernel's text if cdiv is Triton's."""
        fixed, factors = 1, []
        for axis in axes:
            kernel = cdiv == "tl.cdiv"
            extent = self.extent(axis.name) if kernel else size_text(axis.extent)
            text = divide_up(factor(extent), self.blocks.size[axis.name], cdiv)
            if text.isdigit():
                fixed *= int(text)
            else:
                factors.append(text)
        return " * ".join([*factors, *([str(fixed)] if fixed > 1 or not factors else [])])

    def offset(self, strides: Mapping[str, sympy.Expr]) -> str:
        """` + term` for every axis, to add to a pointer from the left: scalars first."""
        terms = []
        for axis in self.plan.axes:
            if axis.name in strides:
                stride = factor(self.size(strides[axis.name]))
                index = self.index(axis.name)
                blocked = bool(self.dims_of([axis.name]))
                terms.append((blocked, index if stride == "1" else f"{index} * {stride}"))
        return "".join(f" + {term}" for _, term in sorted(terms, key=lambda t: t[0]))

    def array_size(self, axes: Iterable[str]) -> sympy.Expr:
        return sympy.prod([self.plan.axis[axis].extent for axis in axes])

    def coordinate(self, axis: LoopAxis, *, first: bool = False) -> str:
        """A tile's number along one axis, where programs count the last axis fastest."""
        if self.tiles_text([axis], "triton.cdiv") == "1":
            return "0"
        later = self.tiles[self.tiles.index(axis) + 1 :]
        text = f"{self.program}{divided(self.tiles_text(later, 'tl.cdiv'))}"
        if first:
            return text
        count = self.tiles_text([axis], "tl.cdiv")
        return f"{text} % {f'({count})' if ' ' in count else count}"
