"""The plan as data: a tree of loops whose leaves load, compute, accumulate and store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normpass.passes.region import Buffer, Op, Output, Region, product
from normpass.passes.sizes import expected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import sympy


@dataclass(frozen=True)
class LoopAxis:
    """An axis of the plan: one of the region's, or several of them that are one in memory."""

    name: str
    extent: sympy.Expr
    parts: tuple[str, ...]

    @property
    def hint(self) -> int:
        """The extent, or an assumed one, for decisions."""
        return expected(self.extent)


@dataclass(frozen=True)
class Access:
    """How a tensor is addressed: elements between neighbours along each axis of the plan."""

    buffer: Buffer
    strides: Mapping[str, sympy.Expr]


@dataclass(frozen=True)
class Accumulator:
    """What a reduction adds up in. `axes` is empty for a register.

    shared: the loop it closes at is the parallel one, so each worker needs its own and the results
    are combined afterwards.
    """

    op: Op
    axes: tuple[str, ...]
    shared: bool


@dataclass(frozen=True)
class Load:
    """value = tensor[...]"""

    access: Access


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
    """tensor[...] = value"""

    output: Output
    access: Access


@dataclass(frozen=True)
class Loop:
    """A loop over one axis."""

    axis: LoopAxis
    body: tuple[Node, ...]
    parallel: bool = False


Leaf = Load | Compute | Begin | Accumulate | Finish | Keep | Recall | Regroup | Store
Node = Leaf | Loop


@dataclass(frozen=True)
class Plan:
    """What a generator prints.

    region: the region, its reductions split where the loops need it. axes: the loops' axes,
    outermost first. vector: the axis along which lanes run. local: the axes that inner reductions
    reduce; one worker owns them unless the first of `axes` is one. body: the tree.
    """

    region: Region
    axes: tuple[LoopAxis, ...]
    vector: str
    local: frozenset[str]
    body: tuple[Node, ...]
    numel: Mapping[str, sympy.Expr] = field(default_factory=dict)

    @property
    def axis(self) -> dict[str, LoopAxis]:
        return {axis.name: axis for axis in self.axes}

    @property
    def row_elements(self) -> int:
        """Elements that one worker has before it between two phases, by hints."""
        return product(a.hint for a in self.axes if a.name in self.local)


def walk(node: Node) -> Iterator[Node]:
    """A node and all nodes below it."""
    yield node
    if isinstance(node, Loop):
        for child in node.body:
            yield from walk(child)
