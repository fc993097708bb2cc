"""The position of a maximum is counted along another axis first than it is read.

Checked on torch 2.11, 2.13 and 2.15: lowering.lowerings, config.unroll_reductions_threshold,
ir.ExternKernel.require_stride_order and ir.get_stride_order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor_mistakes.mistake import Mistake, decision, replace, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from normpass.backend.inductor_mistakes.mistake import Undo

aten, prims = torch.ops.aten, torch.ops.prims
ISSUE = 197434
POOLS_WITH_POSITIONS = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.fractional_max_pool2d.default,
    aten.fractional_max_pool3d.default,
)


@together
def mend_pools() -> Iterator[Undo]:
    from torch._inductor import config, lowering

    # Windows smaller than this have no loop.
    loops_from = dict.fromkeys(POOLS_WITH_POSITIONS, config.unroll_reductions_threshold)
    loops_from[prims._low_memory_max_pool_with_offsets.default] = 25
    table: dict[Any, Any] = lowering.lowerings
    for op, elements in loops_from.items():
        if op in table:
            yield replace(table, op, _pool(table[op], elements))


@together
def mend_argmax() -> Iterator[Undo]:
    from torch._inductor import lowering

    table: dict[Any, Any] = lowering.lowerings
    for op in (aten.argmax.default, aten.argmin.default):
        if op in table:
            yield replace(table, op, _full(table[op]))


def _pool(original: Callable[..., Any], loops_from: int) -> Callable[..., Any]:
    def pool(x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if math.prod(kernel) >= loops_from:
            x = _rows_first(x, len(kernel))
        return original(x, kernel, *args, **kwargs)

    return pool


def _full(original: Callable[..., Any]) -> Callable[..., Any]:
    def position(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            x = _rows_first(x, len(x.get_size()))
        return original(x, dim, keepdim)

    return position


def _rows_first(x: Any, axes: int) -> Any:
    """On a CPU with its last axes in the order of their names; channels may come last."""
    from torch._inductor.ir import ExternKernel

    order = _order(len(x.get_size()), axes) if x.get_device().type == "cpu" else None
    return x if order is None else ExternKernel.require_stride_order(x, order)


@decision(ISSUE, otherwise=None, right=False)
def _order(rank: int, axes: int) -> list[int]:
    """How far apart elements are to lie along each axis of what is lowered, 0 being next to each
    other. Where one lowering calls another, the node's first argument may be another tensor.
    """
    from torch._inductor.ir import get_stride_order
    from torch._inductor.virtualized import V

    node: Any = V.graph.current_node.args[0]
    strides = node.meta["val"].stride()
    order = list(get_stride_order(strides, V.graph.sizevars.shape_env))
    if len(order) == rank and order[-axes:] == sorted(order[-axes:], reverse=True):
        return order
    return list(reversed(range(rank)))


POOLS = Mistake(
    name="positions_in_windows",
    issue=ISSUE,
    fix=197596,
    wrong=(
        "Where columns of the input are nearer to each other than its rows, loops over a window "
        "run in that order, and the position of the maximum is counted as they run but read row by "
        "row: gradients of max pools with large windows go to the wrong elements."
    ),
    mend=mend_pools,
    fixed="2.15.0",
)
ARGMAX = Mistake(
    name="positions_in_tensors",
    issue=183082,
    fix=183655,
    wrong="As positions in windows, for argmax and argmin over all of a transposed tensor.",
    mend=mend_argmax,
)
