"""Takes out what changes nothing.

Arithmetic: x / 1 and x * 1, as models with a scale of 1 have it. Inductor computes it where it is
used. A region would read its result, which had to be written for the region's sake, beside x
itself.

And as_strided where it is a reshape, as Inductor's own decomposition of group_norm has it in
inference: it says where elements lie, which a region need not know.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from normpass.passes.domain import extent_of, shape_of, step_of
from normpass.passes.region import product
from normpass.passes.regions import mutates

if TYPE_CHECKING:
    from collections.abc import Container

    from torch.fx import Graph

aten = torch.ops.aten
SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})


def remove_noops(graph: Graph) -> None:
    """Gives the readers of x / 1 and x * 1 x itself, unless one of them could tell."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        if _is_reshape(node):
            node.target, node.args, node.kwargs = aten.reshape.default, node.args[:2], {}
    nodes = list(graph.nodes)
    mutations = [place for place, node in enumerate(nodes) if mutates(node)]
    # What reads after something was written in place may find another x than the copy held.
    late = set(nodes[mutations[0] :]) if mutations else set()
    for node in nodes:
        if _is_noop(node) and not _is_held(node, late):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_noop(node: Node) -> bool:
    if node.target not in SCALED or len(node.args) != 2 or node.kwargs:
        return False
    x, factor = node.args
    if not isinstance(x, Node) or not isinstance(factor, int | float):
        return False
    return factor == 1 and _tensor(x) is not None and _tensor(x) == _tensor(node)


def _is_reshape(node: Node) -> bool:
    """Whether as_strided has all of a contiguous tensor, and leaves it contiguous."""
    x: Any = node.args[0]
    result = node.meta.get("val")
    before = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(before, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if len(node.args) < 3:  # x, sizes and strides by position, as AOTAutograd writes them
        return False
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    if offset not in (None, 0) or extent_of(before.storage_offset()) != 0:
        return False
    same = sympy.expand(product(shape_of(node)) - product(shape_of(x))) == 0
    return same and _is_dense(before) and _is_dense(result) and not any(map(mutates, node.users))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, for all sizes."""
    step = sympy.Integer(1)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if extent_of(size) != 1 and sympy.expand(step_of(stride) - step) != 0:
            return False
        step = step * extent_of(size)
    return True


def _tensor(node: Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return value.dtype, value.device, value.shape, value.stride()


def _is_held(node: Node, late: Container[Node]) -> bool:
    """Whether a reader gets the very memory of a result: the caller, or an op that we cannot see
    into.
    """
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        is_view = user.target is operator.getitem or (
            schema is not None and any(result.alias_info for result in schema.returns)
        )
        if user in late or (schema is None and not is_view):
            return True
        if is_view and _is_held(user, late):
            return True
    return False
