"""Random regions and tensors for them, for hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from bounded import ARITY, FUNCTION_NAMES
from hypothesis import assume
from hypothesis import strategies as st

from normpass.passes.region import Axis, Buffer, Op, Output, Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hypothesis.strategies import DrawFn
    from numpy.typing import NDArray

    from normpass.passes.region import Arg, Stride

    Array = NDArray[np.longdouble]

AXES = "rqcd"
EXTENTS: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (3,), (16,), (17,), (100,), (1025,)],
    2: [(7, 5), (3, 17), (33, 16), (130, 31), (2, 1), (1, 67), (9, 4099), (256, 3)],
    3: [(3, 5, 7), (2, 17, 3), (8, 1, 19), (5, 16, 33), (19, 3, 2)],
    4: [(2, 3, 5, 7), (3, 2, 4, 17), (5, 9, 2, 3), (2, 2, 16, 5)],
}
GROUPED = [(2, 3, 2, 5), (9, 4, 3, 7), (1, 2, 9, 40), (3, 17, 2, 3)]
BESIDE = [(3, 4, 5, 4), (2, 8, 19, 8), (1, 6, 40, 12), (5, 2, 3, 16), (4, 12, 7, 10), (9, 3, 33, 2)]
SEGMENTED = [(5, 2, 3, 32), (40, 1, 5, 36), (3, 11, 2, 68), (33, 2, 9, 4), (2, 3, 4, 260)]
COLUMNED = [
    (3, 33, 32),
    (1, 5, 64),
    (2, 64, 16),
    (1, 130, 48),
    (2, 7, 8),
    (2, 3, 9, 32),
    (1, 17, 4, 16),
]
ROWED = [(9, 64), (40, 160), (3, 5, 96), (33, 32), (2, 66, 16), (7, 2064)]
DTYPES = [
    *[torch.float32] * 3,
    *(torch.bfloat16, torch.float16, torch.bool, torch.int32, torch.int64),
]
CONSTANTS = [0.0, 1.0, -0.5, 2.0, 0.3]

Step = tuple[int, tuple[str, ...]]  # a stride: a number times the extents of axes


@dataclass(frozen=True)
class Case:
    """A region, the extents to run it with, what its run-time strides are, and a seed for its
    inputs.
    """

    region: Region
    extents: tuple[dict[str, int], ...]
    steps: dict[str, Step]
    seed: int
    special: bool  # NaN and infinities among the inputs

    def sizes(self, extents: Mapping[str, int]) -> list[int]:
        return [
            extents[name] if name in extents else length(self.steps[name], extents)
            for name in self.region.runtime_sizes
        ]


def length(step: Step, extents: Mapping[str, int]) -> int:
    return step[0] * int(np.prod([max(extents[axis], 1) for axis in step[1]], dtype=np.int64))


# ---- strategy


class _Builder:
    """Draws one region, from its axes to its outputs."""

    def __init__(self, draw: DrawFn) -> None:
        self.draw = draw
        extents = self.draw_extents()
        self.axes = tuple(map(self.axis, AXES, extents))
        self.extents = dict(zip(AXES, extents, strict=False))
        self.steps: dict[str, Step] = {}
        self.double = draw(st.integers(0, 5)) == 0
        self.varies: dict[str, frozenset[str]] = {}
        self.truth: set[str] = set()

    def axis(self, name: str, extent: int) -> Axis:
        return Axis(name, None if self.draw(st.integers(0, 2)) == 0 else extent)

    def draw_extents(self) -> tuple[int, ...]:
        rank = self.draw(st.integers(1, 4))
        return self.draw(st.sampled_from(EXTENTS[rank]))

    def stride(self, step: Step) -> Stride:
        dynamic = {axis.name for axis in self.axes if axis.extent is None}
        if not dynamic.intersection(step[1]):
            return length(step, self.extents)
        for name, known in self.steps.items():
            if known == step:
                return name
        name = f"t{len(self.steps)}"
        self.steps[name] = step
        return name

    def layout(self, names: Sequence[str], *, output: bool) -> tuple[tuple[str, ...], ...]:
        """Dimensions: the axes in some order, some of them joined, and now and then one of size
        one.
        """
        draw = self.draw
        order = draw(st.permutations(names)) if draw(st.booleans()) else list(names)
        dims: list[tuple[str, ...]] = []
        for axis in order:
            if dims and dims[-1] and draw(st.integers(0, 4)) == 0:
                dims[-1] = (*dims[-1], axis)
            else:
                dims.append((axis,))
        if draw(st.integers(0, 4)) == 0:
            dims.insert(draw(st.integers(0, len(dims))), ())
        return tuple(dims)

    def strides(
        self, dims: tuple[tuple[str, ...], ...], *, output: bool
    ) -> tuple[Stride, ...] | None:
        draw = self.draw
        kind = draw(st.sampled_from(["contiguous", "contiguous", "permuted", "gaps", "expanded"]))
        if kind == "contiguous" or (kind == "expanded" and output):
            return None
        order = list(range(len(dims)))
        if kind == "permuted":
            order = draw(st.permutations(order))
        step: Step = (draw(st.integers(2, 3)) if kind == "gaps" else 1, ())
        strides: list[Stride] = [0] * len(dims)
        for k in reversed(order):
            if kind == "expanded" and draw(st.booleans()):
                continue
            strides[k] = self.stride(step)
            step = (step[0], (*step[1], *dims[k]))
        return tuple(strides)

    def some(self, names: Sequence[str]) -> list[str]:
        """A random part of some axes, all of them most often."""
        if self.draw(st.integers(0, 2)):
            return list(names)
        return [name for name in names if self.draw(st.booleans())]

    def input(self, k: int) -> Buffer:
        dims = self.layout(
            [a.name for a in self.axes] if k == 0 else self.some([a.name for a in self.axes]),
            output=False,
        )
        dtypes = [torch.float64, *DTYPES] if self.double else DTYPES
        dtype = self.draw(st.sampled_from(dtypes)) if k else dtypes[0]
        buffer = Buffer(f"x{k}", dtype, dims, self.strides(dims, output=False))
        self.varies[buffer.name] = buffer.axes
        if dtype is torch.bool:
            self.truth.add(buffer.name)
        return buffer

    def argument(self, *, constant: bool) -> Arg:
        if constant and self.draw(st.integers(0, 3)) == 0:
            return self.draw(st.sampled_from(CONSTANTS))
        names = list(self.varies)
        recent = names[-3:] if self.draw(st.booleans()) else names
        return self.draw(st.sampled_from(recent))

    def ops(self) -> tuple[Op, ...]:
        return tuple(self.op(k) for k in range(self.draw(st.integers(2, 9))))

    def op(self, k: int) -> Op:
        draw, name = self.draw, f"v{k}"
        if draw(st.integers(0, 2)) == 0:
            candidates = [value for value, axes in self.varies.items() if axes]
            if candidates:
                value = draw(st.sampled_from(candidates))
                inside = [axis for axis in AXES if axis in self.varies[value]]
                axes = self.reduced(inside)
                if axes:
                    fn = draw(st.sampled_from(["sum", "sum", "sum", "amax", "amin", "prod"]))
                    self.varies[name] = self.varies[value] - set(axes)
                    return Op(name, fn, (value,), tuple(axes))
        fn = draw(st.sampled_from(FUNCTION_NAMES))
        if fn == "numel":
            counted = tuple(axis.name for axis in self.axes if draw(st.booleans()))
            fn = fn if counted else "neg"
            if counted:
                self.varies[name] = frozenset()
                return Op(name, "numel", (), counted)
        args = tuple(self.argument(constant=i > 0) for i in range(ARITY.get(fn, 1)))
        if fn == "pow":
            args = (args[0], draw(st.sampled_from([1.5, -0.7, 3.0])))
        self.varies[name] = frozenset().union(
            *(self.varies[arg] for arg in args if isinstance(arg, str))
        )
        return Op(name, fn, args)

    def reduced(self, inside: Sequence[str]) -> list[str]:
        """The axes of a reduction."""
        if self.draw(st.booleans()):
            return self.some(inside)
        return [self.draw(st.sampled_from(inside))]

    def output(self, k: int, value: str) -> Output:
        names = [a.name for a in self.axes if a.name in self.varies[value]]
        if self.draw(st.integers(0, 6)) == 0:
            names = [a.name for a in self.axes]
        dims = self.layout(names, output=True)
        floats = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.bool]
        dtype = self.draw(st.sampled_from([torch.float64] if self.double else floats))
        return Output(Buffer(f"y{k}", dtype, dims, self.strides(dims, output=True)), value)


class _Grouped(_Builder):
    """Groups q of a few members c, innermost in memory below rows r and pixels d, as group norm has
    them in channels_last.
    """

    def draw_extents(self) -> tuple[int, ...]:
        return self.draw(st.sampled_from(GROUPED))

    def layout(self, names: Sequence[str], *, output: bool) -> tuple[tuple[str, ...], ...]:
        if "c" in names and "q" not in names and not output:
            names = [*names, "q"]
        return tuple((axis,) for axis in "rdqc" if axis in names)

    def strides(
        self, dims: tuple[tuple[str, ...], ...], *, output: bool
    ) -> tuple[Stride, ...] | None:
        return None

    def reduced(self, inside: Sequence[str]) -> list[str]:
        axes = self.draw(st.sampled_from(["cd", "cd", "c", "d", "rd", "r"]))
        return [axis for axis in axes if axis in inside]


class _Beside(_Grouped):
    """The same of known lengths, but for the rows: most sums are over whole groups."""

    def draw_extents(self) -> tuple[int, ...]:
        return self.draw(st.sampled_from(BESIDE))

    def axis(self, name: str, extent: int) -> Axis:
        return super().axis(name, extent) if name == "r" else Axis(name, extent)

    def reduced(self, inside: Sequence[str]) -> list[str]:
        axes = self.draw(st.sampled_from(["cd", "cd", "d", "d", "c", "r", "rd", "rcd"]))
        return [axis for axis in axes if axis in inside]


class _Segmented(_Builder):
    """Rows along two axes, c and d, of known lengths, as channels of images are: most sums are over
    d alone, or over both, and then over rows.
    """

    def draw_extents(self) -> tuple[int, ...]:
        return self.draw(st.sampled_from(SEGMENTED))

    def axis(self, name: str, extent: int) -> Axis:
        return super().axis(name, extent) if name == "r" else Axis(name, extent)

    def layout(self, names: Sequence[str], *, output: bool) -> tuple[tuple[str, ...], ...]:
        return tuple((axis,) for axis in AXES if axis in names)

    def strides(
        self, dims: tuple[tuple[str, ...], ...], *, output: bool
    ) -> tuple[Stride, ...] | None:
        return None

    def reduced(self, inside: Sequence[str]) -> list[str]:
        axes = self.draw(st.sampled_from(["d", "cd", "c", "cd", "r", "rd", "rc", "rcd"]))
        return [axis for axis in axes if axis in inside]


class _Columned(_Segmented):
    """Columns along the last axis, of rows whose number is known: most sums are over those."""

    def draw_extents(self) -> tuple[int, ...]:
        return self.draw(st.sampled_from(COLUMNED))

    def reduced(self, inside: Sequence[str]) -> list[str]:
        rows = AXES[1 : len(self.axes) - 1]
        axes = self.draw(st.sampled_from([rows, rows, rows[0], rows[-1], "r", f"r{rows}"]))
        return [axis for axis in inside if axis in axes]


class _Rowed(_Segmented):
    """Rows of whole vectors along the last axis, of which most sums are."""

    def draw_extents(self) -> tuple[int, ...]:
        return self.draw(st.sampled_from(ROWED))

    def reduced(self, inside: Sequence[str]) -> list[str]:
        last = AXES[len(self.axes) - 1]
        axes = self.draw(st.sampled_from([last, last, "r", "rq"]))
        return [axis for axis in inside if axis in axes]


class _Chained(_Builder):
    """With a variance or a sum of exponentials in the middle: reductions that need another."""

    def ops(self) -> tuple[Op, ...]:
        draw = self.draw
        before = [self.op(k) for k in range(draw(st.integers(0, 2)))]
        candidates = [value for value, axes in self.varies.items() if axes]
        assume(candidates)  # not all are single numbers
        value = draw(st.sampled_from(candidates))
        axes = tuple(self.reduced([axis for axis in AXES if axis in self.varies[value]]))
        chain: list[Op] = []
        if axes and draw(st.booleans()):
            chain = [
                Op("first", "sum", (value,), axes),
                Op("mean", "mul", ("first", draw(st.sampled_from([0.1, 0.003])))),
                Op("less", "sub", (value, "mean")),
                Op("square", "mul", ("less", "less")),
                Op("second", "sum", ("square",), axes),
            ]
        elif axes:
            chain = [
                Op("first", "amax", (value,), axes),
                Op("less", "sub", (value, "first")),
                Op("exp", "exp", ("less",)),
                Op("second", "sum", ("exp",), axes),
            ]
        for op in chain:
            left = self.varies[value] - set(axes)
            inner = op.fn in ("exp", "sub") or op.name == "square"
            self.varies[op.name] = self.varies[value] if inner else left
        after = range(len(before), len(before) + draw(st.integers(1, 4)))
        return (*before, *chain, *(self.op(k) for k in after))


@st.composite
def cases(draw: DrawFn, builders: type[_Builder] = _Builder) -> Case:
    builder = builders(draw)
    inputs = tuple(builder.input(k) for k in range(draw(st.integers(1, 4))))
    ops = builder.ops()
    last = ops[-1].name
    others = [op.name for op in ops[:-1]]
    chosen = [last, *draw(st.lists(st.sampled_from(others), max_size=2, unique=True))]
    outputs = tuple(builder.output(k, value) for k, value in enumerate(chosen))
    sizes = tuple(builder.steps)
    region = Region("random", builder.axes, inputs, ops, outputs, sizes)
    runs = [builder.extents]
    dynamic = [axis.name for axis in region.axes if axis.extent is None]
    if dynamic:
        # An extremum of nothing is an error; an expanded tensor may hold an element even if its
        # extent is zero.
        expanded = any(0 in (buffer.strides or ()) for buffer in inputs)
        least = 1 if expanded or any(op.fn in ("amax", "amin") for op in ops) else 0
        for more in (st.integers(least, 3), st.integers(4, 40)):
            runs.append(builder.extents | {name: draw(more) for name in dynamic})
    return Case(
        region, tuple(runs), builder.steps, draw(st.integers(0, 99)), draw(st.integers(0, 3)) == 0
    )


def grouped_cases() -> st.SearchStrategy[Case]:
    return cases(_Grouped)


def beside_cases() -> st.SearchStrategy[Case]:
    return cases(_Beside)


def segmented_cases() -> st.SearchStrategy[Case]:
    return cases(_Segmented)


def columned_cases() -> st.SearchStrategy[Case]:
    return cases(_Columned)


def rowed_cases() -> st.SearchStrategy[Case]:
    return cases(_Rowed)


def chained_cases() -> st.SearchStrategy[Case]:
    return cases(_Chained)


# ---- tensors


def tensors(case: Case, extents: Mapping[str, int]) -> list[torch.Tensor]:
    """Inputs as the region's text describes them."""
    generator = torch.Generator().manual_seed(case.seed)
    region = case.region
    known = region.extents(case.sizes(extents))
    made = []
    for buffer in region.inputs:
        shape, strides = region.shape(buffer, known), region.strides(buffer, known)
        whole = [1 if step == 0 else n for n, step in zip(shape, strides, strict=True)]
        values = torch.randn(whole, generator=generator, dtype=torch.float64) * 1.5
        values = (values > 0 if buffer.dtype is torch.bool else values).to(buffer.dtype)
        if case.special and buffer.dtype.is_floating_point and values.numel() > 2:
            flat = values.view(-1)
            flat[generator.seed() % len(flat)] = torch.inf
            generator.manual_seed(case.seed + 1)
            flat[case.seed % len(flat)] = torch.nan
        reach = 1 + sum((n - 1) * step for n, step in zip(whole, strides, strict=True))
        base = torch.empty(max(reach, 1), dtype=buffer.dtype)
        made.append(base.as_strided(whole, strides).copy_(values).expand(shape))
    return made
