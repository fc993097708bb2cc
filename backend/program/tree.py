"""The plan as data: a tree of loops whose leaves load, compute, accumulate and store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import sympy

from normpass.backend.program.sizes import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from normpass.backend.program.team import Team
    from normpass.passes.region import Buffer, Op, Output, Region


@dataclass(frozen=True)
class LoopAxis:
    """An axis of the plan: one of the region's, or several of them that are one in memory, or its
    blocks. most: what its extent is at most; None if that is not known. multiple: what divides it.
    outermost: whether workers are to divide it although sums run over it. blocks: the axis over the
    blocks that this one is the inside of.
    """

    name: str
    extent: sympy.Expr
    parts: tuple[str, ...]
    most: int | None
    multiple: int
    outermost: bool = False
    blocks: str | None = None

    @property
    def hint(self) -> int:
        """The extent, or an expected one, for decisions."""
        return Sizes().expected(self.extent) if self.most is None else self.most


@dataclass(frozen=True)
class Access:
    """How a tensor is addressed: elements between neighbours along each axis of the plan. sizes:
    what is known of them.
    """

    buffer: Buffer
    strides: Mapping[str, sympy.Expr]
    sizes: Sizes = field(default_factory=Sizes)

    def step(self, axis: str) -> int:
        """Elements between neighbours along an axis, for decisions; 0 if it does not vary."""
        return self.sizes.expected(self.strides.get(axis, 0))


@dataclass(frozen=True)
class Accumulator:
    """What a reduction adds up in. `axes` is empty for a register.

    shared: the loop it closes at is the parallel one, so each worker needs its own and the results
    are combined afterwards. unrolled: several registers take turns. long: so much is added up that
    digits would be lost in one go: every so often what there is goes on top of what was before.
    """

    op: Op
    axes: tuple[str, ...]
    shared: bool
    unrolled: bool = False
    long: bool = False

    @property
    def operand(self) -> str:
        """The value that is added up."""
        return str(self.op.args[0])


@dataclass(frozen=True)
class Workspace:
    """An array in memory with one element of a value for each along some axes. each: whether every
    worker, or program of a GPU, has one of its own. rows: whether each of the rows that go together
    has. sums: what is added up there.
    """

    value: str
    axes: tuple[str, ...]
    each: bool
    rows: bool = False
    sums: Accumulator | None = None

    @property
    def is_shared_sum(self) -> bool:
        """Whether what workers have added up there is combined afterwards."""
        return self.sums is not None and self.sums.shared


@dataclass(frozen=True)
class Ahead:
    """How far ahead memory is asked for: so many elements, or that many vectors' lanes."""

    elements: sympy.Expr
    lanes: bool = False


@dataclass(frozen=True)
class Load:
    """value = tensor[...]. ahead: what else is asked for."""

    access: Access
    ahead: Ahead | None = None


@dataclass(frozen=True)
class Compute:
    """value = fn(args), pointwise."""

    op: Op


@dataclass(frozen=True)
class Begin:
    """Sets an accumulator to its neutral element."""

    accumulator: Accumulator


@dataclass(frozen=True)
class Accumulate:
    """Adds a value to an accumulator."""

    accumulator: Accumulator


@dataclass(frozen=True)
class Finish:
    """Makes an accumulator's content a value: combines lanes, and workers where it is shared."""

    accumulator: Accumulator


@dataclass(frozen=True)
class Keep:
    """Writes a value to a worker's own array, for a later phase."""

    value: str
    axes: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Recall:
    """Reads a value back from an array: a kept one, or an accumulated one."""

    value: str
    axes: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Regroup:
    """value = array[...], of another value, by other axes of the same elements."""

    op: Op
    array: Recall


@dataclass(frozen=True)
class Store:
    """tensor[...] = value. apart: whether other places are written between two vectors of lanes
    that are neighbours in memory.
    """

    output: Output
    access: Access
    apart: bool = False


@dataclass(frozen=True)
class Allocate:
    """Memory for an array, for what follows."""

    workspace: Workspace


@dataclass(frozen=True)
class Lanes:
    """A vector at a time. unrolled: several vectors, each with registers of its own. aligned: the
    row that is written in vectors that begin where memory is aligned.
    """

    unrolled: bool = False
    aligned: Access | None = None


@dataclass(frozen=True)
class Jam:
    """So many rows at a time through one body."""

    rows: int


@dataclass(frozen=True)
class Abreast:
    """As many rows at a time as a vector has lanes. Lanes run along each of them in the loops over
    its elements, and along the rows in what stands between these.
    """


@dataclass(frozen=True)
class Staged:
    """Blocks on a GPU: what the next ones read is fetched while one is computed."""


Kind = Lanes | Jam | Abreast | Staged


@dataclass(frozen=True)
class Together:
    """Rows along an axis that go together, and how."""

    axis: str
    kind: Jam | Abreast


@dataclass(frozen=True)
class Loop:
    """A loop over one axis. parallel: workers divide it; loops right inside of each other that are
    parallel are divided as if they were one. kind: how it goes; None for one by one. own: at the
    top, the arrays of which every worker has its own.
    """

    axis: LoopAxis
    body: tuple[Node, ...]
    parallel: bool = False
    kind: Kind | None = None
    own: tuple[Workspace, ...] = ()


Leaf = Load | Compute | Begin | Accumulate | Finish | Keep | Recall | Regroup | Store | Allocate
Node = Leaf | Loop


