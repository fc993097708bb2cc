"""Rules as the dispatcher calls them: what stands at an operator's dispatch key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.decomps.activation.levels import (
    BatchLevel,
    constant,
    may_be_differentiated,
    needs_composition,
)
from normpass.decomps.activation.torch_internals import (
    FUNCTORCH_BATCHED,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
)

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def kernel(*args: Any, **kwargs: Any) -> Any:
        level = BatchLevel()
        plain, in_dims = level.unwrapped(positional(op, args, kwargs))
        with ExcludeDispatchKeyGuard(DispatchKeySet(FUNCTORCH_BATCHED)):
            outs, out_dims = rule(level.info, in_dims, *plain)
        outs = with_constants(rule, outs)
        if not isinstance(outs, tuple):  # one result, as register_vmap has it
            return level.wrap(outs, out_dims)
        wrapped = tuple(level.wrap(out, dim) for out, dim in zip(outs, out_dims, strict=True))
        return wrapped if len(op._schema.returns) > 1 else wrapped[0]

    return kernel


def positional(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call in the schema's order; those that are left out are the defaults."""
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]
