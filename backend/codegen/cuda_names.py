"""How generated CUDA C++ spells what a launch speaks of: its parameters, indices, arrays."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normpass.backend.codegen import cpp_names
from normpass.backend.codegen.names import Names
from normpass.backend.codegen.text import TYPES, factor, index_expression
from normpass.backend.program.pointwise import POINTWISE
from normpass.backend.program.team import team_of
from normpass.backend.program.tree import Load, Recall
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import sympy

    from normpass.backend.program.tree import Access, Accumulator, Launch, LoopAxis, Plan

SHARES = "shares"  # the parameter that says among how many teams rows are shared out
WORDS = (
    "alignas alignof and asm auto bitand bitor bool break case catch char class compl const "
    "constexpr continue decltype default delete do double else enum explicit export extern false "
    "float for friend goto if inline int long mutable namespace new noexcept not nullptr operator "
    "or private protected public register return scalar short signed sizeof static struct switch "
    "template this throw true try typedef typename union unsigned using virtual void volatile "
    "while xor Row Slots Exchange Sum Prod Amax Amin chip exchange row rows program share shares "
    "first last number stage element there part sum ask ask_values i j k p get put combine "
    "accumulate mask_of std device blockIdx threadIdx Segments Bands bands turn all_of_warp "
    "Columns Down down Beside beside Arrivals arrivals ask_rows parity"
)
EXPRESSIONS = " ".join(row.cpp for row in POINTWISE.values())
RESERVED = frozenset((*WORDS.split(), *re.findall(r"[A-Za-z_]\w*", EXPRESSIONS)))


@dataclass(frozen=True)
class Kernel:
    """One `__global__` function of a module.

    launch: what it was printed of, and its number in the plan. arguments: the names of its
    parameters, each of 8 bytes. An address is p_<tensor>, or parts_<value> and kept_<value> of an
    array in memory; an int64_t is n_<run-time size>, n_parts_<value>, or SHARES.
    """

    name: str
    launch: Launch
    number: int
    arguments: tuple[str, ...]


class CudaNames(cpp_names.Names):
    """Names and lines of one launch. Values are numbers, never lanes; those of a vector that a
    thread has of a row have an index (`indexed`).
    """

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan)
        self.along = ""  # no axis has lanes
        self.launch, self.number, self.team = launch, number, team_of(launch)
        self.kernel_name = f"{re.sub(r'[^A-Za-z0-9_]', '_', self.region.name)}_{number}"
        prefixes = ("next", "slots", "out", "turns", "columns")
        values = [*(b.name for b in self.buffers), *(op.name for op in self.region.ops)]
        self.free = Names(plan, RESERVED | {f"{p}_{v}" for p in prefixes for v in values})
        self.tiles = [axis for axis in launch.outer if axis.name not in launch.blocks.shares]

    def source(self) -> list[str]:
        """The kernel's lines."""
        raise NotImplementedError

    # -- names

    def name(self, value: str) -> str:
        text = self.free.value[value]
        return f"{text}[j]" if value in self.indexed else text

    def define(self, value: str, expression: str) -> None:
        self.line(f"const {self.type_of(value)} {self.free.value[value]} = {expression};")

    def index(self, axis: str) -> str:
        return self.free.axis[axis]

    def offset(self, strides: Mapping[str, sympy.Expr]) -> str:
        terms = []
        for axis in self.plan.axes:
            if axis.name in strides:
                stride = index_expression(strides[axis.name])
                index = self.index(axis.name)
                terms.append(index if stride == "1" else f"{index} * {factor(stride)}")
        return " + ".join(terms) or "0"

    def address(self, access: Access, without: Iterable[str] = ()) -> str:
        """Where a tensor's element is, or the first one along some axes."""
        left = {a: step for a, step in access.strides.items() if a not in set(without)}
        return f"p_{access.buffer.name} + {self.offset(left)}".removesuffix(" + 0")

    def unravel(self, axes: Sequence[LoopAxis], index: str) -> None:
        """The index along each of several axes, of which the last counts fastest."""
        for k, axis in enumerate(axes):
            text = index
            if after := axes[k + 1 :]:
                text += f" / {_divisor(product(each.extent for each in after))}"
            if k:
                text += f" % {_divisor(axis.extent)}"
            if text != self.index(axis.name):
                self.line(f"const int64_t {self.index(axis.name)} = {text};")

    # -- parameters

    @property
    def kernel(self) -> Kernel:
        """What was printed."""
        names = tuple(name for name, _ in self.parameters())
        return Kernel(self.kernel_name, self.launch, self.number, names)

    def parameters(self) -> list[tuple[str, str]]:
        """Name and type of each parameter: of all there could be, those that the text uses."""
        used = set(re.findall(r"\w+", "\n".join(self.lines)))
        return [(name, kind) for name, kind in self.known() if name in used]

    def known(self) -> list[tuple[str, str]]:
        """All that a kernel can be given."""
        found = [(f"p_{b.name}", f"const {TYPES[b.dtype].cpp}*") for b in self.region.inputs]
        outputs = [output.buffer for output in self.region.outputs]
        found += [(f"p_{b.name}", f"{TYPES[b.dtype].cpp}*") for b in outputs]
        values = [op.name for op in self.region.ops]
        found += [(f"{kind}_{value}", "scalar*") for kind in ("parts", "kept") for value in values]
        found += [(f"n_{name}", "int64_t") for name in self.region.runtime_sizes]
        return [*found, (SHARES, "int64_t"), *((f"n_parts_{v}", "int64_t") for v in values)]

    def head(self) -> list[str]:
        """The function's first lines."""
        team = self.team
        cluster = f" CLUSTER({team.blocks})" if team.blocks > 1 else ""
        bounds = f"__launch_bounds__({team.threads}, {self.launch.blocks.programs})"
        text = ", ".join(f"{kind} {name}" for name, kind in self.parameters())
        return [
            f'extern "C" __global__{cluster} void {bounds}',
            f"{self.kernel_name}(",
            *textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    "),
            ") {",
        ]

    # -- values of no axes, and arrays in memory

    def number_at(self, name: str, address: str) -> str:
        """A tensor's element as a number or a truth value."""
        return f"get<{'bool' if name in self.truth else 'scalar'}>({address})"

    def kept(self, value: str) -> str:
        """The address of a value's element in the array that crosses launches."""
        offset = self.offset(self.plan.array_strides(self.varies[value]))
        return f"kept_{value} + {offset}".removesuffix(" + 0")

    def recall(self, value: str, axes: tuple[str, ...]) -> None:
        text = f"*({self.kept(value)})"
        self.define(value, f"mask_of({text})" if value in self.truth else text)

    def scalars(self) -> None:
        """What a launch needs of no axes."""
        for leaf in self.launch.scalars:
            match leaf:
                case Load(access):
                    name = access.buffer.name
                    self.define(name, self.number_at(name, self.address(access)))
                case Recall(value, axes, _):
                    self.recall(value, axes)
                case _:
                    self.compute(leaf.op)  # type: ignore[union-attr]

    def part(self, accumulator: Accumulator, index: str) -> str:
        """Where an accumulator's elements begin in one of several parts."""
        size = product(self.plan.axis[axis].extent for axis in accumulator.axes)
        text = index_expression(size)
        index = index if text == "1" else f"{factor(index)} * {factor(text)}"
        return f"parts_{accumulator.op.name} + {index}"


def _divisor(size: sympy.Expr) -> str:
    """A size as what is divided by."""
    text = index_expression(size)
    return f"({text})" if " " in text else text
