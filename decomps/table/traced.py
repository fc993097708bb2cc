"""Operators whose derivatives are the table's while something is traced: where PyTorch's own are
wrong, slow, or a graph that grows with a size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.decomps.registry import DECLARED, declared_derivatives, find_op
from normpass.decomps.table.nodes import differentiated

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from normpass.decomps.activation.torch_internals import OpOverload

OWN = ("aten", "prims")
"""The namespaces of torch's own operators."""

# Operator -> why.
BETTER = {
    "aten.linalg_householder_product.default": "a graph of 20 nodes a column, and a loop over them",
    "aten.ormqr.default": "a graph of 20 nodes a column, and a loop over them",
    "aten.logcumsumexp.default": "logarithms of positive and negative gradients apart; NaN after "
    "the second order",
    "aten.cumprod.default": "looks for zeros, which a trace cannot: all products anew instead",
    "aten.scatter_reduce.two": "sums over counts of zeros; the tangent of a product of several is "
    "wrong",
    "aten.index_reduce.default": "products once more for each zero",
}


def kernels() -> dict[OpOverload, Callable[..., Any]]:
    """What stands at these operators' dispatch key Autograd."""
    ops = [op for op in map(find_op, BETTER) if op is not None]
    return {op: differentiated(op) for op in ops} | of_users()


def of_users() -> dict[OpOverload, Callable[..., Any]]:
    """The same of torch's own operators whose derivative somebody has declared."""
    ops = {op for _, op in DECLARED if not isinstance(op, str) and op.namespace in OWN}
    return {op: differentiated(op) for op in ops if declared_derivatives(op)}
