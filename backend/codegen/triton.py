"""Triton: prints a plan as kernels over blocks, and the function that launches them.

The text is written for people: names from the region, one comment a phase, triton_library.py for what would only
repeat. The plan's outermost loops become programs (triton_stages.py, triton_tiling.py). A loop inside becomes a
dimension of blocks if a block covers its axis, and then its body is straight-line code: what one phase computed is
there in the next, and arrays between phases are plain values. An axis too long for that, or of an extent
that is only known at run time, is a loop over chunks, and arrays along it lie in global memory.

All blocks of a kernel have the same dimensions, of size one where a value does not vary.
"""

from __future__ import annotations

import keyword
import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy
import torch

from normpass.backend.codegen.cpp import index_expression
from normpass.backend.codegen.triton_stages import Stage, operand, split, walk
from normpass.backend.codegen.triton_tiling import SHARED, Blocks, Tiling, choose_blocks
from normpass.backend.plan import (
    Access,
    Accumulate,
    Accumulator,
    Begin,
    Compute,
    Finish,
    Keep,
    Leaf,
    Load,
    Loop,
    LoopAxis,
    Node,
    Plan,
    Recall,
    Store,
)
from normpass.backend.pointwise import POINTWISE, truth_values
from normpass.passes.region import Op, product

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from normpass.passes.region import Arg, Region

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "i1",
}
NEUTRAL = {"sum": "0.0", "prod": "1.0", "amax": 'float("-inf")', "amin": 'float("inf")'}
COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "amax": "lib.maximum({0}, {1})",
    "amin": "lib.minimum({0}, {1})",
}
REDUCE = {"sum": "tl.sum", "prod": "lib.prod", "amax": "lib.amax", "amin": "lib.amin"}
# Arguments that may be bare literals: beside an operator they take the other operand's type. In other calls they
# would be float32 always, so there they are pinned.
BARE = dict.fromkeys(("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge"), (0, 1)) | {
    "div": (1,)
}
WIDE = 2**31
RESERVED = frozenset({"tl", "lib", "libdevice", "triton", "torch", "float", "range"})
RESERVED |= frozenset(
    {
        "program",
        "share",
        "shares",
        "first",
        "last",
        "rows",
        "row",
        "part",
        "part_0",
        "row_0",
        "mask_row",
        "mask_part",
    }
)


@dataclass(frozen=True)
class Kernel:
    """One `@triton.jit` function. arguments: name and Triton type of each, such as "*fp32" and "i32"."""

    name: str
    arguments: tuple[tuple[str, str], ...]
    warps: int


@dataclass(frozen=True)
class TritonSource:
    """A Python module's text, and what is in it.

    text: has the kernels and `run(tensors, sizes, processors)`, which launches them in order. tensors: the region's
    inputs, then its outputs; sizes: its run-time sizes; processors: how many multiprocessors there are.
    """

    text: str
    kernels: tuple[Kernel, ...]


def generate(plan: Plan, tiling: Tiling | None = None) -> TritonSource:
    """The Triton module of a plan.

    Raises:
        UnsupportedPlanError: if the plan has a form that this dialect cannot print.
    """
    names = Names(plan)
    printers = [
        _Printer(plan, stage, choose_blocks(plan, stage, tiling or Tiling()), k, names)
        for k, stage in enumerate(split(plan))
    ]
    kernels = [printer.source() for printer in printers]
    lines = [f"# {line}" for line in str(plan.region).splitlines()]
    lines += [
        "import torch",
        "import triton",
        "import triton.language as tl",
        "",
        "from normpass.backend.codegen import triton_library as lib",
        "",
        "libdevice = lib.libdevice",
    ]
    for kernel in kernels:
        lines += ["", "", *kernel]
    lines += ["", "", *_launcher(plan, printers)]
    return TritonSource("\n".join(lines) + "\n", tuple(printer.kernel for printer in printers))


