"""How code that Inductor prints calls a region.

Inductor calls an operator it does not know through the dispatcher. On CPUs its code calls the
region's kernel directly instead: with caches swept by the tensors of a step, the detour through the
dispatcher costs about 40 us, as much as a twentieth of a backward over 50 MB.

Uses of torch._inductor here (ir.FallbackKernel, register_lowering, add_import_once) were checked on
torch 2.11, 2.13 and 2.15; where they are missing, the operator is called as any other.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from normpass.backend.op import region_op

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

NAME = "normpass_region"
IMPORT = f"from normpass.backend.runtime import launch as {NAME}"


@cache
def install() -> None:
    """Tells Inductor, once a process, how to lower the operator. Nothing else is changed."""
    try:
        _install()
    except (ImportError, AttributeError, TypeError) as error:
        log.info("regions are called through the dispatcher: %r", error)


def _install() -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map

    class RegionKernel(ir.FallbackKernel):
        """The operator, called by another name where Python calls it with CPU tensors."""

        def codegen(self, wrapper: Any) -> None:
            device = self.get_device()
            if V.graph.cpp_wrapper:  # torch 2.13 prints strings into C++ as they are
                self.constant_args = tuple(map(_on_one_line, self.constant_args))
            elif device is not None and device.type == "cpu":
                wrapper.add_import_once(IMPORT)
                self.python_kernel_name = NAME
            super().codegen(wrapper)

    @register_lowering(region_op, type_promotion_kind=None)
    def lower(inputs: Sequence[Any], sizes: Sequence[Any], text: str) -> Any:
        results = RegionKernel.create(region_op, inputs, sizes, text)
        return tree_map(ir.TensorBox.create, results)


def _on_one_line(argument: Any) -> Any:
    return argument.replace("\n", "; ") if isinstance(argument, str) else argument
