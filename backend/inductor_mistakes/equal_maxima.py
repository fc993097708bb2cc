"""A gradient goes where a value equals its maximum, and the value is computed a second time.

Checked on torch 2.11, 2.13 and 2.15: compile_fx.min_cut_rematerialization_partition, which heeds
node.meta["recompute"], lowering.lowerings, and V.graph.env.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from normpass.backend.inductor_mistakes.mistake import Mistake, decision, replace, together, wrap
from normpass.backend.inductor_mistakes.nodes import VIEWS, before

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule, Node

    from normpass.backend.inductor_mistakes.mistake import Undo

aten = torch.ops.aten
ISSUE = 186799
REDUCTIONS = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
# What gives the same bits whenever it is computed.
EXACT = (
    *VIEWS,
    aten.abs.default,
    aten.neg.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)


@together
def mend() -> Iterator[Undo]:
    from torch._inductor import compile_fx, lowering

    table: dict[Any, Any] = lowering.lowerings
    yield wrap(compile_fx, "min_cut_rematerialization_partition", _keeping_what_is_compared)
    for op in REDUCTIONS:
        if op in table:
            yield replace(table, op, _of_what_is_stored(table[op]))


def _compared(reduction: Node) -> Node | None:
    """The operation whose results are compared with the reduction's, unless it is an input."""
    node = before(reduction.args[0], EXACT)
    return node if isinstance(node, torch.fx.Node) and node.op == "call_function" else None


def _decides(maximum: Node) -> bool:
    """Whether something is compared with a maximum. A softmax's is only subtracted."""
    return any(
        user.target in (aten.eq.Tensor, aten.ne.Tensor) or (user.target in EXACT and _decides(user))
        for user in maximum.users
    )


@decision(ISSUE, otherwise=None, right=False)
def _mark(joint: GraphModule) -> None:
    for op in REDUCTIONS:
        for reduction in joint.graph.find_nodes(op="call_function", target=op):
            node = _compared(reduction)
            if node is not None and _decides(reduction):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@decision(ISSUE, otherwise=None, right=False)
def _store(x: Any) -> None:
    from torch._inductor.virtualized import V

    current = V.graph.current_node
    node = _compared(current) if current.target in REDUCTIONS else None
    if node is None or node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE:
        return
    # What nobody needs any more is not in env. What is saved may be a view of the node.
    views = [user for user in node.users if user.target in EXACT]
    for value in (x, *(V.graph.env[each] for each in (node, *views) if each in V.graph.env)):
        value.realize()


def _keeping_what_is_compared(original: Callable[..., Any]) -> Callable[..., Any]:
    """The backward reads what the forward computed."""

    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        _mark(joint)
        return original(joint, *args, **kwargs)

    return partition


def _of_what_is_stored(original: Callable[..., Any]) -> Callable[..., Any]:
    """The reduction reads what is saved for the backward, and does not compute it for itself."""

    def lowered(x: Any, *args: Any, **kwargs: Any) -> Any:
        _store(x)
        return original(x, *args, **kwargs)

    return lowered


MISTAKE = Mistake(
    name="equal_maxima",
    issue=ISSUE,
    fix=186953,
    wrong=(
        "The gradient of amax, amin and full max and min goes to the elements that equal the "
        "maximum. The backward computes these elements anew, in another loop that rounds a tanh or "
        "an exp otherwise: none is equal, and gradients are zero or NaN."
    ),
    mend=mend,
)
