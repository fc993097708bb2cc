"""Where the tensors of a region lie: as Inductor lays out its neighbours, so that nothing is copied
before or after it.

A region is first written over the strides that its graph was traced with. Inductor chooses others
for what it computes itself: with mkldnn it makes a whole convolutional network channels_last. Which
these will be is foretold when regions are weighed (`as_expected`), by Inductor's own rule; and when
a region is lowered its inputs have their final strides, which its text then follows (`settled`).

Uses of torch._inductor.graph here (get_user_visible_output_strides; of GraphLowering
decide_layout_opt, find_nodes_prefer_channels_last, nodes_prefer_channels_last and
user_visible_output_strides) were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from normpass.passes.domain import extent_of, shape_of, step_of
from normpass.passes.region import Buffer, Region, Stride, parse, product, verify
from normpass.passes.rewrite import SizeUnknown, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from torch.fx import Graph

    from normpass.passes.lower import Lowered

Strides = tuple[sympy.Expr, ...]

aten = torch.ops.aten
# Their results depend on where their arguments' elements lie.
BY_STRIDE = (
    *(aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default),
    *(aten.resize.default, aten.resize_as.default),
)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Wishes:
    """What Inductor wants of results. channels_last: the nodes it prefers so, if they have four
    dimensions. visible: what the caller of the compiled function sees, with its strides.
    """

    channels_last: Container[Node]
    visible: Mapping[Node, Sequence[Any] | None]

    @classmethod
    def expected(cls, graph: Graph) -> Wishes:
        """Of a graph that is to be lowered."""
        from torch._inductor.graph import GraphLowering, get_user_visible_output_strides

        module: Any = graph.owning_module
        channels_last: Container[Node] = ()
        # Inference differs on GPUs only, and there nothing more than a guess is lost.
        if GraphLowering.decide_layout_opt(module, is_inference=False):
            lowering: Any = SimpleNamespace(module=module)
            channels_last = GraphLowering.find_nodes_prefer_channels_last(lowering)
        return cls(channels_last, get_user_visible_output_strides(graph))

    def of(self, result: Node) -> Strides | None:
        """The strides that a result must have; None if Inductor does not mind."""
        visible = self.visible.get(result)
        if visible is not None:
            return tuple(map(sympy.sympify, visible))
        if any(user.target in BY_STRIDE for user in result.users):
            return traced(result)
        if self.prefers_channels_last(result) and not self.is_only_flattened(result):
            return channels_last(result)
        return traced(result) if any(user.op == "output" for user in result.users) else None

    def is_only_flattened(self, result: Node) -> bool:
        """Whether its dimensions are merged, which would copy channels_last (a matrix product of
        n h w c as rows of c), and nobody wants it in channels_last.
        """
        flattened = [user for user in result.users if _flattens(user)]
        return bool(flattened) and not any(
            user.op == "output" or self.prefers_channels_last(user)
            for user in result.users
            if user not in flattened
        )

    def prefers_channels_last(self, node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.ndim == 4 and node in self.channels_last


def _flattens(node: Node) -> bool:
    return node.target in RESHAPES and node.meta["val"].ndim < 4


def as_expected(graph: Graph) -> Callable[[Lowered], Lowered]:
    """What lays out regions of a graph as its lowering is expected to."""
    wishes = Wishes.expected(graph)
    # Regions that are put into the graph take nodes out of it.
    wishes = replace(
        wishes,
        channels_last={node for node in graph.nodes if wishes.prefers_channels_last(node)},
    )

    def lay_out(lowered: Lowered) -> Lowered:
        layouts = Layouts(lowered.region, lowered.sizes)
        inputs = [_expected(node, wishes) for node in lowered.inputs]
        region = layouts.laid_out(inputs, [wishes.of(node) for node in lowered.outputs])
        try:
            for size in layouts.new:
                locate(size, lowered.inputs)
        except SizeUnknown:  # it will be known when the region is lowered
            return lowered
        return replace(lowered, region=region, sizes=(*lowered.sizes, *layouts.new))

    return lay_out


def _expected(node: Node, wishes: Wishes) -> Strides:
    """Where a region's input will lie: as it does if it is there already."""
    if node.op != "placeholder" and node in wishes.channels_last:
        return channels_last(node)
    if node.target is operator.getitem:
        arguments: Any = node.args
        call, k = arguments
        if getattr(call.target, "namespace", "") == "normpass":
            region = parse(call.args[2])
            sizes = [extent_of(s.meta["val"] if isinstance(s, Node) else s) for s in call.args[1]]
            return Layouts(region, sizes).strides(region.outputs[k].buffer)
    return traced(node)


