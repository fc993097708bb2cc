"""Regions of one graph: each becomes an operator, and its kernel starts to compile. What FusionPass
does with a forward or backward graph, and the passes alone (`normpass.fuse`).

    graph -> the rest is prepared for Inductor -> fuse_graph: passes/pipeline.py -> kernels

Imported where a graph is compiled, and not where a cache has it: with the passes, the planner and
the printers that takes a tenth of a second.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.explain import dump, record
from normpass.backend.inductor import donated, inductor_call, rest, written
from normpass.backend.inductor.memory_format import as_expected
from normpass.backend.program.traffic import traffic
from normpass.backend.run import toolchain
from normpass.backend.run.calibration import conditions_of
from normpass.backend.run.op import print_for, region_op
from normpass.backend.run.runtime import kernel
from normpass.backend.table import decomposition_table
from normpass.passes import faults
from normpass.passes.expand import Expander, out_of_place
from normpass.passes.pipeline import Decision, Fused, LayOut, fuse_graph
from normpass.passes.rewrite import examples

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from torch.fx import Graph, GraphModule, Node

    from normpass.backend.options import Options
    from normpass.passes.cost import Work
    from normpass.passes.lower import Lowered
    from normpass.passes.profit import Estimate


def fuse_regions(graph: Graph, settings: Options) -> None:
    """Fuses the regions of a forward or backward graph, in place."""
    for_inductor = settings.inner == "inductor"
    number = dump.graph(settings.debug, "20_before", graph)
    before = None
    with faults.survived("copying a graph for a report", "a graph", "Reports lack it"):
        before = record.before(graph)
    if for_inductor:
        rest.prepare(graph, settings)
    decisions = fuse_graph(
        graph,
        region_op,
        least_bytes=settings.least_bytes,
        lay_out=_in_dialect(settings.gpu, _lay_out(graph, for_inductor)),
        kernel=_kernel,
        conditions=conditions_of,
        missing=_missing_for_inductor if for_inductor else _missing,
        rounded=for_inductor and inductor_call.rounds_everywhere(),
        donated=_donated(graph) if for_inductor else (),
    )
    if for_inductor:
        inductor_call.install()
    if not for_inductor or written.is_cpp():
        with faults.survived("the start of kernels", "a graph", "They are built when they run"):
            _start(decisions, for_inductor)
    with faults.survived("the record of what was fused", "a graph", "Reports lack it"):
        record.decisions(decisions)
        record.after(before, graph, decisions)
        dump.graph(settings.debug, "30_fused", graph, number)
        dump.kernels(settings.debug, decisions, number)


def _lay_out(graph: Graph, for_inductor: bool) -> LayOut:
    """How Inductor is expected to lay out the tensors of regions."""
    if for_inductor:
        with faults.survived("foretelling where tensors lie", "a graph", "They are settled later"):
            return as_expected(graph)
    return lambda lowered: lowered


def _in_dialect(dialect: str | None, lay_out: LayOut) -> LayOut:
    """Regions of GPUs ask for a dialect, if one was chosen."""

    def asking(lowered: Lowered) -> Lowered:
        lowered = lay_out(lowered)
        if dialect is None or lowered.device != "cuda":
            return lowered
        return replace(lowered, region=replace(lowered.region, dialect=dialect))

    return asking


def _donated(graph: Graph) -> Container[Node]:
    """What Inductor may write over of a graph's inputs."""
    with faults.survived("telling donated tensors", "a graph", "None is taken for one"):
        return donated.donated(graph)
    return ()


def _missing_for_inductor(lowered: Lowered) -> str | None:
    """Why there is no kernel for a region that Inductor's code could call, or None."""
    return inductor_call.no_call(lowered.device) or _missing(lowered)


def fuse(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    least_bytes: int | None = None,
) -> GraphModule:
    """The passes alone: a copy of an ATen graph with its norm regions fused.

    It takes forward, backward and joint graphs, and those of whole training steps, and can stand
    among passes that are called with a graph and its inputs. Operators that were not decomposed
    (native_layer_norm, _softmax, silu) are looked into; those that no region takes in are left as
    they were.

    Args:
        gm: as from make_fx or AOTAutograd, every node with its example value in `node.meta["val"]`.
        example_inputs: not needed.
        least_bytes: regions that move fewer bytes stay; None for the measured default.

    Raises:
        ValueError: if a node has no example value.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.users and "val" not in node.meta:
            raise ValueError(
                f"expected every node's example value in node.meta['val'], found none for "
                f"{node.name}: trace with make_fx(..., tracing_mode='fake') or 'symbolic'"
            )
    fused, decisions = _fused_where_it_pays(gm, least_bytes)
    record.decisions(decisions)
    fused.meta.update(gm.meta)
    fused.recompile()
    return fused


def _fused_where_it_pays(
    gm: GraphModule, least_bytes: int | None
) -> tuple[GraphModule, list[Decision]]:
    """A graph fused with only those operators expanded that end up in regions."""
    expander = Expander(decomposition_table())
    names = expander.candidates(gm.graph)
    while True:
        with warnings.catch_warnings():  # torch 2.13's own copies of trees use what it deprecates
            warnings.simplefilter("ignore", FutureWarning)
            fused = torch.fx.GraphModule(gm, deepcopy(gm.graph))
        out_of_place(fused.graph)
        parts = expander.expand(fused.graph, names)
        decisions = fuse_graph(
            fused.graph,
            region_op,
            least_bytes=least_bytes,
            kernel=_kernel,
            conditions=conditions_of,
            missing=_missing,
        )
        left = set(fused.graph.nodes)
        taken_in = {name for name, nodes in parts.items() if not left.issuperset(nodes)}
        if taken_in == parts.keys():
            return fused, decisions
        names = taken_in


def _kernel(lowered: Lowered, estimate: Estimate) -> Work:
    """What the kernel of a region would do."""
    here = conditions_of(lowered.device)
    return traffic(str(lowered.region), estimate.sizes, lowered.device, here)


def _missing(lowered: Lowered) -> str | None:
    """Why there is no kernel for a region, or None. It is printed here, so that what cannot be
    stays with Inductor rather than fails in a run.
    """
    if lowered.device == "cpu" and (missing := toolchain.cannot_build()):
        return missing
    try:
        sizes = examples(lowered.sizes, lowered.inputs)
        print_for(str(lowered.region), sizes, lowered.device)
    except NotImplementedError as error:
        return str(error)
    return None


def _start(decisions: Sequence[Decision], in_cpp: bool) -> None:
    """Begins to compile the kernels of a graph that nothing lowers, or that C++ calls, for which
    lowering waits. in_cpp: C++ has those of CPUs in it.
    """
    for decision in decisions:
        if not isinstance(decision, Fused):
            continue
        if decision.device == "cuda" and torch.cuda.is_available():
            from normpass.backend.run import launch_gpu

            device = torch.device("cuda", torch.cuda.current_device())
            launch_gpu.start(decision.text, decision.sizes, device)
        elif decision.device == "cpu" and not in_cpp:
            kernel(decision.text, decision.sizes)
