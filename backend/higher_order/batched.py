"""Backwards that vmap runs over: torch.func.vmap, or that of is_grads_batched=True.

Compiled code takes plain tensors. So the cotangents are unwrapped, one axis in front for all levels
together, and the program whose gradients are batched is compiled as a whole.

Private, checked on torch 2.11, 2.13 and 2.15: is_legacy_batchedtensor, torch._remove_batch_dim and
_add_batch_dim, _vmapmode_increment_nesting, the key VmapMode: what is_grads_batched=True uses.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normpass.decomps.activation import levels
from normpass.decomps.activation.torch_internals import peek_interpreter_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Gradients = Sequence[Tensor | None]

_IS_LEGACY = torch._C._functorch.is_legacy_batchedtensor
_VMAP_KEY: Any = torch._C._parse_dispatch_key("VmapMode")
_VMAP_MODE = torch._C.DispatchKeySet(_VMAP_KEY)


def is_batched(gradients: Sequence[Any]) -> bool:
    """Whether vmap runs over a backward with these cotangents."""
    if peek_interpreter_stack() is not None:
        return True
    for gradient in gradients:  # noqa: SIM110 (any() takes twice the time, in each backward)
        if gradient is not None and _IS_LEGACY(gradient):
            return True
    return False


def below_vmap(
    cotangents: Sequence[Tensor], pull_back: Callable[[Sequence[Tensor]], Gradients]
) -> Gradients:
    """Gradients for batched cotangents, by a function of plain ones with one more axis in front,
    which its results have too.

    Raises:
        RuntimeError: if there is a level that is not one of vmap.
    """
    if not levels.in_transform():
        return _below_legacy(cotangents, pull_back)
    if not levels.only_vmap():
        raise RuntimeError(
            "a backward of compiled code inside of torch.func transforms: expected levels of vmap "
            "alone, found one of grad or jvp; call the compiled function inside of the transform"
        )
    with contextlib.ExitStack() as lowered:
        axis = levels.OneAxis(cotangents, lowered)
        found = pull_back(axis.values)
    return [None if g is None else axis.wrap(g) for g in found]


def _below_legacy(
    cotangents: Sequence[Tensor], pull_back: Callable[[Sequence[Tensor]], Gradients]
) -> Gradients:
    innermost = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    sizes: list[int] = []
    values = list(cotangents)
    with torch._C._ExcludeDispatchKeyGuard(_VMAP_MODE):
        for level in range(innermost, 0, -1):
            # A tensor without that level gets an axis of this size.
            values = [torch._remove_batch_dim(value, level, 1, 0) for value in values]
            sizes.insert(0, max(value.shape[0] for value in values))
            values = [value.expand(sizes[0], *value.shape[1:]) for value in values]
        values = [value.flatten(0, innermost - 1) for value in values]
        found = [None if g is None else g.unflatten(0, sizes) for g in pull_back(values)]
    for level in range(1, innermost + 1):
        found = [None if g is None else torch._add_batch_dim(g, 0, level) for g in found]
    return found
