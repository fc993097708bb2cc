"""Softmax, as attention has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.decomps.conventions import Result
from normpass.decomps.registry import decomposition

if TYPE_CHECKING:
    from torch import Tensor

    from normpass.decomps.conventions import Arguments


def _asked(given: Arguments) -> torch.dtype:
    return given["dtype"] or given["self"].dtype


@decomposition(
    torch.ops.aten._safe_softmax.default,
    source="aten/src/ATen/native/transformers/attention.cpp: _safe_softmax",
    shapes="x: *n d *m -> y: *n d *m",
    results=(Result(_asked, None),),
    why="torch's own decomposition looks through each row once more for what is not -inf",
)
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    """y = softmax_d(x), and 0 where all of a row is -inf: there nothing is attended to."""
    if dtype is not None:
        x = x.to(torch.promote_types(x.dtype, dtype))
    y = x.softmax(dim)
    if x.ndim > 0 and x.shape[dim] == 0:
        return y
    # As softmax's decomposition has it: both are one node.
    return torch.where(x.amax(dim, keepdim=True) == -torch.inf, 0.0, y)
