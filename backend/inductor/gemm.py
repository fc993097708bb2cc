"""Float32 matrix products on CPUs: oneDNN's, where MKL has no fast code.

Torch multiplies float32 by MKL, whose kernels for vectors of 512 bits are for Intel's processors;
on AMD's it takes others. What torch has for half precision and for convolutions, oneDNN, takes both
for what they can do. Measured on Zen 4 (two threads, alternating runs, products of 16 to 32768 rows
with 64 to 8000 columns): results and gradients of inputs 1.1x to 1.5x as fast as MKL's from 2^24
multiplications, slower below 2^23; gradients of weights, sums over rows, up to twice as slow.

oneDNN adds up in one order what MKL adds up in blocks: over 2048 terms and more, the mean error of
a result is 5.8e-7 of the mean result, and MKL's is 2.6e-7; below 64 they are the same.

Uses of torch._inductor here (lowering.lowerings and fallback_handler; ir.ExternKernel.realize_input
and require_contiguous, as_storage_and_layout; V.graph.current_node, module and sizevars) and of
torch.ops.mkldnn._linear_pointwise were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor import written
from normpass.backend.inductor_mistakes.mistake import replace
from normpass.passes import faults
from normpass.passes.sizes import hint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph

aten = torch.ops.aten
MARK = "normpass_multiplies_by_onednn"
LEAST_MULTIPLICATIONS = 2**24
VENDORS = ("AuthenticAMD", "HygonGenuine")


@cache
def is_faster() -> bool:
    """Whether oneDNN's products are, on this processor."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _vendor() in VENDORS
    )


def _vendor() -> str:
    """The processor's; empty where Linux does not say."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line for line in lines if line.startswith("vendor_id")).split()[-1]
    except (OSError, StopIteration):
        return ""


def mark(graph: Graph) -> None:
    """Marks a graph: its large products are oneDNN's."""
    if graph.owning_module is None or not is_faster() or _is_tuned():
        return
    if written.is_python():
        graph.owning_module.meta[MARK] = True


def _is_tuned() -> bool:
    """Whether Inductor is asked to choose how to multiply."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


@cache
def install() -> None:
    """Tells Inductor, once a process, how to lower products of marked graphs."""
    from torch._inductor import lowering

    table = lowering.lowerings
    replace(table, aten.mm.default, _lowering(table[aten.mm.default], _of_mm))
    replace(table, aten.addmm.default, _lowering(table[aten.addmm.default], _of_addmm))


def _of_mm(a: Any, b: Any, **options: Any) -> tuple[Any, Any, Any] | None:
    return None if options else (a, b, None)


def _of_addmm(bias: Any, a: Any, b: Any, **factors: Any) -> tuple[Any, Any, Any] | None:
    is_row = len(bias.get_size()) == 1 and bias.get_size()[0] == b.get_size()[1]
    is_plain = is_row and all(factor == 1 for factor in factors.values())
    return (a, b, bias) if is_plain and bias.get_dtype() == a.get_dtype() else None


def _lowering(stock: Callable[..., Any], operands: Callable[..., Any]) -> Callable[..., Any]:
    """For a product whose arguments `operands` reads: a, b and a bias or None; None if it is
    something else.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    linear = lowering.fallback_handler(
        torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False
    )

    def by_onednn(*args: Any, **kwargs: Any) -> Any:
        """The product, or None if it stays as it is."""
        found = operands(*args, **kwargs)
        if found is None or not _gains(*found[:2]):
            return None
        a, b, bias = found
        # oneDNN reads b as it lies; a is copied first if it is a part of something.
        if not _is_contiguous(a) or not (_lies(b, by_rows=True) or _lies(b, by_rows=False)):
            return None
        if bias is not None:  # read as if it were
            bias = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias))
        of_columns = lowering.lowerings[aten.permute.default](b, [1, 0])
        return linear(a, of_columns, bias, "none", [], "")

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        result = None
        if MARK in graph.module.meta:
            with faults.survived("a product by oneDNN", "a graph", "MKL multiplies"):
                result = by_onednn(*args, **kwargs)
        return stock(*args, **kwargs) if result is None else result

    return lower


def _gains(a: Any, b: Any) -> bool:
    from torch._inductor.virtualized import V

    node: Any = V.graph.current_node
    sizes = *node.args[-2].meta["val"].shape, node.meta["val"].shape[1]
    return (
        a.get_device().type == "cpu"
        and a.get_dtype() == b.get_dtype() == torch.float32
        and math.prod(map(hint, sizes)) >= LEAST_MULTIPLICATIONS
    )


def _is_contiguous(matrix: Any) -> bool:
    layout = _layout(matrix)
    return layout is not None and layout.is_contiguous()


def _lies(matrix: Any, *, by_rows: bool) -> bool:
    """Whether a matrix lies row by row, or column by column. Each may be a part of a longer one."""
    from torch._inductor.virtualized import V

    layout = _layout(matrix)
    if layout is None:
        return False
    inner, outer = (1, 0) if by_rows else (0, 1)
    is_dense = V.graph.sizevars.statically_known_equals(layout.stride[inner], 1)
    is_apart = V.graph.sizevars.statically_known_leq(layout.size[inner], layout.stride[outer])
    return bool(is_dense and is_apart)


def _layout(matrix: Any) -> Any:
    """Where a matrix lies in memory; contiguous if that was left to choose."""
    from torch._inductor import ir

    matrix = ir.ExternKernel.realize_input(matrix)
    if not ir.is_storage_and_layout(matrix):
        return None
    _, layout = ir.as_storage_and_layout(matrix, freeze=False)
    if isinstance(layout, ir.FlexibleLayout):
        _, layout = ir.as_storage_and_layout(matrix, freeze=True, want_contiguous=True)
    return layout
