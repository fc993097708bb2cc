"""The backend: a Dynamo graph in, a compiled callable out. The whole data flow, read from top to
bottom.

    Dynamo graph -> AOTAutograd with our decompositions -> SavingPass: what is computed again ->
    forward and backward graph -> FusionPass: regions, one op each -> Inductor lays out the rest ->
    a region's tensors are settled and its kernel starts to compile -> the rest compiled by
    Inductor.

Uses of torch._inductor here (compile_fx with decompositions and config_patches, CustomGraphPass,
list_mode_options; joint_custom_post_pass, activation_memory_budget of torch._functorch.config, and
the marks that activation checkpointing makes for the partitioner) were checked on torch 2.11, 2.13
and 2.15.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from normpass.backend import higher_order, inductor_mistakes
from normpass.backend.explain import dump
from normpass.backend.higher_order.inside import rules_if_asked_for
from normpass.backend.inductor import donated, gemm, image_gradients
from normpass.backend.inductor.mutated import constant_inputs
from normpass.backend.options import Options
from normpass.backend.program.machine import machine_of
from normpass.backend.run import toolchain
from normpass.backend.run.calibration import conditions_of
from normpass.backend.table import decomposition_table, source_digest
from normpass.decomps.activation import (
    averages_running_statistics,
    is_registered,
    torch_internals,
    without_ours,
)
from normpass.decomps.activation.inductor_state import as_tuple
from normpass.passes import faults, saved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph, GraphModule


log = logging.getLogger(__name__)


def normpass(
    graph: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The function behind `torch.compile(model, backend="normpass")`.

    graph, inputs: what Dynamo hands to every backend. options: see backend/options.py. mode: as for
    Inductor.

    Raises:
        ValueError: for an option there is not.
    """
    settings = Options.parse(options)
    dump.graph(settings.debug, "00_dynamo", graph)
    if settings.inner == "eager" or _cannot_build(inputs):
        settings = replace(settings, inner="eager")
    return _compile_differentiable(graph, inputs, settings, mode)


def _compile_differentiable(
    graph: GraphModule, inputs: Sequence[Any], settings: Options, mode: str | None
) -> Callable[..., Any]:
    """Compiles a graph so that its backward can be differentiated, by this function again."""

    def again(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return _compile_differentiable(graph, inputs, settings, mode)

    def once(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with rules_if_asked_for(graph):
            return _compile(graph, inputs, settings, mode)

    if not settings.double_backward:
        return once(graph, inputs)
    return higher_order.differentiable(graph, inputs, once, again)


def _compile(
    graph: GraphModule, inputs: Sequence[Any], settings: Options, mode: str | None
) -> Callable[..., Any]:
    if settings.inner == "eager":
        return _compile_with_eager(graph, inputs, settings)
    return _compile_with_inductor(graph, inputs, settings, mode)


def _compile_with_inductor(
    graph: GraphModule, inputs: Sequence[Any], settings: Options, mode: str | None
) -> Callable[..., Any]:
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    inductor_mistakes.install()
    patches = {**(list_mode_options(mode) if mode else {}), **settings.inductor}
    before = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    # What `register` fuses under stock Inductor is fused here, with these options, and once.
    patches["post_grad_custom_pre_pass"] = _after(without_ours(before), FusionPass, settings)
    if settings.recompute is not False:
        before = patches.get("joint_custom_post_pass", config.joint_custom_post_pass)
        patches["joint_custom_post_pass"] = _after(before, SavingPass, settings)
    with image_gradients.traced_whole():
        compiled: Any = compile_fx(
            graph, list(inputs), config_patches=patches, decompositions=decomposition_table()
        )
    return compiled


def _compile_with_eager(
    graph: GraphModule, inputs: Sequence[Any], settings: Options
) -> Callable[..., Any]:
    """Fused regions, and everything else as eager ops: for debugging, and where nothing can be
    compiled.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    fusion = FusionPass(settings)

    def compiler(inner: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        fusion(inner.graph)
        inner.recompile()
        return make_boxed_func(inner.forward)

    backend = aot_autograd(fw_compiler=compiler, decompositions=decomposition_table())
    return backend(graph, inputs)


def _cannot_build(inputs: Sequence[Any]) -> bool:
    """Whether CPU code is asked for and nothing can be compiled; warns once."""
    any_on_cpu = any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in inputs)
    if not any_on_cpu or (reason := toolchain.cannot_build()) is None:
        return False
    _warn_once(f"the model runs uncompiled: {reason} (normpass why uncompiled)")
    return True


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


class _Pass(CustomGraphPass):
    """A pass over a graph that runs after those that were configured before it."""

    def __init__(self, settings: Options | None = None, before: tuple[Any, ...] = ()) -> None:
        self.settings = settings or Options.parse(None)
        self.before = before

    def __call__(self, graph: Graph) -> None:
        for other in self.before:
            other(graph)
        self.run(graph)

    def run(self, graph: Graph) -> None:
        raise NotImplementedError

    def uuid(self) -> Any:
        """What Inductor's cache knows this pass by: our sources, the options, what is mended in
        Inductor, and what decisions and plans depend on: the processor's caches, vectors and
        vendor, threads and the calibration in force (what GPU there is, Inductor's key says), and
        which inputs may be written over. None, so no caching, if a pass before ours has no
        identity.
        """
        others = [
            other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.before
        ]
        if None in others:
            return None
        # The rules change what AOTAutograd traces, and its cache does not see them otherwise.
        machine = conditions_of("cpu"), machine_of("cpu"), gemm.is_faster()
        rules = is_registered(), averages_running_statistics()
        parts = source_digest(), self.settings, rules, machine, others
        return f"normpass {parts} {inductor_mistakes.key()} {donated.numbers()}"


def _after(before: Any, ours: type[_Pass], settings: Options) -> Any:
    """A pass of ours after those that are configured: one of several where Inductor takes several,
    and knows which of them to tell more than the graph (CustomInferenceAwareGraphPass).
    """
    others = as_tuple(before)
    if torch_internals.get_custom_graph_passes is None:
        return ours(settings, others)
    return (*others, ours(settings))


class SavingPass(_Pass):
    """Chooses what a forward graph saves for the backward one, before they are split."""

    def run(self, graph: Graph) -> None:
        if functorch_config.activation_memory_budget != 1:
            return  # the user has chosen
        if self.settings.recompute is None and not _is_on_cpu(graph):
            return
        with faults.survived("choosing what is saved", "a graph", "Stock's choice is taken"):
            saved.mark(graph, constant_inputs(graph))


def _is_on_cpu(graph: Graph) -> bool:
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return all(x.device.type == "cpu" for x in values if isinstance(x, torch.Tensor))


class FusionPass(_Pass):
    """Fuses the regions of one forward or backward graph."""

    def run(self, graph: Graph) -> None:
        if self.settings.fuse:
            from normpass.backend import fusion  # a cache has most graphs

            fusion.fuse_regions(graph, self.settings)


def fusion_pass() -> FusionPass:
    """The pass with default options, for `normpass.register()`."""
    return FusionPass()
