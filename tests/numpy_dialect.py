"""A dialect of a page: a program printed as plain Python loops over NumPy arrays.

It shows what a printer needs: everything that is decided stands in the program, and a printer that
goes one element at a time may ignore how its loops go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import sympy
import torch

from normpass.backend.program.machine import Blocking
from normpass.backend.program.plan import make_plan
from normpass.backend.program.pointwise import POINTWISE, truth_values
from normpass.backend.program.reductions import REDUCTIONS
from normpass.backend.program.sizes import size_classes
from normpass.backend.program.tree import (
    Accumulate,
    Allocate,
    Begin,
    Compute,
    Finish,
    Keep,
    Load,
    Loop,
    Recall,
    Regroup,
    Store,
)
from normpass.passes.region import EXPAND

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.tree import Leaf, Node, Plan
    from normpass.passes.region import Region

# Blocks of a few elements, for machines of tests.
SMALL_BLOCKS = Blocking(
    long_row=4,
    row_bytes=8,
    row_block=(2, 4),
    narrow=3,
    column_block=(2, 4),
    sweep=8,
    sweep_block=256,
    least=2,
)
COMBINE = {"sum": np.add, "prod": np.multiply, "amax": np.maximum, "amin": np.minimum}


def pointwise(fn: str, *args: Any) -> Any:
    """A function of numbers, in float64."""
    row = POINTWISE[fn]
    kinds = [torch.bool if str(k) in row.truth else torch.float64 for k in range(len(args))]
    tensors = [torch.tensor(arg, dtype=kind) for arg, kind in zip(args, kinds, strict=True)]
    return row.eager(*tensors).item()


def generate(plan: Plan) -> str:
    """`kernel(tensors)`: flat arrays, the region's inputs and then its outputs."""
    return _Printer(plan).source()


class _Printer:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.lines: list[str] = []

    def source(self) -> str:
        region = self.plan.region
        buffers = [*region.inputs, *(output.buffer for output in region.outputs)]
        self.line(0, f"def kernel({', '.join(f'p_{buffer.name}' for buffer in buffers)}, sizes):")
        for k, name in enumerate(region.runtime_sizes):
            self.line(1, f"{sympy.Symbol(name)} = sizes[{k}]")
        for axis in self.plan.axes:
            self.line(1, f"n_{axis.name} = {axis.extent}".replace("/", "//"))
        self.nodes(1, self.plan.body)
        self.line(1, "pass")
        return "\n".join(self.lines)

    def line(self, indent: int, text: str) -> None:
        self.lines.append(f"{'    ' * indent}{text}")

    def nodes(self, indent: int, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                self.line(indent, f"for i_{node.axis.name} in range(n_{node.axis.name}):")
                self.nodes(indent + 1, node.body)
            else:
                self.line(indent, self.leaf(node))

    def elements(self, axes: Iterable[str]) -> str:
        return " * ".join(["1", *(f"n_{axis}" for axis in axes)])

    def offset(self, strides: Mapping[str, sympy.Expr]) -> str:
        return " + ".join(["0", *(f"i_{axis} * ({step})" for axis, step in strides.items())])

    def array(self, value: str, axes: Iterable[str]) -> str:
        """A sum of all rows and one of each may be kept at the same time."""
        return f"a_{'_by_'.join([value, *axes])}"

    def element(self, value: str, axes: Iterable[str]) -> str:
        return f"{self.array(value, axes)}[{self.offset(self.plan.array_strides(axes))}]"

    def leaf(self, node: Leaf) -> str:
        match node:
            case Load(access, _):
                name = access.buffer.name
                return f"v_{name} = p_{name}[{self.offset(access.strides)}]"
            case Store(output, access):
                return f"p_{access.buffer.name}[{self.offset(access.strides)}] = v_{output.value}"
            case Compute(op):
                return f"v_{op.name} = {self.computed(node)}"
            case Allocate(space):
                return (
                    f"{self.array(space.value, space.axes)} = np.empty({self.elements(space.axes)})"
                )
            case Keep(value, axes, _):
                return f"{self.element(value, axes)} = v_{value}"
            case Recall(value, axes, _):
                read = self.element(value, axes)
                return f"v_{value} = {f'bool({read})' if self.is_truth(value) else read}"
            case Regroup(op, array):
                others = [a.name for a in self.plan.axes if a.name in {*array.axes} ^ {*op.axes}]
                place = self.offset(self.plan.array_strides(others))
                return f"v_{op.name} = {self.array(array.value, array.axes)}[{place}]"
        return self.sum(node)

    def sum(self, node: Begin | Accumulate | Finish) -> str:
        accumulator = node.accumulator
        name, fn = accumulator.op.name, accumulator.op.fn
        place = self.element(name, accumulator.axes) if accumulator.axes else f"v_{name}"
        match node:
            case Begin():
                neutral = f"float('{REDUCTIONS[fn].neutral}')"
                if accumulator.axes:
                    return f"{self.array(name, accumulator.axes)}.fill({neutral})"
                return f"v_{name} = {neutral}"
            case Accumulate():
                return f"{place} = COMBINE['{fn}']({place}, float(v_{accumulator.operand}))"
        return f"# {name} is complete"

    def computed(self, node: Compute) -> str:
        op = node.op
        if op.fn == "numel":
            return f"float({self.plan.numel[op.name]})"
        args = [f"v_{arg}" if isinstance(arg, str) else f"float('{arg}')" for arg in op.args]
        if op.fn == EXPAND:
            return args[0]
        return f"pointwise('{op.fn}', {', '.join(args)})"

    def is_truth(self, value: str) -> bool:
        return value in truth_values(self.plan.region)


def run(
    region: Region, machine: Machine, inputs: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """A region's outputs, by the printed loops of its program."""
    names: dict[str, Any] = {"np": np, "pointwise": pointwise, "COMBINE": COMBINE}
    exec(generate(make_plan(region, machine, size_classes(sizes))), names)
    extents = region.extents(sizes)
    outputs = [
        torch.empty_strided(
            region.shape(output.buffer, extents),
            region.strides(output.buffer, extents),
            dtype=torch.float64,
        )
        for output in region.outputs
    ]
    arrays = [_flat(tensor).to(torch.float64).numpy() for tensor in (*inputs, *outputs)]
    names["kernel"](*arrays, sizes)
    return [
        torch.from_numpy(array).as_strided(tensor.shape, tensor.stride()).to(output.buffer.dtype)
        for array, tensor, output in zip(
            arrays[len(inputs) :], outputs, region.outputs, strict=True
        )
    ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements that a tensor's strides reach, as it has them in memory."""
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach if tensor.numel() else 0,), (1,))
