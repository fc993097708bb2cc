"""Backwards of pooling read indices as if they lay one after the other.

Checked on torch 2.11, 2.13 and 2.15: the dictionary _maybe_layout_constraints of
torch._inductor.lowering, and ir.ExternKernel.require_contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor_mistakes.mistake import Mistake, replace

if TYPE_CHECKING:
    from normpass.backend.inductor_mistakes.mistake import Undo


def mend() -> Undo:
    from torch._inductor import ir, lowering

    operator = torch.ops.aten.adaptive_max_pool3d_backward.default
    contiguous = ir.ExternKernel.require_contiguous

    def with_contiguous_indices(
        _node: Any, gradient: Any, x: Any, indices: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (gradient, x, contiguous(indices)), {}

    return replace(lowering._maybe_layout_constraints, operator, with_contiguous_indices)


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
