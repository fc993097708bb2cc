"""An autograd.Function as a node of one level: of the tape, of forward mode, of a transform.

    node = node_of(Function, below)      below(args): what its forward is below this level
    results = applied(node, args)

The Function's own setup_context, backward and jvp run on the tensors of that level. A Function
without a jvp gets the transpose of its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.forward_ad import unpack_dual

from normpass.decomps.activation.levels import at_jvp, in_forward_mode
from normpass.decomps.activation.torch_internals import (
    SingleLevelFunction,
    enable_single_level_autograd_function,
    set_fwd_grad_enabled,
    tree_map,
)
from normpass.decomps.table.transposes import transposed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    FunctionClass = type[torch.autograd.Function]

_BASE = torch.autograd.Function


def applied(node: Any, args: Sequence[Any]) -> Any:
    """What a node returns for these arguments, in this level's graph."""
    with enable_single_level_autograd_function():
        return node.apply(*args)


def node_of(function: FunctionClass, below: Callable[[tuple[Any, ...]], Any]) -> Any:
    """The node of an autograd.Function whose forward is the function `below` of its arguments."""
    has_jvp = function.jvp is not _BASE.jvp

    def forward(*args: Any) -> Any:
        return below(args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function.setup_context(ctx, inputs, output)
        if not has_jvp and (in_forward_mode() or at_jvp()):
            _keep_for_transpose(ctx, inputs, output)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        # apply() has turned forward mode off, which would hold for outer levels too.
        with set_fwd_grad_enabled(True):
            if has_jvp:
                return function.jvp(_AtLevel(ctx), *tangents)
            return _transposed_backward(function, ctx, tangents)

    # backward's other name, which replaces it.
    others = {} if function.vjp is _BASE.vjp else {"vjp": staticmethod(function.vjp)}
    if function.backward is not _BASE.backward:
        others["backward"] = staticmethod(function.backward)
    members = {"forward": forward, "setup_context": setup_context, "jvp": jvp}
    members = {name: staticmethod(member) for name, member in members.items()}
    return type(function.__name__, (SingleLevelFunction,), {**members, **others})


class _AtLevel:
    """A context as a jvp sees it: its tensors have no tangents of this level, since the jvp runs
    with forward mode on, for outer levels. What those know of them stays.
    """

    def __init__(self, ctx: Any, **instead: Any) -> None:
        instead["normpass_in_forward_mode"] = True
        self.__dict__.update(inner=ctx, instead=instead)

    def __getattr__(self, name: str) -> Any:
        if name in self.instead:
            return self.instead[name]
        return without_tangent(getattr(self.inner, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


def without_tangent(value: Any) -> Any:
    """A value whose tensors have no tangent at the innermost level of forward mode."""
    return tree_map(
        lambda x: unpack_dual(x, level=0).primal if isinstance(x, torch.Tensor) else x, value
    )


# --- forward mode without a jvp -----------------------------------------------------------------


def _keep_for_transpose(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """For as long as the node is applied: what backward asks for, the inputs and the results."""
    saved = tuple(getattr(ctx, "to_save", None) or ())
    outs = output if isinstance(output, tuple) else (output,)
    constant = [id(out) for out in getattr(ctx, "non_differentiable", None) or ()]
    ctx.normpass_transpose = (
        len(saved),
        len(inputs),
        [isinstance(x, torch.Tensor) and is_number(x) and id(x) not in constant for x in outs],
        [next((k for k, x in enumerate(inputs) if x is y), None) for y in outs],
    )
    rest = [x if isinstance(x, torch.Tensor) else None for x in (*inputs, *outs)]
    ctx.save_for_forward(*saved, *rest)


def is_number(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _transposed_backward(
    function: FunctionClass, ctx: Any, tangents: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The tangents of the results: the derivative of the gradients along them."""
    saved = without_tangent(ctx.saved_tensors)
    first, number, free, written = ctx.normpass_transpose
    del ctx.normpass_transpose
    inputs, outs = saved[first : first + number], saved[first + number :]
    moved = [k for k, t in enumerate(tangents) if t is not None]
    needs = tuple(k in moved for k in range(number))
    at_level = _AtLevel(ctx, saved_tensors=saved[:first], needs_input_grad=needs)
    places = [k for k, wanted in enumerate(free) if wanted]
    fixed = {
        k: torch.zeros_like(x) for k, x in enumerate(outs) if k not in places and x is not None
    }
    backward = function.backward if function.vjp is _BASE.vjp else function.vjp

    asked: list[Tensor] = []

    def pulled(*grads: Tensor) -> list[Tensor]:
        given = {**fixed, **dict(zip(places, grads, strict=True))}
        found = backward(at_level, *(given.get(k) for k in range(len(outs))))
        found = found if isinstance(found, tuple) else (found,)
        asked.extend(found[k] for k in moved if found[k] is not None)
        return [_of_input(function, found[k], inputs[k]) for k in moved]

    along = [t.clone() if k in written else t for k, t in enumerate(tangents) if t is not None]
    values = transposed(pulled, [outs[k] for k in places], along)
    if asked and all(value is None for value in values):
        raise _no_jvp(function)
    by_place = dict(zip(places, values, strict=True))

    def tangent(k: int) -> Any:
        """None of a constant. Where the forward has written to an input, so is to its tangent."""
        if not free[k]:
            return None
        found = torch.zeros_like(outs[k]) if by_place[k] is None else by_place[k]
        before = None if written[k] is None else tangents[written[k]]
        return found if before is None else before.copy_(found)

    return tuple(map(tangent, range(len(free))))


def _of_input(function: FunctionClass, gradient: Tensor | None, value: Tensor) -> Tensor:
    """A gradient as autograd would add it to its input's. None is zero."""
    if gradient is None:
        return torch.zeros_like(value)
    if not gradient.requires_grad:
        raise _no_jvp(function)
    if gradient.is_complex() and not value.is_complex():
        gradient = gradient.real
    if gradient.shape != value.shape:
        gradient = gradient.sum_to_size(value.shape)
    return gradient.to(value.dtype)


def _no_jvp(function: FunctionClass) -> NotImplementedError:
    return NotImplementedError(
        f"{function.__name__} has no jvp, and none can be derived: its backward returned a "
        "gradient that is not made of differentiable operations of torch (None stands for zero). "
        "You must implement the jvp function for custom autograd.Function to use it with forward "
        "mode AD."
    )
