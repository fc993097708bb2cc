"""torch.ops.normpass.<formula>: a formula as an operator.

Below autograd the operator is one node of a graph, which `decompositions()` resolves. Everywhere
else it is what the formula computes: autograd, forward mode and vmap go through its primitives, so
it can be differentiated to any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from normpass.decomps.levels import is_wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

_library = torch.library.Library("normpass", "FRAGMENT")


def define(schema: str, function: Callable[..., Any]) -> OpOverload:
    """The operator of this schema that computes this function of its arguments."""
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    base, _, overload = name.partition(".")
    op: OpOverload = getattr(getattr(torch.ops.normpass, base), overload or "default")

    def differentiable(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if is_differentiated(args):
            return function(*args, **kwargs)
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    _library.impl(name, function, "CompositeExplicitAutograd")
    _library.impl(name, function, "FuncTorchBatched")
    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    return op


def is_differentiated(args: tuple[Any, ...]) -> bool:
    """Whether a derivative through the operator may be asked for."""
    tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return torch.autograd.forward_ad._current_level >= 0 or any(map(is_wrapped, tensors))
