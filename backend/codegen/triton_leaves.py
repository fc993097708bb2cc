"""The leaves of a plan's tree in Triton: loads, stores, operations, reductions, arrays in global
memory.

triton_kernel.py prints the loops around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.backend.codegen.text import TYPES, factor
from normpass.backend.codegen.triton_layout import is_power_of_two, number, size_text, times
from normpass.backend.codegen.triton_program import ProgramPrinter
from normpass.backend.program.pointwise import POINTWISE, truth_values
from normpass.backend.program.reductions import REDUCTIONS
from normpass.backend.program.tree import (
    Accumulate,
    Begin,
    Compute,
    Finish,
    Keep,
    Load,
    Recall,
    Store,
    uses,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import sympy

    from normpass.backend.codegen.names import Names
    from normpass.backend.program.tree import (
        Access,
        Accumulator,
        Launch,
        Leaf,
        LoopAxis,
        Plan,
        Workspace,
    )
    from normpass.passes.region import Arg, Op, Region


# Arguments that may be bare literals: beside an operator they take the other operand's type. In
# other calls they would be float32 always, so there they are pinned.
BARE = dict.fromkeys(("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge"), (0, 1)) | {
    "div": (1,)
}


class LeafPrinter(ProgramPrinter):
    """Prints leaves, one at a time."""

    def __init__(self, plan: Plan, launch: Launch, number: int, names: Names) -> None:
        super().__init__(plan, launch, names)
        self.number = number
        self.region: Region = plan.region
        self.varies = plan.region.varies
        self.truth = truth_values(plan.region)
        self.type = "tl.float64" if plan.region.compute_dtype is torch.float64 else "tl.float32"
        self.combined = {accumulator.op.name: accumulator for accumulator in launch.combined}

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
        self.line(f"{self.value(value)} = {expression}")
        self.scope.add(self.value(value))

    def is_known(self, value: str) -> bool:
        return self.value(value) in self.scope

    def load(self, access: Access) -> None:
        buffer = access.buffer
        if self.is_known(buffer.name):
            return
        address = f"{self.use(f'p_{buffer.name}')}{self.offset(access.strides)}"
        spelling = TYPES[buffer.dtype]
        zero = "0.0" if spelling.triton.startswith(("fp", "bf")) else "0"
        text = self.read(address, self.dims_of(access.strides), zero)
        if spelling.bits:
            text = f"lib.from_{spelling.bits}({text}).to({self.type})"
        elif buffer.dtype is torch.bool:
            text = f"{text} != 0"
        elif f"tl.{spelling.triton.replace('fp', 'float')}" != self.type:
            text = f"{text}.to({self.type})"
        self.define(buffer.name, text)

    def store(self, value: str, access: Access) -> None:
        address = f"{self.use(f'p_{access.buffer.name}')}{self.offset(access.strides)}"
        text = self.as_number(value)
        if access.buffer.dtype is torch.bool:
            text = self.as_truth(value)
        elif bits := TYPES[access.buffer.dtype].bits:
            text = f"lib.to_{bits}({text})"
        elif not access.buffer.dtype.is_floating_point:  # what is left of a number without fraction
            text = f"{text}.to(tl.int32)"
        self.write(address, text, self.dims_of(access.strides))

    def compute(self, op: Op) -> None:
        if self.is_known(op.name):
            return
        if op.fn == "numel":
            self.count(op.name, self.plan.numel[op.name])
            return
        fn, args = op.fn, [self.literal(arg) for arg in op.args]
        if fn == "div" and not isinstance(args[1], str) and is_power_of_two(args[1]):
            # The same number, without a division's slow path, which costs registers.
            fn, args = "mul", [args[0], 1.0 / args[1]]
        row = POINTWISE[fn]
        bare = BARE.get(fn, ()) if any(isinstance(arg, str) for arg in args) else ()
        texts = [
            self.argument(arg, truth=str(k) in row.truth, bare=k in bare)
            for k, arg in enumerate(args)
        ]
        self.define(op.name, row.triton.format(*texts))

    def count(self, value: str, size: sympy.Expr) -> None:
        """A number of elements of the compute type; a fixed one is a literal where it is used."""
        others = [node for node in walk(*self.launch.body) if not isinstance(node, Compute)]
        if not size.is_number:
            self.define(value, f"({self.size(size)}).to({self.type})")
        elif any(value in uses(node) for node in others):
            self.define(value, f"tl.full([], {size}, {self.type})")

    def literal(self, arg: Arg) -> Arg:
        """An argument, as a literal if it is one or a fixed number of elements."""
        size = self.plan.numel.get(arg) if isinstance(arg, str) else None
        return arg if size is None or not size.is_number else float(size)

    def argument(self, arg: Arg, *, truth: bool, bare: bool) -> str:
        """An argument as its operation takes it: number or truth value, bare or pinned."""
        if isinstance(arg, str):
            return self.as_truth(arg) if truth else self.as_number(arg)
        if truth:
            return f"tl.full([], {bool(arg)}, tl.int1)"
        text = number(float(arg))
        return text if bare else f"tl.full([], {text}, {self.type})"

    def as_number(self, value: str) -> str:
        """A value as a number: a truth value is one or zero."""
        name = self.value(value)
        return f"{name}.to({self.type})" if value in self.truth else name

    def as_truth(self, value: str) -> str:
        name = self.value(value)
        return name if value in self.truth else f"({name} != 0)"

    # -- accumulators

    def partial(self, accumulator: Accumulator) -> str:
        """The address of a program's own partial result."""
        index = "share" if self.blocks.shares else ""
        for axis in self.beside(accumulator.axes):
            count = self.tiles_text([axis], "tl.cdiv")
            number = self.coordinate(axis)
            index = f"({index} * {count} + {number})" if index else f"({number})"
        return self.part(accumulator, index)

    def beside(self, axes: Iterable[str]) -> list[LoopAxis]:
        """The axes in tiles whose programs have partial results of the same elements."""
        return [axis for axis in self.tiles if axis.name not in axes]

    def how_many(self, space: Workspace) -> str:
        """How many partial results there are, as the launcher says it."""
        beside = self.tiles_text(self.beside(space.axes), "triton.cdiv")
        return times(f"shares_{self.number}", beside) if self.blocks.shares else beside

    def part(self, accumulator: Accumulator, index: str) -> str:
        """The address of one of several partial results."""
        size = factor(self.size(self.array_size(accumulator.axes)))
        index = index if size == "1" else f"{index} * {size}"
        parts = self.use(f"parts_{accumulator.op.name}")
        return f"{parts} + {index}{self.offset(self.plan.array_strides(accumulator.axes))}"

    def element(self, value: str) -> str:
        """The address of a value's element in the array it is kept in."""
        axes = self.varies[value]
        return f"{self.use(f'kept_{value}')}{self.offset(self.plan.array_strides(axes))}"

    def space_size(self, space: Workspace) -> str:
        """Elements of an array, of each program's own if it has one, as the launcher says it."""
        return factor(size_text(self.array_size(space.axes)))

    def array(self, accumulator: Accumulator) -> str:
        """The address of an accumulator's element in global memory."""
        return (
            self.partial(accumulator) if accumulator.shared else self.element(accumulator.op.name)
        )

    def reduced(self, accumulator: Accumulator) -> list[str]:
        """The dimensions of a block that an accumulator reduces."""
        own = self.dims_of(self.varies[accumulator.operand])
        return [dim for dim in self.dims_of(accumulator.op.axes) if dim in own]

    def reduce(self, accumulator: Accumulator, text: str) -> str:
        """A block reduced to what it leaves."""
        dims, fn = self.reduced(accumulator), REDUCTIONS[accumulator.op.fn].triton
        own = self.dims_of(self.varies[accumulator.operand])
        if dims and dims == own:
            return f"{fn}({text})"
        for dim in reversed(dims):
            text = f"{fn}({text}, axis={self.dims.index(dim)}, keep_dims=True)"
        return text

    def masked(self, accumulator: Accumulator) -> str:
        """The value to add up, neutral beyond the ends of what is reduced."""
        text = self.as_number(accumulator.operand)
        mask = self.mask(self.reduced(accumulator))
        neutral = number(REDUCTIONS[accumulator.op.fn].neutral)
        return f"tl.where({mask}, {text}, {neutral})" if mask else text

    def loops_between(self, accumulator: Accumulator) -> bool:
        """Whether values are added in a loop of the text, rather than all at once."""
        axes = accumulator.op.axes
        in_pieces = not self.blocks.pieces.keys().isdisjoint(axes)
        return accumulator.shared or in_pieces or bool(self.launch.streamed(axes))

    def sum(self, accumulator: Accumulator) -> str:
        """The variable that adds up."""
        return f"acc_{accumulator.op.name}{self.suffix(accumulator.axes)}"

    def begin(self, accumulator: Accumulator) -> None:
        op = accumulator.op
        neutral = number(REDUCTIONS[op.fn].neutral)
        streamed = self.launch.streamed(accumulator.axes)
        if streamed:
            address = self.array(accumulator)
            with self.over(streamed):
                dims = self.dims_of(self.address_axes(accumulator))
                self.write(address, f"tl.full({self.shape(dims)}, {neutral}, {self.type})", dims)
            self.line("tl.debug_barrier()")
        elif self.loops_between(accumulator):
            dims = self.dims_of(self.varies[accumulator.operand])
            total = self.sum(accumulator)
            self.line(f"{total} = tl.full({self.shape(dims)}, {neutral}, {self.type})")

    def address_axes(self, accumulator: Accumulator) -> Iterable[str]:
        """The axes of an accumulator's array in global memory."""
        return accumulator.axes if accumulator.shared else self.varies[accumulator.op.name]

    def accumulate(self, accumulator: Accumulator) -> None:
        op = accumulator.op
        text, combine = self.masked(accumulator), REDUCTIONS[op.fn].combine
        if self.launch.streamed(accumulator.axes):
            address, dims = self.array(accumulator), self.dims_of(self.address_axes(accumulator))
            text = self.reduce(accumulator, text)
            self.write(address, combine.format(self.read(address, dims), text), dims)
            self.line("tl.debug_barrier()")
        elif self.loops_between(accumulator):
            total = self.sum(accumulator)
            self.line(f"{total} = {combine.format(total, text)}")

    def finish(self, accumulator: Accumulator) -> None:
        if self.launch.streamed(accumulator.axes):
            return
        looped = self.loops_between(accumulator)
        text = self.sum(accumulator) if looped else self.masked(accumulator)
        self.define(accumulator.op.name, self.reduce(accumulator, text))

    def leave(self, accumulator: Accumulator) -> None:
        """Writes a program's partial result, unless it was added up there."""
        if self.launch.streamed(accumulator.axes):
            return
        text = self.reduce(accumulator, self.sum(accumulator))
        self.write(self.partial(accumulator), text, self.dims_of(accumulator.axes))

    # -- arrays

    def keep(self, value: str, axes: tuple[str, ...], *, shared: bool) -> None:
        if not shared and not self.launch.streamed(axes):
            return
        dims = self.dims_of(self.varies[value])
        self.write(self.element(value), self.as_number(value), dims)
        if not shared:
            self.line("tl.debug_barrier()")

    def recall(self, value: str, axes: tuple[str, ...], *, shared: bool) -> None:
        if self.is_known(value):
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
        neutral, count = number(REDUCTIONS[op.fn].neutral), self.use(f"n_parts_{op.name}")
        self.line(f"acc_{op.name} = tl.full({self.shape(dims)}, {neutral}, {self.type})")
        head, step = ("part_0", [str(parts)]) if parts > 1 else ("part", [])
        bounds = self.range("0", count, *step, staged=True)
        with self.loop(f"for {head} in {bounds}:"):
            if parts > 1:
                self.line(f"part = part_0 + {self.lanes('part')}")
                self.line(f"mask_part = part < {count}")
                self.masks["part"] = "mask_part"
            text = self.read(self.part(accumulator, "part"), dims, neutral)
            self.line(f"acc_{op.name} = {REDUCTIONS[op.fn].combine.format(f'acc_{op.name}', text)}")
        self.masks.pop("part", None)
        text = f"acc_{op.name}"
        if parts > 1:
            axis = f", axis={self.dims.index('part')}, keep_dims=True" if own else ""
            text = f"{REDUCTIONS[op.fn].triton}({text}{axis})"
        self.define(op.name, text)
