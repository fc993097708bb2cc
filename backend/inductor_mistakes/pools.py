"""Backwards of pooling read indices as if they lay one after the other.

Checked on torch 2.11, 2.13 and 2.15: the dictionary _maybe_layout_constraints of
torch._inductor.lowering, and ir.ExternKernel.require_contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor_mistakes.mistake import Mistake

if TYPE_CHECKING:
    from normpass.backend.inductor_mistakes.mistake import Undo

_ABSENT: Any = object()


def mend() -> Undo:
    from torch._inductor import ir, lowering

    operator = torch.ops.aten.adaptive_max_pool3d_backward.default
    constraints: dict[Any, Any] = lowering._maybe_layout_constraints
    contiguous = ir.ExternKernel.require_contiguous
    before = constraints.get(operator, _ABSENT)

    def with_contiguous_indices(
        _node: Any, gradient: Any, x: Any, indices: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (gradient, x, contiguous(indices)), {}

    constraints[operator] = with_contiguous_indices

    def undo() -> None:
        if constraints.get(operator) is not with_contiguous_indices:
            return
        if before is _ABSENT:
            del constraints[operator]
        else:
            constraints[operator] = before

    return undo


MISTAKE = Mistake(
    name="indices_of_pools",
    issue=197888,
    fix=None,
    wrong=(
        "The backward of adaptive_max_pool3d reads its indices as if they were contiguous, and for "
        "inputs in channels_last_3d Inductor lays them out as the input: gradients go to the wrong "
        "elements."
    ),
    mend=mend,
    since="2.12",
    fixed="2.15.0",
)
