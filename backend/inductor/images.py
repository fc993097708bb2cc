"""Which tensors of a graph are images: laid out n c h w, as convolutions have them.

Inductor makes whatever has four dimensions channels_last if a convolution is behind it or before
it. A tensor that lies n h w c already (a LayerNorm's over the channels of a ConvNeXt) has its rows
for channels then: whoever saves it for the backward writes it across the grain, and whoever reads
it gathers. A convolution's weight, made so, is a copy that is saved beside the parameter (up to an
eighth of a step's memory); the backward can make one again, in a hundredth of the step's time or
less.

Here images are followed from convolutions through what keeps their dimensions; behind a permutation
lies something else.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from normpass.passes.region_text import parse
from normpass.passes.vocabulary import VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Graph, Node

aten = torch.ops.aten


def images(graph: Graph) -> set[Node]:
    """The four-dimensional nodes that are images."""
    beside: dict[Node, list[Node]] = {}
    for one, other in _of_one_kind(graph):
        beside.setdefault(one, []).append(other)
        beside.setdefault(other, []).append(one)
    found: set[Node] = set()
    waiting = [node for conv in graph.nodes for node in _convolved(conv)]
    while waiting:
        node = waiting.pop()
        if node not in found and _has_four_dimensions(node):
            found.add(node)
            waiting += beside.get(node, ())
    return found


def _convolved(node: Node) -> list[Node]:
    """The images of a convolution, if this is one."""
    arguments: Any = node.args
    if node.target is aten.convolution_backward.default:
        return [*arguments[:2], *(user for user in node.users if user.args[1] == 0)]
    # aten.convolution, and mkldnn._convolution_pointwise and its like
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return [arguments[0], node] if "convolution" in name else []


def _of_one_kind(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Pairs of nodes that have the same dimensions for the same things."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "normpass":
            yield from _of_a_region(node)
        elif node.op == "call_function" and node.target not in VIEWS and not _convolved(node):
            for source in node.all_input_nodes:
                yield source, node


def _of_a_region(call: Node) -> Iterator[tuple[Node, Node]]:
    arguments: Any = call.args
    inputs, _, text = arguments
    region = parse(text)
    first: dict[Any, Node] = {}
    results = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    for node, buffer in (
        *zip(inputs, region.inputs, strict=True),
        *((results[k], each.buffers[0]) for k, each in enumerate(region.results) if k in results),
    ):
        yield first.setdefault(buffer.dims, node), node


def _has_four_dimensions(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 4
