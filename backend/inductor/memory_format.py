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

from normpass.backend.inductor.images import images
from normpass.backend.inductor.strides import Layouts, Strides
from normpass.passes.domain import shape_of, step_of
from normpass.passes.region_text import parse
from normpass.passes.rewrite import SizeUnknown, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from torch.fx import Graph, Node

    from normpass.passes.lower import Lowered

aten = torch.ops.aten
# Their results depend on where their arguments' elements lie.
BY_STRIDE = (
    *(aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default),
    *(aten.resize.default, aten.resize_as.default),
)


@dataclass(frozen=True)
class Wishes:
    """What Inductor wants of results. channels_last: the nodes it prefers so, if they have four
    dimensions. visible: what the caller of the compiled function sees, with its strides. planned:
    whether a graph's examples have the strides that were planned.
    """

    channels_last: Container[Node]
    visible: Mapping[Node, Sequence[Any] | None]
    planned: bool = True

    @classmethod
    def expected(cls, graph: Graph) -> Wishes:
        """Of a graph that is to be lowered."""
        from torch._inductor.graph import GraphLowering, get_user_visible_output_strides

        module: Any = graph.owning_module
        channels_last: Container[Node] = ()
        # Inference differs on GPUs only, and there nothing more than a guess is lost.
        if GraphLowering.decide_layout_opt(module, is_inference=False):
            lowering: Any = SimpleNamespace(module=module)
            nodes = GraphLowering.find_nodes_prefer_channels_last(lowering)
            channels_last = images(graph).intersection(nodes)
        return cls(channels_last, get_user_visible_output_strides(graph), planned=False)

    def of(self, result: Node) -> Strides | None:
        """The strides that a result must have; None if Inductor does not mind."""
        visible = self.visible.get(result)
        if visible is not None:
            return tuple(map(sympy.sympify, visible))
        if any(user.target in BY_STRIDE for user in result.users):
            return traced(result)
        if self.prefers_channels_last(result):
            return channels_last(result)
        for user in result.users:
            if user.target is aten.unsqueeze.default and self.prefers_channels_last(user):
                added: Any = user.args[1]
                return tuple(s for dim, s in enumerate(channels_last(user)) if dim != added % 4)
        is_saved = any(user.op == "output" for user in result.users)
        return traced(result) if is_saved and self.planned else None

    def prefers_channels_last(self, node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.ndim == 4 and node in self.channels_last


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
    """Where a region's input will lie: as it does if it is there already, or planned to be."""
    if node.op != "placeholder" and node in wishes.channels_last:
        return channels_last(node)
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
    wanted = [wishes.of(results[k]) if k in results else None for k in range(len(region.results))]
    strides = [tuple(map(sympy.sympify, x.get_stride())) for x in inputs]
    return str(layouts.laid_out(strides, wanted)), [*sizes, *layouts.new]


def traced(node: Node) -> Strides:
    """The strides of a node's example."""
    return tuple(step_of(stride) for stride in node.meta["val"].stride())


def channels_last(node: Node) -> Strides:
    _, c, h, w = shape_of(node)
    return h * w * c, sympy.Integer(1), w * c, c
