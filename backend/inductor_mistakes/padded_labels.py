"""Labels that are padded with -1 count as the first class.

Checked on torch 2.11 and 2.13: torch._decomp.decomposition_table, decomposition.decompositions and
fast_random_decomps, which is a copy of it, and OpOverload.py_kernels and _dispatch_cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey

from normpass.backend.inductor_mistakes.mistake import Mistake, replace, together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from normpass.backend.inductor_mistakes.mistake import Undo

OP: Any = torch.ops.aten.multilabel_margin_loss_forward.default
NONE, MEAN = 0, 1


@together
def mend() -> Iterator[Undo]:
    from torch._decomp import decomposition_table
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    tables: list[Any] = [decomposition_table, decompositions, fast_random_decomps()]
    yield OP._dispatch_cache.clear
    for table in tables:
        if OP in table:
            yield replace(table, OP, loss_forward)
    yield replace(OP.py_kernels, DispatchKey.Autograd, loss_forward)
    OP._dispatch_cache.clear()


def loss_forward(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss of (N, C) or (C), and which classes are labels; labels end at the first -1. A
    number alone is one class.

    Source: multilabel_margin_loss_forward of LossMultiLabelMargin.cpp.

    Raises:
        RuntimeError: for an input of another shape or without a class, and for a target that is
            not shaped alike.
    """
    torch._check(
        x.ndim <= 2 and (x.ndim == 0 or x.shape[-1] != 0),
        lambda: f"expected an input of shape (N, C) or (C) with C > 0; found {tuple(x.shape)}",
    )
    torch._check(
        target.shape == x.shape or (max(target.ndim, x.ndim) < 2 and target.numel() == x.numel()),
        lambda: (
            f"expected a target of the input's shape {tuple(x.shape)}; found {tuple(target.shape)}"
        ),
    )
    x, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = torch.arange(x.shape[1], device=x.device)
    is_label = (labels == -1).cumsum(1) == 0
    labels = torch.where(is_label, labels, 0)
    is_target = ((classes == labels.unsqueeze(2)) & is_label.unsqueeze(2)).any(1)
    margins = (1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1)).clamp_min(0)
    counted = is_label.unsqueeze(2) & ~is_target.unsqueeze(1)
    loss = torch.where(counted, margins, 0).sum((1, 2)) / x.shape[1]
    if reduction != NONE or target.ndim < 2:
        loss = loss.mean() if reduction == MEAN else loss.sum()
    return loss, is_target.to(x.dtype).view(target.shape)


MISTAKE = Mistake(
    name="padded_labels",
    issue=185464,
    fix=189552,
    wrong=(
        "multilabel_margin_loss takes the labels after the first -1, which end a row's labels, for "
        "labels of class 0: the loss and its gradients are those of other targets."
    ),
    mend=mend,
    fixed="2.15.0",
)