def _launcher(plan: Plan, printers: Sequence[_Printer]) -> list[str]:
    """The host function: workspace and launches."""
    region = plan.region
    buffers = [f"p_{b.name}" for b in (*region.inputs, *(o.buffer for o in region.outputs))]
    double = region.compute_dtype is torch.float64
    lines = [f"{', '.join(buffers)}, = tensors"]
    if region.runtime_sizes:
        lines.append(f"{', '.join(f'n_{name}' for name in region.runtime_sizes)}, = sizes")
    lines.append(
        f"like = dict(dtype=torch.float{64 if double else 32}, device={buffers[0]}.device)"
    )
    parts: dict[str, str] = {}
    for printer in printers:
        lines += printer.launch(parts)
    return [
        "def run(tensors, sizes, processors):",
        '    """Launches the kernels on the current stream. tensors: inputs, then outputs."""',
        *(f"    {line}" for line in lines),
    ]


def times(*factors: str) -> str:
    """A product as text."""
    return " * ".join(factor for factor in factors if factor != "1") or "1"


def divided(count: str) -> str:
    """` // count` as text."""
    return "" if count == "1" else f" // ({count})" if " " in count else f" // {count}"


def _cdiv(extent: str, block: int, cdiv: str) -> str:
    """Blocks along an axis, as text."""
    if block == 1:
        return extent
    return str(-(-int(extent) // block)) if extent.isdigit() else f"{cdiv}({extent}, {block})"


class Names:
    """What axes and values are called: as in the region, unless Python or this generator needs the name."""

    def __init__(self, plan: Plan) -> None:
        region = plan.region
        values = [*(b.name for b in region.inputs), *(op.name for op in region.ops)]
        axes = [axis.name for axis in plan.axes]
        taken = set(RESERVED)
        taken |= {f"{prefix}_{v}" for v in values for prefix in ("p", "acc", "parts", "kept")}
        taken |= {f"p_{output.buffer.name}" for output in region.outputs}
        taken |= {f"n_{name}" for name in (*axes, *region.runtime_sizes)}
        taken |= {f"mask_{axis}" for axis in axes} | {f"{axis}_0" for axis in axes}
        self.axis = {axis: self._free(axis, taken) for axis in axes}
        self.value = {value: self._free(value, taken) for value in values}

    def _free(self, name: str, taken: set[str]) -> str:
        text = re.sub(r"\W", "_", name)
        text = f"v{text}" if text[:1].isdigit() else text
        while text in taken or keyword.iskeyword(text):
            text += "_"
        taken.add(text)
        return text


class _Printer:
    """Prints one launch."""

    def __init__(self, plan: Plan, stage: Stage, blocks: Blocks, number: int, names: Names) -> None:
        self.plan = plan
        self.region: Region = plan.region
        self.stage = stage
        self.blocks = blocks
        self.number = number
        self.names = names
        self.varies = plan.region.varies
        self.truth = truth_values(plan.region)
        self.type = "tl.float64" if plan.region.compute_dtype is torch.float64 else "tl.float32"
        self.combined = {accumulator.op.name: accumulator for accumulator in stage.combined}
        self.tiles = [axis for axis in stage.outer if axis.name not in blocks.shares]
        self.dims = self._dimensions()
        self.masks: dict[str, str] = {}
        self.program = "program"
        self.lines: list[str] = []
        self.indent = 1
        self.scope: set[str] = set()
        self.kept: dict[
            str, str
        ] = {}  # arrays that this launch is the first to write, and their sizes
        self.parts: dict[
            str, tuple[str, str]
        ] = {}  # partial results: how many, and the size of one
        self.kernel = Kernel("", (), blocks.warps)

    # -- text

    def line(self, text: str = "") -> None:
        self.lines.append(f"{'    ' * self.indent}{text}" if text else "")

    @contextmanager
    def loop(self, head: str) -> Iterator[None]:
        """A loop of the kernel's text: what is defined within is gone after it."""
        before = set(self.scope)
        self.line(head)
        self.indent += 1
        yield
        self.indent -= 1
        self.scope = before

    def source(self) -> list[str]:
        """The kernel's lines. Also completes `kernel` and `workspaces`."""
        self.coordinates()
        for leaf in self.stage.scalars:
            self.leaf(leaf)
        for axis in self.stage.inner:
            if axis.name in self.blocks.resident:
                self.resident_index(axis)
        self.shares()
        head = self.extents()
        arguments = self.arguments("\n".join([*head, *self.lines]))
        name = f"{re.sub(r'[^A-Za-z0-9_]', '_', self.region.name)}_{self.number}"
        self.kernel = Kernel(name, arguments, self.blocks.warps)
        sizes = [argument for argument, kind in arguments if not kind.startswith("*")]
        plain = f"(do_not_specialize={sizes!r})".replace("'", '"') if sizes else ""
        signature = ", ".join(argument for argument, _ in arguments)
        return [f"@triton.jit{plain}", f"def {name}({signature}):", *head, *self.lines]

    def extents(self) -> list[str]:
        """Definitions of the extents that the text uses and that are not literals."""
        text = "\n".join(self.lines)
        lines, used = [], set()
        for axis in self.plan.axes:
            expression = index_expression(axis.extent)
            if re.search(rf"\bn_{axis.name}\b", text) and expression != f"n_{axis.name}":
                if axis.extent.is_number:
                    expression = f"tl.full((), {expression}, tl.int64)"
                lines.append(f"    n_{axis.name} = {expression}")
        text = "\n".join([*lines, text])
        used = [s for s in self.region.runtime_sizes if re.search(rf"\bn_{s}\b", text)]
        return [*(f"    n_{size} = n_{size}.to(tl.int64)" for size in used), *lines]

    def arguments(self, text: str) -> tuple[tuple[str, str], ...]:
        """The kernel's parameters: of all there could be, those that its text uses."""
        outputs = [output.buffer for output in self.region.outputs]
        known = [(f"p_{b.name}", f"*{TYPES[b.dtype]}") for b in (*self.region.inputs, *outputs)]
        work = f"*{self.type.removeprefix('tl.float')}".replace("*", "*fp")
        values = [op.name for op in self.region.ops]
        known += [(f"{kind}_{value}", work) for kind in ("parts", "kept") for value in values]
        known += [(f"n_{name}", "i32") for name in self.region.runtime_sizes]
        known += [("shares", "i32")]
        known += [(f"n_parts_{value}", "i32") for value in values]
        return tuple((n, kind) for n, kind in known if re.search(rf"\b{n}\b", text))

    # -- the host's side

    def launch(self, parts: dict[str, str]) -> list[str]:
        """The host's lines: workspace, grid, launch. `parts`: how many partial results earlier launches left."""
        tiles = self.tiles_text(self.tiles, "triton.cdiv")
        lines, grid = [], tiles
        if self.blocks.shares:
            programs = times("processors", str(self.blocks.programs))
            extent = index_expression(product(self.plan.axis[a].extent for a in self.blocks.shares))
            blocks = _cdiv(extent, self.blocks.size[SHARED], "triton.cdiv")
            shares = f"shares_{self.number}"
            lines.append(f"{shares} = lib.share_count({programs}, {tiles}, {blocks})")
            grid = times(shares, tiles)
        for value, (many, size) in self.parts.items():
            lines.append(f"parts_{value} = torch.empty({times(many, size)}, **like)")
            parts[value] = many
        for value, size in self.kept.items():
            lines.append(f"kept_{value} = torch.empty({size}, **like)")
        arguments = [self.host_argument(name, parts) for name, _ in self.kernel.arguments]
        lines.append(f"{self.kernel.name}[({grid},)](")
        lines += [f"    {argument}," for argument in arguments]
        lines.append(f"    num_warps={self.kernel.warps}, num_stages=1,")
        return [*lines, ")"]

    def host_argument(self, name: str, parts: Mapping[str, str]) -> str:
        """What the host passes for a parameter."""
        if name == "shares":
            return f"shares_{self.number}"
        return parts.get(name.removeprefix("n_parts_"), name) if name[:8] == "n_parts_" else name

    # -- dimensions

    def _dimensions(self) -> list[str]:
        """The axes along which blocks have more than one element, outermost first. "" is the shared axes as
        one, "part" the partial results."""
        size = self.blocks.size
        outer = [a.name for a in self.tiles if size[a.name] > 1]
        shared = [SHARED] if size.get(SHARED, 1) > 1 else []
        inner = [a.name for a in self.stage.inner if size[a.name] > 1]
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
            return "()"
        return f"[{', '.join(str(self.size_of(d)) if d in dims else '1' for d in self.dims)}]"

    def lanes(self, dim: str) -> str:
        """0, 1, 2, ... along a dimension."""
        text = f"tl.arange(0, {self.size_of(dim)})"
        if len(self.dims) == 1:
            return text
        return f"{text}[{', '.join(':' if d == dim else 'None' for d in self.dims)}]"

    def mask(self, dims: Sequence[str]) -> str:
        return " & ".join(self.masks[dim] for dim in dims if dim in self.masks)

    # -- extents and offsets

    def extent(self, axis: str) -> str:
        """An extent in a kernel: a literal, or a name of 64 bits."""
        expression = self.plan.axis[axis].extent
        literal = expression.is_number and not self.wide(axis)
        return str(expression) if literal else f"n_{axis}"

    def wide(self, axis: str) -> bool:
        """Whether offsets along an axis need 64 bits."""
        extent = self.plan.axis[axis].extent
        if not extent.is_number:
            return True
        steps = [
            node.access.strides.get(axis, 0)
            for node in walk(self.stage.body)
            if isinstance(node, (Load, Store))
        ]
        return any(step.is_number and extent * step >= WIDE for step in map(sympy.sympify, steps))

    def tiles_text(self, axes: Sequence[LoopAxis], cdiv: str) -> str:
        """How many tiles some axes have together; for a kernel's text if cdiv is Triton's."""
        fixed, factors = 1, []
        for axis in axes:
            kernel = cdiv == "tl.cdiv"
            extent = self.extent(axis.name) if kernel else index_expression(axis.extent)
            extent = f"({extent})" if " + " in extent else extent
            text = _cdiv(extent, self.blocks.size[axis.name], cdiv)
            if text.isdigit():
                fixed *= int(text)
            else:
                factors.append(text)
        return " * ".join([*factors, *([str(fixed)] if fixed > 1 or not factors else [])])

    def offset(self, strides: Mapping[str, sympy.Expr]) -> str:
        """` + term` for every axis. Added to a pointer from the left: scalars first, then blocks."""
        terms = []
        for axis in self.plan.axes:
            if axis.name in strides:
                stride = index_expression(strides[axis.name])
                stride = f"({stride})" if " + " in stride else stride
                index = self.names.axis[axis.name]
                blocked = bool(self.dims_of([axis.name]))
                terms.append((blocked, index if stride == "1" else f"{index} * {stride}"))
        return "".join(f" + {term}" for _, term in sorted(terms, key=lambda t: t[0]))

    def array_strides(self, axes: Iterable[str]) -> dict[str, sympy.Expr]:
        """An array lies in loop order, except that lanes are innermost."""
        strides: dict[str, sympy.Expr] = {}
        step: sympy.Expr = sympy.Integer(1)
        order = [a.name for a in reversed(self.plan.axes) if a.name in set(axes)]
        for axis in sorted(order, key=lambda axis: axis != self.plan.vector):
            strides[axis] = step
            step = step * self.plan.axis[axis].extent
        return strides

    def array_size(self, axes: Iterable[str]) -> str:
        size = index_expression(sympy.prod([self.plan.axis[axis].extent for axis in axes]))
        return f"({size})" if " + " in size else size

    # -- programs

    def coordinates(self) -> None:
        """Which tile, or which share of the rows, a program has."""
        if not self.stage.outer:
            return
        long = any(self.wide(axis.name) for axis in self.stage.outer)
        program = f"tl.program_id(0){'.to(tl.int64)' if long else ''}"
        if len(self.tiles) + bool(self.blocks.shares) == 1:
            self.program = program
        else:
            self.line(f"program = {program}")
        for k, axis in enumerate(self.tiles):
            first = k == 0 and not self.blocks.shares
            self.tile_index(axis, self.coordinate(axis, first=first))
        if self.blocks.shares:
            self.line(f"share = {self.program}{divided(self.tiles_text(self.tiles, 'tl.cdiv'))}")

    def coordinate(self, axis: LoopAxis, *, first: bool = False) -> str:
        """A tile's number along one axis, where programs count the last axis fastest."""
        later = self.tiles[self.tiles.index(axis) + 1 :]
        count = self.tiles_text([axis], "tl.cdiv")
        if count == "1":
            return "0"
        text = f"{self.program}{divided(self.tiles_text(later, 'tl.cdiv'))}"
        return text if first else f"{text} % {f'({count})' if ' ' in count else count}"

    def tile_index(self, axis: LoopAxis, number: str) -> None:
        index, block = self.names.axis[axis.name], self.blocks.size[axis.name]
        if block == 1:
            self.line(f"{index} = {number}")
            return
        number = f"({number})" if " " in number else number
        first = "" if number == "0" else f"{number} * {block} + "
        self.line(f"{index} = {first}{self.lanes(axis.name)}")
        self.bound(axis)

    def resident_index(self, axis: LoopAxis) -> None:
        """The index along an axis that one block covers."""
        index = self.names.axis[axis.name]
        if self.blocks.size[axis.name] == 1:
            self.line(f"{index} = 0")
            if axis.extent == 1:
                return
        wide = ".to(tl.int64)" if self.wide(axis.name) else ""
        if self.blocks.size[axis.name] > 1:
            self.line(f"{index} = {self.lanes(axis.name)}{wide}")
        self.bound(axis)

    def bound(self, axis: LoopAxis) -> None:
        """The mask of an axis, if its blocks may reach beyond its end."""
        block = self.blocks.size[axis.name]
        if axis.extent.is_number and axis.extent % block == 0 and axis.extent > 0:
            return
        index = self.names.axis[axis.name]
        self.line(f"mask_{axis.name} = {index} < {self.extent(axis.name)}")
        self.masks[axis.name] = f"mask_{axis.name}"

    def shares(self) -> None:
        """The body: once for a tile, or for all rows of a share."""
        if not self.blocks.shares:
            self.body(self.stage.body)
            return
        shared = self.stage.shared
        axes, block = self.blocks.shares, self.blocks.size[SHARED]
        row = self.names.axis[axes[0]] if len(axes) == 1 else "row"
        count = " * ".join(self.extent(axis) for axis in axes)
        if not any(self.wide(axis) for axis in axes):
            total = product(int(self.plan.axis[axis].extent) for axis in axes)
            count = str(total) if total < WIDE else f"tl.full((), {total}, tl.int64)"
        blocks = _cdiv(count, block, "tl.cdiv")
        self.line(f"rows = {times(f'tl.cdiv({blocks}, shares)', str(block))}")
        self.line("first = share * rows")
        self.line(f"last = tl.minimum(first + rows, {count})")
        for accumulator in shared:
            self.begin(accumulator)
        head = f"{row}_0" if block > 1 else row
        with self.loop(f"for {head} in range(first, last{f', {block}' if block > 1 else ''}):"):
            if block > 1:
                self.line(f"{row} = {head} + {self.lanes(SHARED)}")
                self.line(f"mask_{row} = {row} < last")
                self.masks[SHARED] = f"mask_{row}"
            if len(axes) > 1:
                self.unravel(row)
            self.body(self.stage.body)
        self.masks.pop(SHARED, None)
        for accumulator in shared:
            self.leave(accumulator)

    def unravel(self, row: str) -> None:
        """The index along each of several shared axes."""
        after: list[str] = []
        for k, axis in reversed(list(enumerate(self.blocks.shares))):
            text = row
            if after:
                text += f" // {after[0]}" if len(after) == 1 else f" // ({' * '.join(after)})"
            if k > 0:
                text += f" % {self.extent(axis)}"
            self.line(f"{self.names.axis[axis]} = {text}")
            after.insert(0, self.extent(axis))

    # -- bodies

    def body(self, nodes: Sequence[Node]) -> None:
        phases = sum(isinstance(node, Loop) for node in nodes)
        phase = 0
        for node in nodes:
            if not isinstance(node, Loop):
                self.leaf(node)
                continue
            title = f"phase {phase}, over" if phases > 1 else "over"
            phase += 1
            names = [node.axis.name, *(a.name for a in _nest(node))]
            if not any(self.dims_of([a]) == [] and a not in self.blocks.resident for a in names):
                self.line(f"# {title} {', '.join(names)}")
            else:
                self.line(f"# {title} {node.axis.name}")
            with self.over([node.axis.name]):
                self.body(node.body)

    @contextmanager
    def over(self, axes: Sequence[str]) -> Iterator[None]:
        """Loops over those of some axes that no block covers."""
        if not axes:
            yield
            return
        axis, rest = axes[0], axes[1:]
        if axis in self.blocks.resident:
            with self.over(rest):
                yield
            return
        index, block = self.names.axis[axis], self.blocks.size[axis]
        head, step = (index, "") if block == 1 else (f"{index}_0", f", {block}")
        with self.loop(f"for {head} in range(0, {self.extent(axis)}{step}):"):
            if block > 1:
                self.line(f"{index} = {head} + {self.lanes(axis)}")
                self.bound(self.plan.axis[axis])
            with self.over(rest):
                yield

    def streamed(self, axes: Iterable[str]) -> list[str]:
        """Those axes of which a program sees a chunk at a time."""
        inner = {axis.name for axis in self.stage.inner}
        return [a for a in axes if a in inner and a not in self.blocks.resident]

    # -- leaves

    def leaf(self, node: Leaf) -> None:
        match node:
            case Load(access):
                self.load(access)
            case Compute(op):
                self.compute(op)
            case Begin(accumulator) if not accumulator.shared:
                self.begin(accumulator)
            case Accumulate(accumulator):
                self.accumulate(accumulator)
            case Finish(accumulator) if not accumulator.shared:
                self.finish(accumulator)
            case Keep(value, axes, shared):
                self.keep(value, axes, shared=shared)
            case Recall(value, axes, shared):
                self.recall(value, axes, shared=shared)
            case Store(output, access):
                self.store(output.value, access)

    def define(self, value: str, expression: str) -> None:
        self.line(f"{self.names.value[value]} = {expression}")
        self.scope.add(value)

    def read(self, address: str, dims: Sequence[str], other: str = "0.0") -> str:
        mask = self.mask(dims)
        return f"tl.load({address}, mask={mask}, other={other})" if mask else f"tl.load({address})"

    def write(self, address: str, value: str, dims: Sequence[str]) -> None:
        mask = self.mask(dims)
        self.line(f"tl.store({address}, {value}{f', mask={mask}' if mask else ''})")

    def load(self, access: Access) -> None:
        buffer = access.buffer
        if buffer.name in self.scope:
            return
        address = f"p_{buffer.name}{self.offset(access.strides)}"
        boolean = buffer.dtype is torch.bool
        text = self.read(address, self.dims_of(access.strides), "0" if boolean else "0.0")
        if boolean:
            text = f"{text} != 0"
        elif f"tl.{TYPES[buffer.dtype].replace('fp', 'float')}" != self.type:
            text = f"{text}.to({self.type})"
        self.define(buffer.name, text)

    def store(self, value: str, access: Access) -> None:
        address = f"p_{access.buffer.name}{self.offset(access.strides)}"
        text = self.as_number(value)
        if access.buffer.dtype is torch.bool:
            text = self.as_truth(value)
        self.write(address, text, self.dims_of(access.strides))

    def compute(self, op: Op) -> None:
        if op.name in self.scope:
            return
        if op.fn == "numel":
            self.define(op.name, self.count(self.plan.numel[op.name]))
            return
        row = POINTWISE[op.fn]
        bare = BARE.get(op.fn, ()) if any(isinstance(arg, str) for arg in op.args) else ()
        args = [
            self.argument(arg, truth=str(k) in row.truth, bare=k in bare)
            for k, arg in enumerate(op.args)
        ]
        self.define(op.name, row.triton.format(*args))

    def count(self, size: sympy.Expr) -> str:
        """A number of elements, as a number of the compute type."""
        if size.is_number:
            return f"tl.full((), {size}, {self.type})"
        return f"({index_expression(size)}).to({self.type})"

    def argument(self, arg: Arg, *, truth: bool, bare: bool) -> str:
        """An argument as its operation takes it: number or truth value, literal or of a pinned type."""
        if isinstance(arg, str):
            return self.as_truth(arg) if truth else self.as_number(arg)
        if truth:
            return f"tl.full((), {bool(arg)}, tl.int1)"
        text = number(float(arg))
        return text if bare else f"tl.full((), {text}, {self.type})"

    def as_number(self, value: str) -> str:
        """A value as a number: a truth value is one or zero."""
        name = self.names.value[value]
        return f"{name}.to({self.type})" if value in self.truth else name

    def as_truth(self, value: str) -> str:
        name = self.names.value[value]
        return name if value in self.truth else f"({name} != 0)"

    # -- accumulators

    def partial(self, accumulator: Accumulator) -> str:
        """The address of a program's own partial result."""
        name = accumulator.op.name
        others = [axis for axis in self.tiles if axis.name not in accumulator.axes]
        index = "share"
        for axis in others:
            count = self.tiles_text([axis], "tl.cdiv")
            index = f"({index} * {count} + {self.coordinate(axis)})"
        size = self.array_size(accumulator.axes)
        many = times(f"shares_{self.number}", self.tiles_text(others, "triton.cdiv"))
        self.parts[name] = (many, size)
        index = index if size == "1" else f"{index} * {size}"
        return f"parts_{name} + {index}{self.offset(self.array_strides(accumulator.axes))}"

    def element(self, value: str) -> str:
        """The address of a value's element in the array it is kept in."""
        axes = self.varies[value]
        return f"kept_{value}{self.offset(self.array_strides(axes))}"

    def array(self, accumulator: Accumulator) -> str:
        """The address of an accumulator's element in global memory."""
        return (
            self.partial(accumulator) if accumulator.shared else self.element(accumulator.op.name)
        )

    def reduced(self, accumulator: Accumulator) -> list[str]:
        """The dimensions of a block that an accumulator reduces."""
        own = self.dims_of(self.varies[operand(accumulator)])
        return [dim for dim in self.dims_of(accumulator.op.axes) if dim in own]

    def reduce(self, accumulator: Accumulator, text: str) -> str:
        """A block reduced to what it leaves."""
        dims, fn = self.reduced(accumulator), REDUCE[accumulator.op.fn]
        own = self.dims_of(self.varies[operand(accumulator)])
        if dims and dims == own:
            return f"{fn}({text})"
        for dim in reversed(dims):
            text = f"{fn}({text}, axis={self.dims.index(dim)}, keep_dims=True)"
        return text

    def masked(self, accumulator: Accumulator) -> str:
        """The value to add up, neutral beyond the ends of what is reduced."""
        text = self.as_number(operand(accumulator))
        mask = self.mask(self.reduced(accumulator))
        return f"tl.where({mask}, {text}, {NEUTRAL[accumulator.op.fn]})" if mask else text

    def loops_between(self, accumulator: Accumulator) -> bool:
        """Whether values are added in a loop of the text, rather than all at once."""
        return accumulator.shared or bool(self.streamed(accumulator.op.axes))

    def begin(self, accumulator: Accumulator) -> None:
        op = accumulator.op
        neutral, streamed = NEUTRAL[op.fn], self.streamed(accumulator.axes)
        if streamed:
            address = self.array(accumulator)
            if not accumulator.shared:
                self.kept[op.name] = self.array_size(self.varies[op.name])
            with self.over(streamed):
                dims = self.dims_of(self.address_axes(accumulator))
                self.write(address, f"tl.full({self.shape(dims)}, {neutral}, {self.type})", dims)
            self.line("tl.debug_barrier()")
        elif self.loops_between(accumulator):
            dims = self.dims_of(self.varies[operand(accumulator)])
            self.line(f"acc_{op.name} = tl.full({self.shape(dims)}, {neutral}, {self.type})")

    def address_axes(self, accumulator: Accumulator) -> Iterable[str]:
        """The axes of an accumulator's array in global memory."""
        return accumulator.axes if accumulator.shared else self.varies[accumulator.op.name]

    def accumulate(self, accumulator: Accumulator) -> None:
        op = accumulator.op
        text, combine = self.masked(accumulator), COMBINE[op.fn]
        if self.streamed(accumulator.axes):
            address, dims = self.array(accumulator), self.dims_of(self.address_axes(accumulator))
            text = self.reduce(accumulator, text)
            self.write(address, combine.format(self.read(address, dims), text), dims)
            self.line("tl.debug_barrier()")
        elif self.loops_between(accumulator):
            self.line(f"acc_{op.name} = {combine.format(f'acc_{op.name}', text)}")

    def finish(self, accumulator: Accumulator) -> None:
        if self.streamed(accumulator.axes):
            return
        looped = self.loops_between(accumulator)
        text = f"acc_{accumulator.op.name}" if looped else self.masked(accumulator)
        self.define(accumulator.op.name, self.reduce(accumulator, text))

    def leave(self, accumulator: Accumulator) -> None:
        """Writes a program's partial result, unless it was added up there."""
        if self.streamed(accumulator.axes):
            return
        text = self.reduce(accumulator, f"acc_{accumulator.op.name}")
        self.write(self.partial(accumulator), text, self.dims_of(accumulator.axes))

    # -- arrays

    def keep(self, value: str, axes: tuple[str, ...], *, shared: bool) -> None:
        if not shared and not self.streamed(axes):
            return
        self.kept[value] = self.array_size(self.varies[value])
        dims = self.dims_of(self.varies[value])
        self.write(self.element(value), self.as_number(value), dims)
        if not shared:
            self.line("tl.debug_barrier()")

    def recall(self, value: str, axes: tuple[str, ...], *, shared: bool) -> None:
        if value in self.scope:
            return
        if value in self.combined:
            self.combine(self.combined[value])
            return
        text = self.read(self.element(value), self.dims_of(self.varies[value]))
        self.define(value, f"{text} != 0" if value in self.truth else text)

    def combine(self, accumulator: Accumulator) -> None:
        """Adds up the programs' partial results, always in the same order."""
        op, parts = accumulator.op, self.blocks.parts
        own = self.dims_of(accumulator.axes)
        dims = [*(["part"] if parts > 1 else []), *own]
        self.line(f"# {op.name} from the partial results of all programs")
        neutral, count = NEUTRAL[op.fn], f"n_parts_{op.name}"
        self.line(f"acc_{op.name} = tl.full({self.shape(dims)}, {neutral}, {self.type})")
        size = self.array_size(accumulator.axes)
        head, step = ("part_0", f", {parts}") if parts > 1 else ("part", "")
        with self.loop(f"for {head} in range(0, {count}{step}):"):
            if parts > 1:
                self.line(f"part = part_0 + {self.lanes('part')}")
                self.line(f"mask_part = part < {count}")
                self.masks["part"] = "mask_part"
            index = "part" if size == "1" else f"part * {size}"
            address = (
                f"parts_{op.name} + {index}{self.offset(self.array_strides(accumulator.axes))}"
            )
            text = self.read(address, dims, neutral)
            self.line(f"acc_{op.name} = {COMBINE[op.fn].format(f'acc_{op.name}', text)}")
        self.masks.pop("part", None)
        text = f"acc_{op.name}"
        if parts > 1:
            axis = f", axis={self.dims.index('part')}, keep_dims=True" if own else ""
            text = f"{REDUCE[op.fn]}({text}{axis})"
        self.define(op.name, text)


def _nest(loop: Loop) -> list[LoopAxis]:
    """The axes of the loops directly within a loop that has nothing else in it."""
    axes = []
    while len(loop.body) == 1 and isinstance(loop.body[0], Loop):
        loop = loop.body[0]
        axes.append(loop.axis)
    return axes


def number(value: float) -> str:
    """A literal."""
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return f'float("{"-" if value < 0 else ""}inf")'
    return repr(value) if value >= 0 else f"({value!r})"
