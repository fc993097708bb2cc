"""The graphs that Inductor would be given for a GPU, and normpass's regions of them, with no GPU:
cases are traced on tensors without data, and the graphs relabelled.

Traced on the CPU they would keep other statistics: there eager saves them in half precision.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from normpass.backend.higher_order.inside import rules_if_asked_for
from normpass.backend.inductor import rest
from normpass.backend.inductor.memory_format import as_expected
from normpass.backend.options import Options
from normpass.backend.program.traffic import traffic
from normpass.backend.run.op import region_op
from normpass.backend.table import decomposition_table
from normpass.benchmarks.gpu_cases import FUNCTIONAL
from normpass.passes.pipeline import Decision, fuse_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, GraphModule, Node

    from normpass.benchmarks.gpu_cases import GpuCase
    from normpass.passes.cost import Conditions, Work
    from normpass.passes.lower import Lowered
    from normpass.passes.profit import Estimate


class FusedGraph(NamedTuple):
    """A graph with its regions as operators, and what was decided."""

    graph: Graph
    decisions: list[Decision]


def fused_graphs(
    case: GpuCase, conditions: Conditions, least_bytes: int | None = None
) -> list[FusedGraph]:
    """The graphs of a case's program, fused as they would be on a GPU of these conditions.

    least_bytes: as the backend's option.
    """
    return [fused(on_gpu(gm), conditions, least_bytes) for gm in graphs_of(case)]


def graphs_of(case: GpuCase) -> list[GraphModule]:
    """What AOTAutograd makes of a case: of `both` the forward and the backward graph."""
    torch._dynamo.reset()
    tensors = case.tensors("meta")
    taken: dict[str, GraphModule] = {}
    backend = _taking(taken, runs=case.phase not in FUNCTIONAL)
    names = tuple(tensors)
    if make := FUNCTIONAL.get(case.phase):
        program = make(case.spec, names)
        inputs = [_without_data(x, case) for x in tensors.values()]
        with contextlib.suppress(_TakenError):
            torch.compile(program, backend=backend, fullgraph=True, dynamic=False)(*inputs)
        return [taken["forward"]]
    dy = tensors.pop("dy", None)
    inputs = [x.requires_grad_() for x in tensors.values()]
    y = torch.compile(case.spec.function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    torch.autograd.grad(y, inputs, torch.empty_like(y) if dy is None else dy)
    return [taken[name] for name in ("forward", "backward") if case.phase in (name, "both")]


class _TakenError(Exception):
    """The graph is there: nothing has to run."""


def _without_data(x: Tensor, case: GpuCase) -> Tensor:
    """As x, with memory that nobody touches where torch.func cannot differentiate a batch norm of
    tensors that have none (checked on torch 2.13).
    """
    if not case.spec.wide:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def _taking(taken: dict[str, GraphModule], *, runs: bool) -> Callable[..., Any]:
    """A backend that keeps the graphs which it is given to compile, and runs them as they are or
    not at all.
    """

    def stop(*_: Any) -> Any:
        raise _TakenError

    def keep(phase: str) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compiler(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            taken[phase] = copy.deepcopy(gm)
            return make_boxed_func(gm.forward if runs else stop)

        return compiler

    compile = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decomposition_table(),
    )

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with rules_if_asked_for(gm):
            compiled: Callable[..., Any] = compile(gm, inputs)
        return compiled

    return backend


def on_gpu(gm: GraphModule) -> Graph:
    """Its graph, with example tensors that claim to lie on a GPU."""
    with FakeTensorMode() as mode:

        def moved(like: Any) -> Any:
            if not isinstance(like, Tensor):
                return like
            place = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            return FakeTensor(mode, place, torch.device("cuda:0"))

        for node in gm.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])
    return gm.graph


def fused(graph: Graph, conditions: Conditions, least_bytes: int | None = None) -> FusedGraph:
    """Fuses a graph in place as the backend does before Inductor, but for what depends on the
    machine that this runs on.
    """

    def kernel(lowered: Lowered, estimate: Estimate) -> Work:
        return traffic(str(lowered.region), estimate.sizes, lowered.device, conditions)

    rest.prepare(graph, Options(least_bytes=least_bytes))
    decisions = fuse_graph(
        graph,
        region_op,
        least_bytes=least_bytes,
        lay_out=as_expected(graph),
        kernel=kernel,
        conditions=lambda device: conditions,
    )
    return FusedGraph(graph, decisions)


def bytes_of(node: Node) -> int:
    """Of the tensor that a node stands for."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def least_bytes_of(graph: Graph) -> int:
    """Every distinct tensor that is read once, and every one that is made and returned once."""
    read = [node for node in graph.find_nodes(op="placeholder") if node.users]
    output = graph.output_node()
    computed = [node for node in output.all_input_nodes if node.op != "placeholder"]
    used = [node for node in read if set(node.users) != {output}]
    return sum(map(bytes_of, used)) + sum(map(bytes_of, computed))
