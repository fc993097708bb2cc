"""Rules as the dispatcher calls them: what stands at an operator's dispatch key."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.levels import (
    BatchLevel,
    constant,
    in_forward_mode,
    in_transform,
    may_be_differentiated,
    needs_composition,
)
from normpass.decomps.activation.torch_internals import (
    FUNCTORCH_BATCHED,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from normpass.decomps.activation.torch_internals import OpOverload
    from normpass.decomps.registry import Rule

    Function = Callable[..., Any]


def derived(composition: Rule, own: Function) -> Function:
    """A kernel for Autograd: `own`, or where its derivatives would not be right the composition."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if needs_composition():
            return with_constants(composition, composition(*args, **kwargs))
        return own(*args, **kwargs)

    return kernel


def checked(
    check: Callable[..., None], kernel_before: Callable[[Function], Function], own: Function
) -> Function:
    """A kernel for Autograd that first raises what is wrong with the arguments."""
    below = kernel_before(own)

    def kernel(*args: Any) -> Any:
        check(*args)
        return below(*args)

    return kernel


def widened(own: Function) -> Function:
    """cuDNN's batch norm, of a half input in the dtype of its parameters, in which it saves the
    statistics: on the CPU torch's decomposition saves halves, and gradients have that error.
    """

    def kernel(input: Tensor, weight: Tensor | None, *rest: Any) -> Any:
        on_cpu = input.device.type == "cpu"
        if weight is None or weight.dtype == input.dtype or not on_cpu:
            return own(input, weight, *rest)
        y, *saved = own(input.to(weight.dtype), weight, *rest)
        return y.to(input.dtype), *saved

    return kernel


def recorded() -> bool:
    """Whether a backward of now has a derivative on the tape, and not in forward mode or below
    torch.func, where its operator is decomposed.
    """
    return torch.is_grad_enabled() and not (in_forward_mode() or in_transform())


def second_derivative(op: OpOverload, rule: Function) -> Function:
    """Gives results of a norm's backward, f(outs, args), the derivative of a rule.

    The node stays torch's, with a hook: one of our own would take five times as long. Where nobody
    may ask for the derivative of what the node returns, that is right; elsewhere the hook replaces
    it, since in it the saved statistics are constants.
    """
    names = [argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)]
    fixed = [name for name in names if not name.startswith("running")]

    def hook(
        args: Sequence[Any],
        found: tuple[Tensor | None, ...],
        grads: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...] | None:
        if not (torch.is_grad_enabled() or in_forward_mode() or in_transform()):
            return None
        # torch's node has an edge for each tensor, or none for running statistics.
        edges = dict(zip(names if len(found) == len(names) else fixed, found, strict=True))
        needs = [name for name, gradient in edges.items() if gradient is not None]
        right = rule(grads, *args, needs=needs)
        return tuple(right.get(name) if name in needs else None for name in edges)

    def enter(outs: tuple[Any, ...], args: Sequence[Any]) -> None:
        for out in outs:
            if out is not None and out.requires_grad:
                out.grad_fn.register_hook(functools.partial(hook, args))
                return

    return enter


def weighted(op: OpOverload) -> Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Any]]:
    """f(args, kwargs) -> the arguments of a norm's backward, a layer norm's with a weight of ones
    where there is a bias and no weight: there torch's derivative of it is zero, or an error.
    """
    names = [name for name, _ in _defaults(op)]
    if "bias" not in names:
        return lambda args, kwargs: positional(op, args, kwargs)
    w, b, mask = (names.index(name) for name in ("weight", "bias", "output_mask"))

    def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        values = positional(op, args, kwargs)
        if values[w] is None and values[b] is not None:
            values[w] = torch.ones_like(values[b])
            values[mask] = [values[mask][0], False, values[mask][2]]
        return values

    return given


def with_constants(rule: Rule, results: Any) -> Any:
    """What a rule returned, without derivatives where its operator has none."""
    if not rule.constants or not may_be_differentiated(results):
        return results
    return tuple(
        constant(result) if number in rule.constants else result
        for number, result in enumerate(results)
    )


def batched(op: OpOverload, rule: Rule) -> Function:
    """A kernel for FuncTorchBatched from a batching rule f(info, in_dims, *args).

    Tensors of the current level of vmap are unwrapped and results wrapped again. The body runs with
    this key excluded, not below the level: so autograd and outer levels still see what it does.
    """

    excluded, several = DispatchKeySet(FUNCTORCH_BATCHED), len(op._schema.returns) > 1

    def kernel(*args: Any, **kwargs: Any) -> Any:
        level = BatchLevel()
        plain, in_dims = level.unwrapped(positional(op, args, kwargs))
        with ExcludeDispatchKeyGuard(excluded):
            outs, out_dims = rule(level.info, in_dims, *plain)
        outs = with_constants(rule, outs)
        if not isinstance(outs, tuple):  # one result, as register_vmap has it
            return level.wrap(outs, out_dims)
        wrapped = tuple(level.wrap(out, dim) for out, dim in zip(outs, out_dims, strict=True))
        return wrapped if several else wrapped[0]

    return kernel


def positional(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call in the schema's order; those that are left out are the defaults."""
    defaults = _defaults(op)
    if len(args) == len(defaults):
        return list(args)
    return [*args, *(kwargs.get(name, default) for name, default in defaults[len(args) :])]


@functools.cache
def _defaults(op: OpOverload) -> list[tuple[str, Any]]:
    """Names and defaults of an operator's arguments: a schema makes them anew each time."""
    return [(argument.name, argument.default_value) for argument in op._schema.arguments]
