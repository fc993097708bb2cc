"""An operator whose derivatives, of both modes and to any order, are those of its row.

    kernel = differentiated(op, below)    what stands at its dispatch key Autograd

Autograd's tape, forward mode and each level of torch.func have a node of their own: the operator
below, and for its derivatives the row's formulas (`vjp(op)`, `jvp(op)`), through whose primitives
the next derivative goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.forward_ad import unpack_dual

from normpass.decomps.activation.kernels import positional
from normpass.decomps.activation.levels import at_jvp, in_forward_mode
from normpass.decomps.activation.torch_internals import (
    AutoDispatchBelowAutograd,
    SingleLevelFunction,
    enable_single_level_autograd_function,
    is_fwd_grad_enabled,
    set_fwd_grad_enabled,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from normpass.decomps.table.binding import jvp, vjp
from normpass.decomps.table.formulas import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from normpass.decomps.activation.torch_internals import OpOverload, TreeSpec

    Function = Callable[..., Any]


def differentiated(op: OpOverload, below: Function | None = None) -> Function:
    """A kernel for Autograd. below: the operator without derivatives, where it is not op itself."""
    below = below or op

    def kernel(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten(positional(op, args, kwargs))
        if not is_differentiated(leaves):
            with AutoDispatchBelowAutograd():
                return below(*args, **kwargs)
        places = [k for k, value in enumerate(leaves) if isinstance(value, torch.Tensor)]
        tensors = [leaves[k] for k in places]
        # The tensors are autograd's to keep.
        rest = [None if isinstance(value, torch.Tensor) else value for value in leaves]
        modes = torch.is_grad_enabled(), is_fwd_grad_enabled()
        call = _Call(op, below, rest, places, spec, modes)
        with enable_single_level_autograd_function():
            flat = _Node.apply(call, *tensors)
        return tree_unflatten(list(flat), call.results)

    return kernel


def is_differentiated(values: Iterable[Any]) -> bool:
    """Whether a call with these arguments is to have a node, at the innermost level."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if in_forward_mode() or at_jvp():
        return bool(tensors)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@dataclass
class _Call:
    """One call of an operator: what of its arguments is no tensor, where the tensors belong, and
    whether reverse and forward mode were on.
    """

    op: OpOverload
    below: Function
    leaves: list[Any]
    places: Sequence[int]
    spec: TreeSpec
    modes: tuple[bool, bool]
    results: TreeSpec | None = None

    def arguments(self, tensors: Iterable[Any]) -> list[Any]:
        """The operator's arguments, with these for its tensors."""
        leaves = list(self.leaves)
        for k, tensor in zip(self.places, tensors, strict=True):
            leaves[k] = tensor
        arguments: list[Any] = tree_unflatten(leaves, self.spec)
        return arguments

    def run(self, tensors: Iterable[Any]) -> Any:
        row = vjp(self.op).row
        given = dict(zip(row.arguments, self.arguments(tensors), strict=True))
        by_name = {name: given.pop(name) for name in row.keywords}
        # What a Function turns off while it runs would be off at outer levels too.
        modes = torch.set_grad_enabled(self.modes[0]), set_fwd_grad_enabled(self.modes[1])
        with modes[0], modes[1], AutoDispatchBelowAutograd():
            return self.below(*given.values(), **by_name)


# A Function of one level: what apply() of the public class does below transforms of torch.func is
# for Functions that are no operators.
class _Node(SingleLevelFunction):  # type: ignore[misc]
    """A call of an operator on the tape."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Any, ...]:
        results = call.run(tensors)
        flat, call.results = tree_flatten(results)
        row = vjp(call.op).row
        constant = row.is_constant(row.known(call.arguments(tensors), results))
        ctx.fixed = [False] * len(flat) if row.is_list else list(constant)
        ctx.mark_non_differentiable(
            *(y for y, fixed in zip(flat, ctx.fixed, strict=True) if fixed and y is not None)
        )
        ctx.call, ctx.number = call, len(tensors)
        ctx.save_for_backward(*tensors, *flat)
        ctx.save_for_forward(*tensors, *flat)
        ctx.set_materialize_grads(False)
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, args, results = _known(ctx)
        derivative = vjp(call.op)
        asked = _by_argument(call, ctx.needs_input_grad[1:])
        needs = [
            name
            for name, wanted in zip(derivative.row.arguments, asked, strict=True)
            if name in derivative.row.differentiable and any(w is True for w in tree_leaves(wanted))
        ]
        found = derivative(_structured(call, grads), args, results, needs)
        given = zip(derivative.row.arguments, args, strict=True)
        each = [_like(found.get(name), value) for name, value in given]
        return None, *_tensors_of(call, each)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        # A Function's jvp runs with forward mode off, which would be off at outer levels too.
        with set_fwd_grad_enabled(ctx.call.modes[1]):
            call, args, results = _known(ctx, _without_tangent)
            moved = jvp(call.op)(_by_argument(call, tangents), args, results)
            flat = zip(ctx.fixed, tree_leaves(list(moved)), tree_leaves(results), strict=True)
            return tuple(
                torch.zeros_like(y) if t is None and is_number(y) and not fixed else t
                for fixed, t, y in flat
            )


def _without_tangent(value: Tensor) -> Tensor:
    """A tensor at this level of forward mode; what outer levels know of it stays."""
    return unpack_dual(value, level=0).primal  # there is one, also where Python has not entered it


def _known(ctx: Any, of_each: Function = lambda value: value) -> tuple[_Call, list[Any], Any]:
    """The call, its arguments and its results."""
    saved = [value if value is None else of_each(value) for value in ctx.saved_tensors]
    flat = list(saved[ctx.number :])
    return ctx.call, ctx.call.arguments(saved[: ctx.number]), tree_unflatten(flat, ctx.call.results)


def _structured(call: _Call, flat: Sequence[Any]) -> list[Any]:
    """A value for each result; of a list of results one list."""
    value = tree_unflatten(list(flat), call.results)
    return list(value) if isinstance(value, tuple) else [value]


def _by_argument(call: _Call, values: Iterable[Any]) -> list[Any]:
    """Of what each tensor has, what each argument has; None for what is no tensor."""
    leaves: list[Any] = [None] * len(call.leaves)
    for k, value in zip(call.places, values, strict=True):
        leaves[k] = value
    found: list[Any] = tree_unflatten(leaves, call.spec)
    return found


def _like(gradient: Any, value: Any) -> Any:
    """A gradient with the structure of its argument: None for each tensor of a list."""
    if gradient is None and isinstance(value, list | tuple):
        return [None] * len(value)
    return gradient


def _tensors_of(call: _Call, each: list[Any]) -> list[Any]:
    leaves = tree_leaves(each)
    return [leaves[k] for k in call.places]
