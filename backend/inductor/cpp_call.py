"""How C++ that Inductor writes calls a region: `cpp_wrapper`, and AOTInductor's packages.

The region is a function of the same file, which has its kernel in it (run/cpp_function.py), or the
machine code of those that it launches on a GPU (run/gpu_function.py), so that a package needs no
operator, no Python and nothing of ours beside it. Its results are allocated by Inductor, which
gives them the memory of tensors that nobody reads any more.

Uses of torch._inductor (ir.ExternKernel, MultiOutput, MultiOutputLayout and FixedLayout; of the
wrapper define_kernel, src_to_kernel, codegen_allocation, codegen_sizevar, generate_kernel_call and
write_get_raw_stream; AllocateLine and WrapperLine of codegen.wrapper; GraphLowering.cpp_wrapper and
aot_mode) were checked on torch 2.11 and 2.13, those for CPUs on 2.15 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import sympy

from normpass.backend.run import cpp_function
from normpass.backend.run.layouts import Layout
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from normpass.backend.run.cpp_function import Function

HEADER = {"cpu": "normpass_h", "cuda": "normpass_launch_h"}
REGION = "torch.ops.normpass.region"


def results(
    text: str, sizes: Sequence[Any], example: tuple[int, ...], inputs: Sequence[Any]
) -> Any:
    """A call of a region: its results, as buffers of Inductor's.

    text: the region's, where its tensors lie as it says. sizes: its run-time sizes; example: those
    of the tensors that the graph was traced with. inputs: Inductor's, realized.

    Raises:
        NotBuiltError: if the kernels of a GPU cannot be built.
    """
    from torch._inductor import ir

    region_kernel, region_output = _classes()
    region, device = parse(text), inputs[0].get_device()
    extents = region.extents([sympy.sympify(size) for size in sizes])
    has_others = not all(sympy.sympify(size).is_Integer for size in sizes)
    header, function = _function(text, example, device, has_others)
    kernel = region_kernel(ir.MultiOutputLayout(device=device), inputs, sizes)
    kernel.text, kernel.header, kernel.function = text, header, function
    for k, each in enumerate(region.results):
        layout = Layout.of_result(region, each, extents)
        shape, strides = (list(map(sympy.sympify, numbers)) for numbers in layout[:2])
        fixed = ir.FixedLayout(device, layout.dtype, shape, strides)
        kernel.outputs.append(region_output(fixed, kernel, [(list, k)]))
    return kernel.outputs


def _function(
    text: str, example: tuple[int, ...], device: torch.device, has_others: bool
) -> tuple[str, Function]:
    """What has to stand in front of a region's function, and the function. has_others: whether it
    is called with other sizes than the example's.
    """
    if device.type == "cpu":
        return cpp_function.header(), cpp_function.function(text, example)
    from normpass.backend.run import gpu_function

    function = gpu_function.function(text, example, device, has_others=has_others)
    return gpu_function.header(), function


def laid_out(text: str, sizes: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """A region's inputs as its text says that they lie; copies where they lie elsewhere."""
    from torch._inductor import ir

    region = parse(text)
    extents = region.extents([sympy.sympify(size) for size in sizes])
    return [
        ir.ExternKernel.require_exact_strides(x, region.strides(buffer, extents))
        for x, buffer in zip(inputs, region.inputs, strict=True)
    ]


@cache
def _classes() -> tuple[Any, Any]:
    """The kernel, and each of its results, as Inductor's graph has them."""
    from torch._inductor import ir
    from torch._inductor.codegen.wrapper import AllocateLine
    from torch._inductor.virtualized import V

    class RegionFunction(ir.ExternKernel):
        """A call of a function of the same C++ file."""

        text: str
        header: str
        function: Function

        def __init__(self, layout: Any, inputs: Sequence[Any], sizes: Sequence[Any]) -> None:
            numbers = tuple(map(sympy.sympify, sizes))
            super().__init__(None, layout, self.unwrap_storage(inputs), numbers)
            self.outputs: list[Any] = []
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def should_allocate(self) -> bool:
            return False

        def codegen(self, wrapper: Any) -> None:
            self.codegen_comment(wrapper)
            for output in self.outputs:
                if output.get_name() in V.graph.removed_buffers:
                    wrapper.writeline(AllocateUnread(wrapper, output))
                else:
                    wrapper.codegen_allocation(output)
            inputs: Sequence[Any] = self.inputs
            read = [x.codegen_reference() for x in inputs]
            written = [output.get_name() for output in self.outputs]
            sizes = [wrapper.codegen_sizevar(size) for size in self.constant_args]
            call = _call_in_cpp if V.graph.cpp_wrapper else _call_in_python
            call(self, wrapper, read, written, sizes)

    class RegionResult(ir.MultiOutput):
        """One of its results, allocated before the call."""

        def should_allocate(self) -> bool:
            return True

        def codegen(self, wrapper: Any) -> None:
            pass

    class AllocateUnread(AllocateLine):
        """The allocation of a result that nobody reads: it is written all the same."""

        def plan(self, state: Any) -> Any:
            return self

        def codegen(self, code: Any) -> None:
            code.writeline(self.wrapper.make_buffer_allocation(self.node))

    return RegionFunction, RegionResult


def _call_in_cpp(
    kernel: Any, wrapper: Any, read: Sequence[str], written: Sequence[str], sizes: Sequence[str]
) -> None:
    """A call of a region's function. read, written: tensors, as Inductor names them."""
    function, device = kernel.function, kernel.get_device()
    is_on_cpu = device.type == "cpu"
    # That of a GPU stands where CUDA's headers are, and no declaration of it anywhere.
    declaration = f"{function.declaration};\n" if is_on_cpu else None
    _define(wrapper, HEADER[device.type], kernel.header, declaration and "")
    _define(wrapper, function.name, function.source, declaration)
    if is_on_cpu:
        given, types = [*read, *written, *sizes], function.types
        wrapper.generate_kernel_call(
            function.name, given, device=device, triton=False, arg_types=types
        )
    else:
        pointers = [f"{name}.data_ptr()" for name in (*read, *written)]
        wrapper.writeline(_launch()(wrapper, function.name, [*pointers, *sizes], device.index))


def _call_in_python(
    kernel: Any, wrapper: Any, read: Sequence[str], written: Sequence[str], sizes: Sequence[str]
) -> None:
    """The same in the pass in which Inductor tunes kernels before it writes C++."""
    given, name = f"[{', '.join(read)}], [{', '.join(sizes)}], {kernel.text!r}", kernel.get_name()
    wrapper.writeline(f"{name} = {REGION}({given})")
    wrapper.writeline(f"for own, found in zip([{', '.join(written)}], {name}):")
    wrapper.writeline("    own.copy_(found)")


@cache
def _launch() -> type[Any]:
    """A line of C++ that calls a function which ends with the stream that it launches on."""
    from torch._inductor.codegen.wrapper import WrapperLine
    from torch._inductor.virtualized import V

    @dataclass
    class Launch(WrapperLine):
        wrapper: Any
        function: str
        arguments: list[str]
        device: int

        def codegen(self, code: Any) -> None:
            stream = "stream"
            if not V.graph.aot_mode:
                stream = self.wrapper.write_get_raw_stream(self.device, V.graph.name)
            code.writeline(f"{self.function}({', '.join([*self.arguments, stream])});")

    return Launch


def _define(wrapper: Any, name: str, source: str, declaration: str | None) -> None:
    """Puts a definition into the file, once."""
    if source not in wrapper.src_to_kernel:
        wrapper.src_to_kernel[source] = name
        wrapper.define_kernel(name, source, gpu=False, cpp_definition=declaration)
