"""How code that Inductor prints calls a region.

Inductor calls an operator it does not know through the dispatcher. Its code calls the region's
kernel directly instead: on CPUs, with caches swept by the tensors of a step, the detour through the
dispatcher costs about 40 us, as much as a twentieth of a backward over 50 MB; on GPUs a call has to
be over before the kernels that it launches are.

Code without Python has the kernel in it (cpp_call.py). Where Inductor's code is a graph, regions
stay with it (`no_call`), and where kernels of a GPU turn out not to be built (unfused.py).

Uses of torch._inductor here (ir.FallbackKernel and MultiOutput, register_lowering, add_import_once,
config.cpp_wrapper and fx_wrapper, config.emulate_precision_casts, V.aot_compilation,
GraphLowering.find_nodes_prefer_channels_last, and the sizes' values in the example,
sizevars.shape_env.backed_var_to_val) were checked on torch 2.11, 2.13 and 2.15; where they
are missing, the operator is called as any other.
"""

from __future__ import annotations

import logging
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sympy
import torch

from normpass.backend.inductor import bundled, cpp_call, unfused, written
from normpass.backend.inductor.dying import dying, keep
from normpass.backend.inductor.images import images
from normpass.backend.inductor.memory_format import Wishes, settled
from normpass.backend.inductor_mistakes.mistake import wrap
from normpass.backend.run.gpu_kernel import NotBuiltError
from normpass.backend.run.op import print_for, region_op
from normpass.backend.run.runtime import kernel
from normpass.passes import faults
from normpass.passes.sizes import expected

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

NAME = "normpass_region"
IMPORT = f"from normpass.backend.run.runtime import launch as {NAME}"
# Where tensors lie as the region's text says: a name for each place that calls one.
CALL_SITE = "normpass_call_site"
IMPORT_CALL_SITE = f"from normpass.backend.run.runtime import CallSite as {CALL_SITE}"
GPU_CALL_SITE = "normpass_gpu_call_site"
IMPORT_GPU_CALL_SITE = f"from normpass.backend.run.launch_gpu import CallSite as {GPU_CALL_SITE}"


@cache
def install() -> bool:
    """Tells Inductor, once a process, how to lower the operator and what lies beside it. Graphs
    without regions are compiled as ever.
    """
    try:
        _install()
    except Exception as error:  # another Inductor than those that were checked
        log.info("regions are called through the dispatcher: %r", error)
        return False
    return True


def no_call(device: str) -> str | None:
    """Why the code that is being compiled cannot call a region on a device; None if it can."""
    from torch._inductor import config

    if config.fx_wrapper:
        return "fx_wrapper: Inductor's code as an FX graph holds no calls of operators of others"
    if not written.is_cpp():
        return None
    if device != "cpu":
        from normpass.backend.run import gpu_function

        if reason := gpu_function.refused():
            return f"C++ calls what is compiled: {reason}"
    if config.aot_inductor.allow_stack_allocation:
        return "allow_stack_allocation: what lies on the stack is no tensor that a kernel is given"
    if not install():
        return "C++ calls what is compiled, and this Inductor could not be told of the kernel"
    return None


def rounds_everywhere() -> bool:
    """Whether Inductor is told to round half precision wherever eager mode would."""
    from torch._inductor import config

    return bool(config.emulate_precision_casts)


def _settled(
    text: str, sizes: Sequence[Any], inputs: Sequence[Any], graph: Any
) -> tuple[str, Sequence[Any]]:
    """A region's text and sizes where its tensors lie now.

    Raises:
        NotImplementedError: if there is no kernel for that.
    """
    wishes = Wishes(graph.nodes_prefer_channels_last, graph.user_visible_output_strides)
    new_text, new_sizes = settled(text, sizes, inputs, graph.current_node, wishes)
    print_for(new_text, _examples(new_sizes, graph), inputs[0].get_device().type)
    return new_text, new_sizes


def _examples(sizes: Sequence[Any], graph: Any) -> tuple[int, ...]:
    """A region's run-time sizes in the example that the graph was traced with."""
    known = graph.sizevars.shape_env.backed_var_to_val
    return tuple(expected(sympy.sympify(size).subs(known)) for size in sizes)


def _start(text: str, sizes: tuple[int, ...], device: torch.device, graph: Any) -> None:
    """Begins to compile a region's kernel while Inductor goes on."""
    if device.type == "cpu":
        bundled.note(graph, kernel(text, sizes))
    elif device.type == "cuda" and torch.cuda.is_available():
        from normpass.backend.run import launch_gpu

        launch_gpu.start(text, sizes, device)


