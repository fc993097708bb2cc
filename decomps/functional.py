"""A module as a function of its parameters and buffers, that returns its new buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

from normpass.decomps.activation.torch_internals import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


def functional_call_with_buffers(
    module: nn.Module,
    parameters_and_buffers: Mapping[str, Tensor],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
) -> tuple[Any, dict[str, Tensor]]:
    """What a module returns, and its buffers after the call; the module stays as it is.

    torch.func.functional_call for modules that write to their buffers: batch norm's running
    statistics and counter of calls, spectral norm's singular vectors. Transforms of torch.func
    refuse a write to a tensor that they did not make; here the module writes to copies, which are
    returned:

        def loss(parameters, buffers, x):
            y, buffers = functional_call_with_buffers(model, {**parameters, **buffers}, (x,))
            return y.square().mean(), buffers

        gradients, buffers = torch.func.grad(loss, has_aux=True)(parameters, buffers, x)

    Under vmap each example has buffers of its own.

    Args:
        parameters_and_buffers: by the names of `named_parameters` and `named_buffers`, in place of
            the module's own, which are used for the others.
        args: of the module; one that is no tuple stands alone.
        kwargs: of the module.

    Returns:
        The module's result, and every buffer by its name.
    """
    given = dict(parameters_and_buffers)
    tensors = [x for x in tree_leaves((given, args, kwargs)) if isinstance(x, Tensor)]
    buffers = {name: given.get(name, buffer) for name, buffer in module.named_buffers()}
    # Batched where anything given is: what is written to it then is.
    zeros = {device: _zero_of(tensors, device) for device in {b.device for b in buffers.values()}}
    buffers = {name: buffer + zeros[buffer.device] for name, buffer in buffers.items()}
    result = functional_call(module, {**given, **buffers}, args, kwargs)
    return result, buffers


def _zero_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """False, for each example where vmap has batched one of these."""
    zero = torch.zeros((), dtype=torch.bool, device=device)
    for x in tensors:
        zero = zero | x.new_zeros((), dtype=torch.bool, device=device)
    return zero
