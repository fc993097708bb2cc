"""How C++ that Inductor writes calls a region: `cpp_wrapper`, and AOTInductor's packages.

The region's kernel is a function of the same file (run/cpp_function.py), so that a package needs no
operator, no Python and nothing of ours beside it. Its results are allocated by Inductor, which
gives them the memory of tensors that nobody reads any more.

Uses of torch._inductor (ir.ExternKernel, MultiOutput, MultiOutputLayout and FixedLayout; of the
wrapper define_kernel, src_to_kernel, codegen_allocation, codegen_sizevar and generate_kernel_call;
AllocateLine of codegen.wrapper) were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import sympy

from normpass.backend.run.cpp_function import Function, function, header
from normpass.backend.run.layouts import Layout
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = "normpass_h"


def results(
    text: str, sizes: Sequence[Any], example: tuple[int, ...], inputs: Sequence[Any]
) -> Any:
    """A call of a region: its results, as buffers of Inductor's.

    text: the region's, where its tensors lie as it says. sizes: its run-time sizes; example: those
    of the tensors that the graph was traced with. inputs: Inductor's, realized.
    """
    from torch._inductor import ir

    region_kernel, region_output = _classes()
    region, device = parse(text), inputs[0].get_device()
    extents = region.extents([sympy.sympify(size) for size in sizes])
    kernel = region_kernel(ir.MultiOutputLayout(device=device), inputs, sizes)
    kernel.function = function(text, example)
    for k, each in enumerate(region.results):
        layout = Layout.of_result(region, each, extents)
        shape, strides = (list(map(sympy.sympify, numbers)) for numbers in layout[:2])
        fixed = ir.FixedLayout(device, layout.dtype, shape, strides)
        kernel.outputs.append(region_output(fixed, kernel, [(list, k)]))
    return kernel.outputs


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
            called = self.function
            _define(wrapper, HEADER, header(), "")
            _define(wrapper, called.name, called.source, f"{called.declaration};\n")
            for output in self.outputs:
                if output.get_name() in V.graph.removed_buffers:
                    wrapper.writeline(AllocateUnread(wrapper, output))
                else:
                    wrapper.codegen_allocation(output)
            inputs: Sequence[Any] = self.inputs
            arguments = [
                *(x.codegen_reference() for x in inputs),
                *(output.get_name() for output in self.outputs),
                *(wrapper.codegen_sizevar(size) for size in self.constant_args),
            ]
            wrapper.generate_kernel_call(
                called.name,
                arguments,
                device=self.get_device(),
                triton=False,
                arg_types=called.types,
            )

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


def _define(wrapper: Any, name: str, source: str, declaration: str) -> None:
    """Puts a definition into the file, once."""
    if source not in wrapper.src_to_kernel:
        wrapper.src_to_kernel[source] = name
        wrapper.define_kernel(name, source, gpu=False, cpp_definition=declaration)