def _only_images(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Inductor prefers to have in channels_last, without what is no image: where there are
    regions, they have settled where it lies.
    """

    def find_nodes_prefer_channels_last(lowering: Any) -> Any:
        found, graph = find(lowering), lowering.module.graph
        if graph.find_nodes(op="call_function", target=region_op):
            with faults.survived("telling images from the rest", "a graph", "All are some"):
                kept = images(graph)
                return type(found)(node for node in found if node in kept)
        return found

    return find_nodes_prefer_channels_last


def _calls() -> tuple[type[Any], type[Any]]:
    """How the operator is called: wherever its tensors lie, and where they lie as its text says."""
    from torch._inductor import ir

    class RegionKernel(ir.FallbackKernel):
        """The operator, called by another name where Python calls it."""

        def codegen(self, wrapper: Any) -> None:
            device = self.get_device()
            name_on = {"cpu": self.name_on_cpu, "cuda": self.name_on_gpu}
            find = name_on.get(device.type) if device is not None else None
            if find and (name := find(wrapper)):
                self.python_kernel_name = name
            super().codegen(wrapper)

        def name_on_cpu(self, wrapper: Any) -> str:
            wrapper.add_import_once(IMPORT)
            return NAME

        def name_on_gpu(self, wrapper: Any) -> str | None:
            return None

    class SettledRegionKernel(RegionKernel):
        """One whose tensors lie as its text says.

        sizes: those of the example. over: the inputs that outputs are written over.
        """

        text: str
        sizes: tuple[int, ...]
        over: Mapping[int, int] = MappingProxyType({})

        def codegen(self, wrapper: Any) -> None:
            super().codegen(wrapper)
            inputs: Sequence[Any] = self.inputs
            keep([inputs[dead].get_name() for dead in self.over.values()], wrapper)

        def name_on_cpu(self, wrapper: Any) -> str:
            with faults.survived("writing over what dies", "a region", "It gets new memory"):
                pairs = dying(self.text, self.inputs, wrapper)
                self.over = kernel(self.text, self.sizes).over(pairs)
            over = ", ".join(map(str, self.over.items()))
            return self.call_site(wrapper, IMPORT_CALL_SITE, f"{CALL_SITE}({over})")

        def name_on_gpu(self, wrapper: Any) -> str | None:
            return self.call_site(wrapper, IMPORT_GPU_CALL_SITE, f"{GPU_CALL_SITE}()")

        def call_site(self, wrapper: Any, imported: str, made: str) -> str:
            """Makes one of the module's own, and returns its name."""
            name = f"{NAME}_{self.get_name()}"
            wrapper.add_import_once(imported)
            wrapper.add_import_once(f"{name} = {made}")
            return name

    return RegionKernel, SettledRegionKernel


def _install() -> None:
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map

    anywhere, as_settled = _calls()
    wrap(GraphLowering, "find_nodes_prefer_channels_last", _only_images)
    bundled.install()

    @register_lowering(region_op, type_promotion_kind=None)
    def lower(inputs: Sequence[Any], sizes: Sequence[Any], text: str) -> Any:
        given = inputs, sizes
        inputs = [ir.ExternKernel.realize_input(x) for x in inputs]
        for x in inputs:
            if ir.is_storage_and_layout(x):
                ir.as_storage_and_layout(x, freeze=True)
        call, in_cpp = anywhere, written.is_cpp()
        with faults.survived("settling where its tensors lie", "a region", "They are copied"):
            try:
                text, sizes = _settled(text, sizes, inputs, V.graph)
                call = as_settled
            except NotImplementedError as error:
                log.info("the tensors of a region are copied: %s", error)
        example: tuple[int, ...] = ()
        with faults.survived("the start of a kernel", "a region", "It is built when it runs"):
            example = _examples(sizes, V.graph)
            if not in_cpp:
                _start(text, example, inputs[0].get_device(), V.graph)
        if in_cpp:
            laid_out = cpp_call.laid_out(text, sizes, inputs) if call is anywhere else inputs
            with faults.survived("printing its function", "a region", "It stays with Inductor"):
                try:
                    found = cpp_call.results(text, sizes, example, laid_out)
                    return tree_map(ir.TensorBox.create, found)
                except (NotBuiltError, NotImplementedError) as error:
                    log.warning(
                        "a region stays with Inductor: %s (normpass why kernel-not-built)", error
                    )
            return unfused.lowered(V.graph.current_node, *given)
        results: Any = call.create(region_op, inputs, sizes, text)
        for result in results:
            result.inputs[0].text, result.inputs[0].sizes = text, example
            # They are made as the text says: to ask costs as much as to make them.
            result.skip_size_stride_alignment_checks = call is as_settled
        return tree_map(ir.TensorBox.create, results)
