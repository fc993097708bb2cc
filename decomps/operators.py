"""torch.ops.normpass.<formula>: a formula as an operator.

Below autograd the operator is one node of a graph, which `decompositions()` resolves. Everywhere
else it is what the formula computes: autograd, forward mode and vmap go through its primitives, so
it can be differentiated to any order.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.levels import in_forward_mode, is_wrapped
from normpass.decomps.activation.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    SetExcludeDispatchKeyGuard,
    TracingContext,
    after_autograd_keyset,
    is_excluded,
    len_torch_dispatch_stack,
    tree_leaves,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.decomps.activation.torch_internals import OpOverload

_library = torch.library.Library("normpass", "FRAGMENT")


def define(schema: str, function: Callable[..., Any]) -> OpOverload:
    """The operator of this schema that computes this function of its arguments."""
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    base, _, overload = name.partition(".")
    op: OpOverload = getattr(getattr(torch.ops.normpass, base), overload or "default")

    def differentiable(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # Nested tensors have no kernels below autograd, neither these nor those of the subclass.
        if keyset.has(DispatchKey.AutogradNestedTensor) or is_differentiated(args):
            return function(*args, **kwargs)
        return op.redispatch(keyset & after_autograd_keyset, *args, **kwargs)

    _library.impl(name, _with_lazy_tensors(function), "CompositeExplicitAutograd")
    _library.impl(name, function, "FuncTorchBatched")
    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    return op


_LAZY = tuple(getattr(DispatchKey, key) for key in ("Conjugate", "Negative", "ZeroTensor"))


def _with_lazy_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for whose tensors a conjugate may be a mark and no copy.

    A compiled graph calls its operators with the keys excluded that see to such marks (torch 2.11
    to 2.14): of g * r.conj() the kernel would have made g * r, without a word.
    """

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        excluded = [k for k in _LAZY if is_excluded(k)]
        if not excluded:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as guards:
            for key in excluded:
                guards.enter_context(SetExcludeDispatchKeyGuard(key, False))
            return function(*args, **kwargs)

    return kernel


def is_concrete(value: torch.Tensor) -> bool:
    """Whether a tensor's numbers may be asked for: in eager mode, below no transform."""
    traced = torch.compiler.is_compiling() or len_torch_dispatch_stack() > 0
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
    return plain and not traced and not is_wrapped(value)


def is_recorded_apart() -> bool:
    """Whether a graph is being recorded that may be differentiated afterwards: by make_fx itself,
    and not for torch.compile, which has the tape in its graph.
    """
    return len_torch_dispatch_stack() > 0 and TracingContext.try_get() is None


def is_differentiated(args: tuple[Any, ...]) -> bool:
    """Whether a derivative through the operator may be asked for."""
    tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return in_forward_mode() or any(map(is_wrapped, tensors))
