"""From graph nodes and their domain to a region: what it reads and writes here, and what the nodes
compute in values.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from normpass.passes.axis_names import locally_reduced, name_axes
from normpass.passes.buffers import Buffers
from normpass.passes.domain import extent_of
from normpass.passes.escapes import outputs_of
from normpass.passes.one_hot import INTEGERS, are_positions, holds_integers, is_iota
from normpass.passes.pieces import Cut, Pieces, joined_axes, parts_of, pieces_in, values_of
from normpass.passes.region import Arg, Axis, Buffer, Join, Output, Region, verify
from normpass.passes.value_names import with_names
from normpass.passes.values import NotLowered, Values
from normpass.passes.vocabulary import (
    CONSTANTS,
    DTYPES,
    QUANTIZED,
    Kind,
    kind_of,
)
from normpass.passes.writer import OpWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import sympy
    from torch.fx import Node

    from normpass.passes.domain import Dims, Domain


NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Lowered:
    """A region and the nodes it stands for.

    inputs, outputs: nodes, in the order of the region's; an input of another dtype is converted.
    sizes: the expressions of its run-time sizes, in order.
    repeated: (node, output) for nodes whose result is that of an output.
    has_one_hot_sum: whether what is zero but at one position was summed without adding up. parts:
    those of inputs that are parts of other nodes, and these.
    """

    region: Region
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    sizes: tuple[sympy.Expr, ...]
    repeated: tuple[tuple[Node, Node], ...] = ()
    has_one_hot_sum: bool = False
    parts: Mapping[Node, Node] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Where its tensors lie: "cpu", "cuda", ..."""
        kind: str = self.inputs[0].meta["val"].device.type
        return kind


def lower(
    name: str,
    nodes: Sequence[Node],
    domain: Domain,
    cuts: Mapping[Node, Sequence[Cut]] = NOTHING,
    *,
    rounded: bool = False,
) -> Lowered:
    """The region of these nodes, given in the graph's order.

    cuts: the parts of what it reads in pieces. rounded: whether results in half precision are
    rounded where they arise, as in eager mode, or only where they are stored.

    Raises:
        NotLowered: with the reason.
    """
    return _Lowering(name, nodes, domain, cuts, rounded=rounded).run()