@dataclass(frozen=True)
class Blocks:
    """How many elements a program of a launch works on at a time.

    shares: the outer axes, as one, of which every program takes a contiguous share; the others are
    divided into tiles. size: the block along each axis; that of the shared axes goes by the name
    SHARED. resident: inner axes that one block covers, or several of the same size, one after
    another: pieces has how many of those. again: whether later phases read what they need of such
    an axis again, so that a program holds sums along it alone. parts: partial results that are
    combined at a time. warps: of a program. programs: for each multiprocessor, where rows are
    shared out."""

    shares: tuple[str, ...]
    size: Mapping[str, int]
    resident: frozenset[str]
    parts: int
    warps: int
    programs: int = 1
    pieces: Mapping[str, int] = field(default_factory=dict)
    again: bool = False

    def covered(self, axis: str) -> int:
        """Elements along an axis that a program holds or goes over at a time."""
        return self.size.get(axis, 1) * self.pieces.get(axis, 1)


SHARED = ""


@dataclass(frozen=True)
class Fetch:
    """What a launch's programs fetch ahead. rows: whether the loop over their rows does; those over
    partial results do, and of other loops their kind tells. ahead: bytes that an iteration reads,
    of the loop that reads most.
    beside: bytes of shared memory that a program may need at once for other things, such as to
    reduce a block.
    """

    rows: bool = False
    ahead: int = 0
    beside: int = 0


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel on a GPU.

    outer: the axes that are divided among programs, outermost first.
    body: what happens within them; what stood between their loops comes first.
    scalars: values of no axes that the body needs, in order.
    shared: accumulators whose partial results leave the launch.
    combined: accumulators whose partial results it combines.
    blocks: how programs go through it.
    held: what a program reads once for all of its rows.
    fetch: what it reads ahead.
    workspaces: the arrays in global memory that it writes to.
    team: in CUDA C++, how threads go through it.
    """

    outer: tuple[LoopAxis, ...]
    body: tuple[Node, ...]
    scalars: tuple[Leaf, ...] = ()
    shared: tuple[Accumulator, ...] = ()
    combined: tuple[Accumulator, ...] = ()
    blocks: Blocks = Blocks((), {}, frozenset(), 1, 1)
    held: tuple[Load, ...] = ()
    fetch: Fetch = Fetch()
    workspaces: tuple[Workspace, ...] = ()
    team: Team | None = None

    @property
    def inner(self) -> tuple[LoopAxis, ...]:
        """The axes that each program loops over or holds in blocks."""
        loops = [node.axis for node in walk(*self.body) if isinstance(node, Loop)]
        return tuple(dict.fromkeys(loops))

    def streamed(self, axes: Iterable[str]) -> list[str]:
        """Those axes of which a program sees a block at a time."""
        inner = {axis.name for axis in self.inner}
        return [axis for axis in axes if axis in inner and axis not in self.blocks.resident]


@dataclass(frozen=True)
class Plan:
    """What a generator prints.

    region: the region, its reductions split where the loops need it. axes: the loops' axes,
    outermost first. vector: the axis along which lanes run. local: the axes that inner reductions
    reduce; one worker owns them unless the first of `axes` is one. body: the tree. together: the
    rows that go together, if there are such. launches: on GPUs, in order.
    """

    region: Region
    axes: tuple[LoopAxis, ...]
    vector: str
    local: frozenset[str]
    body: tuple[Node, ...]
    numel: Mapping[str, sympy.Expr] = field(default_factory=dict)
    together: Together | None = None
    launches: tuple[Launch, ...] = ()

    @property
    def axis(self) -> dict[str, LoopAxis]:
        return {axis.name: axis for axis in self.axes}

    def array_strides(self, axes: Iterable[str]) -> dict[str, sympy.Expr]:
        """An array lies in loop order, except that lanes are innermost."""
        strides: dict[str, sympy.Expr] = {}
        step: sympy.Expr = sympy.Integer(1)
        order = [axis.name for axis in reversed(self.axes) if axis.name in set(axes)]
        for axis in sorted(order, key=lambda axis: axis != self.vector):
            strides[axis] = step
            step = step * self.axis[axis].extent
        return strides


def rewritten(nodes: Sequence[Node], change: Callable[[Node], Node]) -> tuple[Node, ...]:
    """A tree with every node changed, what is in a loop before the loop."""
    return tuple(
        change(replace(node, body=rewritten(node.body, change)) if isinstance(node, Loop) else node)
        for node in nodes
    )


def walk(*nodes: Node) -> Iterator[Node]:
    """Nodes and all nodes below them, parents first."""
    for node in nodes:
        yield node
        if isinstance(node, Loop):
            yield from walk(*node.body)


def definition(node: Node) -> str | None:
    """The value that a node defines."""
    match node:
        case Load(access):
            return access.buffer.name
        case Compute(op) | Regroup(op, _):
            return op.name
        case Finish(accumulator):
            return accumulator.op.name
        case Recall(value, _, _):
            return value
    return None


def uses(node: Node) -> list[str]:
    """The values that a node itself needs."""
    match node:
        case Compute(op):
            return [arg for arg in op.args if isinstance(arg, str)]
        case Accumulate(accumulator):
            return [accumulator.operand]
        case Keep(value, _, _):
            return [value]
        case Store(output, _):
            return [output.value]
    return []
