"""A scatter is written in place where its input is still needed as it was.

Checked on torch 2.11, 2.13 and 2.15: fx_passes.reinplace.inplaceable_ops, InplaceableOp.extra_check
and _generalized_scatter.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from normpass.backend.inductor_mistakes.mistake import Mistake, decision, replace, together
from normpass.backend.inductor_mistakes.nodes import storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Node

    from normpass.backend.inductor_mistakes.mistake import Undo

aten = torch.ops.aten
ISSUE = 156786


def mend() -> Undo:
    return only_in_place_if(_keeps_what_is_needed)


@together
def only_in_place_if(allowed: Callable[[Node], bool]) -> Iterator[Undo]:
    """Inductor writes a scatter in place only where `allowed` says so too."""
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    def narrowed(entry: Any) -> Any:
        return dataclasses.replace(
            entry, extra_check=lambda node: allowed(node) and entry.extra_check(node)
        )

    table: dict[Any, Any] = inplaceable_ops
    for op in scatters():
        if op in table:
            yield replace(table, op, narrowed(table[op]))


def scatters() -> tuple[Any, ...]:
    from torch._inductor.fx_passes.reinplace import _generalized_scatter

    return aten.index_put.default, aten._unsafe_index_put.default, _generalized_scatter


@decision(ISSUE, otherwise=False)
def _keeps_what_is_needed(node: Node) -> bool:
    return not (_overlaps(node) or _reads_itself(node) or _is_joined(node))


def _overlaps(node: Node) -> bool:
    """Several elements of its input lie in one place."""
    (written, *_) = node.args
    value = written.meta.get("val") if isinstance(written, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and torch._debug_has_internal_overlap(value) == 1


def _reads_itself(node: Node) -> bool:
    """Its values or indices are a view of its input."""
    place = storage(node.args[0])
    others = tree_leaves((node.args[1:], node.kwargs))
    return place is not None and any(storage(other) == place for other in others)


def _is_joined(node: Node) -> bool:
    """Its input lies in what torch.cat made of it, where it must stay as it was."""
    place = storage(node.args[0])
    joined = node.graph.find_nodes(op="call_function", target=aten.cat.default)
    return place is not None and any(
        storage(each) == place for cat in joined for each in (cat, *cat.all_input_nodes)
    )


MISTAKE = Mistake(
    name="scatters_in_place",
    issue=ISSUE,
    fix=160311,
    wrong=(
        "index_put, index_add, index_copy and slices that are assigned to are written in place "
        "although the values are read from the same memory, although the input is expanded "
        "(183986), or although its memory is by then a part of what torch.cat made (177821)."
    ),
    mend=mend,
    fixed="2.15.0",
)