class _Lowering:
    def __init__(
        self,
        name: str,
        nodes: Sequence[Node],
        domain: Domain,
        cuts: Mapping[Node, Sequence[Cut]],
        *,
        rounded: bool,
    ) -> None:
        self.name = name
        self.nodes = nodes
        self.inside = set(nodes)
        self.domain = domain
        self.cuts = cuts
        self.joins: list[Join] = []
        self.axis_names = name_axes(nodes, domain)
        self.buffers = Buffers(domain, self.axis_names)
        self.local = locally_reduced(nodes, domain)
        self.writer = OpWriter(domain, self.axis_names)
        self.values = Values(domain, self.writer, self.inside, rounded=rounded)

    def run(self) -> Lowered:
        inputs = [read for node in self.outside_tensors() for read in self.input(node)]
        for node in self.nodes:
            self.values.add(node)
        outputs = outputs_of(self.nodes)
        if not outputs:
            raise NotLowered("nothing outside needs its results")
        outputs, repeated = self.distinct([self.as_read(node) for node in outputs])
        results: list[Output] = []
        for node in outputs:
            results += self.output(len(results), node)
        axes = tuple(
            Axis(name, int(extent) if extent.is_Integer else None)
            for axis, name in self.axis_names.items()
            for extent in [self.domain.extent(axis)]
        )
        dynamic = [
            self.domain.extent(axis)
            for axis in self.axis_names
            if not self.domain.extent(axis).is_Integer
        ]
        ops = self.writer.live(results)
        # What is computed again outside may have been all that read an input.
        read = {arg for op in ops for arg in op.args} | {output.value for output in results}
        inputs = [(node, buffer) for node, buffer in inputs if buffer.name in read]
        region = Region(
            self.name,
            axes,
            tuple(buffer for _, buffer in inputs),
            ops,
            tuple(results),
            tuple(self.buffers.sizes.values()),
            tuple(self.joins),
        )
        verify(region)
        self.check_precision(region)
        sizes = (*dynamic, *self.buffers.sizes)
        return Lowered(
            with_names(region),
            tuple(node for node, _ in inputs),
            tuple(outputs),
            sizes,
            tuple(repeated),
            self.writer.has_one_hot_sum,
            {cut.node: x for x, cuts in self.cuts.items() for cut in cuts},
        )

    def as_read(self, node: Node) -> Node:
        """The view through which alone a result is read, if it splits a dimension of the result's:
        only so can the parts lie apart (n and c of an instance norm's [1, n c, h w]).
        """
        seen = node
        if self.domain.joined_dim(node) is not None:
            return node
        while len(seen.users) == 1 and (user := next(iter(seen.users))) in self.inside:
            if kind_of(user) is not Kind.VIEW or not self.has_same_elements(user, seen):
                break
            seen = user
        return seen if self.longest_dim(seen) < self.longest_dim(node) else node

    def longest_dim(self, node: Node) -> int:
        """The most axes that a dimension of a node is made of."""
        return max((len(self.domain.resolve(dim)) for dim in self.domain.dims[node]), default=0)

    def has_same_elements(self, view: Node, source: Node) -> bool:
        axes = (set(self.domain.axes(node)) for node in (view, source))
        return next(axes) == next(axes)

    def distinct(self, outputs: Sequence[Node]) -> tuple[list[Node], list[tuple[Node, Node]]]:
        """Outputs that differ, and those that repeat one (the same value, dtype and layout). What a
        graph returns stays apart: its callers may write into each result.
        """
        first: dict[tuple[Any, ...], Node] = {}
        repeated: list[tuple[Node, Node]] = []
        for node in outputs:
            tensor = node.meta["val"]
            layout = tuple(extent_of(size) for size in (*tensor.shape, *tensor.stride()))
            key = (self.values.of[node], tensor.dtype, layout)
            returned = any(user.op == "output" for user in node.users)
            if key in first and not returned:
                repeated.append((node, first[key]))
            else:
                first.setdefault((*key, node) if key in first else key, node)
        return list(first.values()), repeated

    def check_precision(self, region: Region) -> None:
        """A region computes in float64 only where one of its tensors is float64."""
        if region.compute_dtype is torch.float64:
            return
        for node in self.nodes:
            value = node.meta["val"]
            tensors = value if isinstance(value, tuple | list) else (value,)
            if node.target not in CONSTANTS and tensors[0].dtype is torch.float64:
                reason = f"{node.name} is float64 among tensors of less precision"
                raise NotLowered(reason, node)

    # ---- tensors

    def outside_tensors(self) -> list[Node]:
        """Tensors from outside, in the order in which they are first used."""
        found: dict[Node, None] = {}
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if arg not in self.inside and isinstance(arg.meta.get("val"), torch.Tensor):
                    found[arg] = None
        return list(found)

    def check_type(self, node: Node, dtypes: AbstractSet[torch.dtype] = DTYPES) -> None:
        dtype = node.meta["val"].dtype
        if dtype not in dtypes:
            reason = f"{node.name} is {dtype}; regions hold floats, truth values and bytes"
            raise NotLowered(reason, node)

    def input(self, x: Node) -> list[tuple[Node, Buffer]]:
        """What is read of a tensor: itself, or a part for each of its pieces."""
        self.check_type(x, DTYPES | INTEGERS)
        cuts = self.cuts.get(x, ())
        whole = [] if cuts else [self.read(x, x, self.domain.dims[x])]
        read = [self.read(x, cut.node, cut.dims) for cut in cuts] or whole
        names = tuple(buffer.name for _, buffer in read)
        self.values.of[x] = Pieces(names) if cuts else names[0]
        if cuts and holds_integers(x):
            raise NotLowered(f"{x.name} is cut, and holds integers", x)
        return read

    def read(self, x: Node, node: Node, dims: Dims) -> tuple[Node, Buffer]:
        axes = set(self.domain.axes_of(dims))
        if holds_integers(x):
            stem = "i"
        elif "tangents" in x.name:
            stem = "g"
        elif axes and not axes & self.local:
            stem = "s"  # a statistic: one number a row
        elif axes and axes <= self.local:
            stem = "w"  # a weight
        else:
            stem = "x"
        tensor = node.meta["val"]
        varies = (
            axis
            for dim, stride in zip(dims, tensor.stride(), strict=True)
            if stride != 0
            for axis in self.domain.resolve(dim)
        )
        name = self.writer.input(stem, varies)
        buffer = self.buffers.buffer(name, tensor, dims)
        if are_positions(x):
            self.writer.positions.add(name)
            if is_iota(x):  # half as long to read, for every row
                buffer = replace(buffer, dtype=torch.int32)
        return node, buffer

    def output(self, k: int, node: Node) -> list[Output]:
        """A result, or a part of it for each of its pieces. k: how many outputs there are so
        far.
        """
        self.check_type(node)
        tensor, dims, dim = node.meta["val"], self.domain.dims[node], self.domain.joined_dim(node)
        if dim is None:
            buffer = self.buffers.buffer(f"y{k}", tensor, dims)
            return [self.written(node, self.values.value(node), buffer)]
        parts = parts_of(joined_axes(node, self.domain), self.domain)
        if parts is None:
            raise NotLowered(f"{node.name} has other axes in the dimension of its pieces", node)
        count = len(parts.axes)
        values = values_of(self.values.of[node], count)  # type: ignore[arg-type]
        steps = list(tensor.stride())
        steps[dim] *= count if parts.in_turn else 1
        buffers = [
            self.buffers.piece(f"y{k + n}", tensor.dtype, pieces_in(dims, dim, axes), steps)
            for n, axes in enumerate(parts.axes)
        ]
        self.joins.append(Join(tuple(buffer.name for buffer in buffers), dim, parts.in_turn))
        return [self.written(node, *each) for each in zip(values, buffers, strict=True)]

    def written(self, node: Node, value: Arg, buffer: Buffer) -> Output:
        if not isinstance(value, str):
            raise NotLowered(f"{node.name} is the constant {value}", node)
        op = self.writer.written(value)
        if op and op.fn == QUANTIZED.get(buffer.dtype):  # which it is when it is written
            value = str(op.args[0])
        return Output(buffer, value)
