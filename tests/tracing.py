"""Functional ATen graphs for tests of the passes: a function traced, fused, and run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.backend.run.op import region_op
from normpass.backend.table import decomposition_table
from normpass.passes.pipeline import Decision, Fused, Refused, fuse_graph
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.fx import GraphModule, Node

    from normpass.passes.region import Region


def trace(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> GraphModule:
    """The ATen graph of a function after decomposition; symbolic sizes if `dynamic`."""
    mode: Literal["symbolic", "fake"] = "symbolic" if dynamic else "fake"
    graph = make_fx(function, decomposition_table=decomposition_table(), tracing_mode=mode)(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


def trace_gradients(net: nn.Module, x: Tensor) -> GraphModule:
    """g, x and the parameters -> what a module computes of x, and its gradients at all but g."""
    names, values = zip(*net.named_parameters(), strict=True)

    def both(g: Tensor, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        y = functional_call(net, dict(zip(names, parameters, strict=True)), x)
        return y, *torch.autograd.grad(y, [x, *parameters], g)

    x = x.detach().requires_grad_()
    return trace(both, torch.ones_like(net(x)), x, *values)


def fuse(graph: GraphModule) -> list[Decision]:
    """Fuses a graph in place, whatever its size."""
    decisions = fuse_graph(graph.graph, region_op, least_bytes=0)
    graph.graph.lint()
    graph.recompile()
    return decisions


def fused(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> list[Region]:
    """The regions of a function, after a check that the fused graph computes what the graph did."""
    graph = trace(function, *inputs, dynamic=dynamic)
    expected = graph(*inputs)
    decisions = fuse(graph)
    refused = [d.reason for d in decisions if isinstance(d, Refused)]
    assert not refused, refused
    torch.testing.assert_close(graph(*inputs), expected)
    return [parse(d.text) for d in decisions if isinstance(d, Fused)]


def calls(graph: GraphModule, target: Any) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target == target]


def functions(region: Region) -> set[str]:
    """The names of the functions that a region computes."""
    return {op.fn for op in region.ops}


def shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]