def settled(
    text: str, sizes: Sequence[Any], inputs: Sequence[Any], call: Node, wishes: Wishes
) -> tuple[str, list[Any]]:
    """A region's text and run-time sizes for tensors as they lie when it is lowered.

    inputs: Inductor's, realized and with fixed layouts. call: the region's node.
    """
    region = parse(text)
    layouts = Layouts(region, sizes)
    results = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    wanted = [wishes.of(results[k]) if k in results else None for k in range(len(region.outputs))]
    strides = [tuple(map(sympy.sympify, x.get_stride())) for x in inputs]
    return str(layouts.laid_out(strides, wanted)), [*sizes, *layouts.new]


def traced(node: Node) -> Strides:
    """The strides of a node's example."""
    return tuple(step_of(stride) for stride in node.meta["val"].stride())


def channels_last(node: Node) -> Strides:
    _, c, h, w = shape_of(node)
    return h * w * c, sympy.Integer(1), w * c, c


class Layouts:
    """The strides of a region's tensors, as they are and as they are to be."""

    def __init__(self, region: Region, sizes: Sequence[Any]) -> None:
        self.region = region
        self.extents: dict[str, Any] = region.extents([sympy.sympify(size) for size in sizes])
        self.new: dict[sympy.Expr, str] = {}  # strides that need a name: run-time sizes to be added

    def laid_out(self, inputs: Sequence[Strides], outputs: Sequence[Strides | None]) -> Region:
        """The region with its tensors laid out so; outputs that nobody minds as inputs of their
        dimensions are.
        """
        region = self.region
        moved: dict[Any, Strides] = {}
        for buffer, strides in zip(region.inputs, inputs, strict=True):
            if self.buffer(buffer, strides) is not buffer:
                moved.setdefault((buffer.dims, self.strides(buffer)), strides)
        results = []
        for output, wanted in zip(region.outputs, outputs, strict=True):
            now = self.strides(output.buffer)
            strides = wanted or moved.get((output.buffer.dims, now), now)
            results.append(replace(output, buffer=self.buffer(output.buffer, strides)))
        laid_out = replace(
            region,
            inputs=tuple(map(self.buffer, region.inputs, inputs)),
            outputs=tuple(results),
            sizes=(*region.sizes, *self.new.values()),
        )
        verify(laid_out)
        return laid_out

    def buffer(self, buffer: Buffer, strides: Strides) -> Buffer:
        """A buffer with other strides; as it is where they mean the same or elements repeat."""
        now = self.strides(buffer)
        if 0 in now or 0 in strides or self.same(buffer, now, strides):
            return buffer
        if self.same(buffer, strides, self.contiguous(buffer)):
            return replace(buffer, strides=None)
        return replace(buffer, strides=tuple(map(self.named, strides)))

    def same(self, buffer: Buffer, one: Strides, other: Strides) -> bool:
        """Whether strides lead to the same elements: those of single ones do not count."""
        sizes = zip(self.shape(buffer), one, other, strict=True)
        return all(size == 1 or sympy.expand(a - b) == 0 for size, a, b in sizes)

    def shape(self, buffer: Buffer) -> tuple[sympy.Expr, ...]:
        return tuple(map(sympy.sympify, self.region.shape(buffer, self.extents)))

    def contiguous(self, buffer: Buffer) -> Strides:
        shape = self.shape(buffer)
        return tuple(sympy.sympify(product(shape[k + 1 :])) for k in range(len(shape)))

    def strides(self, buffer: Buffer) -> Strides:
        if buffer.strides is None:
            return self.contiguous(buffer)
        return tuple(
            sympy.sympify(self.extents[step] if isinstance(step, str) else step)
            for step in buffer.strides
        )

    def named(self, stride: sympy.Expr) -> Stride:
        """A stride as a number, or as the name of a size that is known at run time."""
        if stride.is_Integer:
            return int(stride)
        for name in self.region.sizes:
            if sympy.expand(self.extents[name] - stride) == 0:
                return name
        return self.new.setdefault(stride, f"t{len(self.region.sizes) + len(self.new)}")
