"""A Function over a batch: every method runs under a level of vmap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from normpass.decomps.activation.torch_internals import current_level, restore_vmap
from normpass.decomps.autograd_function.contexts import CtxCustomSave, CtxWithSavedTensors
from normpass.decomps.registry import register_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Class = type[Function]

FILE = "torch/_functorch/autograd_function.py"


@register_rule(
    "autograd_function",
    name="vmapify_autograd_function",
    source=f"{FILE}: vmapify_autograd_function, WrappedCtx, CtxWithSavedTensors, CtxCustomSave",
    shapes="operands: *s -> results: *t",
    why="every method runs under vmap, setup_context too: shapes that it keeps have no batch axis",
)
def vmapify_autograd_function(
    function: Class, in_dims: Any, batch_size: int, randomness: str
) -> tuple[Class, Callable[[], Any]]:
    """A Function of whole batches, and what asks it for the batch dimensions of its results, once
    it has been called.
    """
    known: dict[str, Any] = {}

    def each(method: Callable[..., Any], dims: Any) -> Callable[..., Any]:
        return restore_vmap(method, dims, batch_size, randomness)

    def forward(*operands: Any) -> Any:
        results, known["out_dims"] = each(function.forward, in_dims)(*operands)
        if isinstance(results, tuple):  # torch.return_types: apply() makes a tuple of them, too
            results, known["out_dims"] = tuple(results), tuple(known["out_dims"])
        return results

    def setup_context(ctx: Any, inputs: Any, results: Any) -> None:
        def setup(inputs: Any, results: Any) -> None:
            wrapped = CtxCustomSave(ctx, current_level())
            function.setup_context(wrapped, inputs, results)
            shapes = tuple(x.shape if isinstance(x, torch.Tensor) else None for x in inputs)
            _notes(ctx)[over] = _Notes(wrapped.dims_for_backward, wrapped.dims_for_forward, shapes)

        each(setup, (in_dims, known["out_dims"]))(inputs, results)

    def backward(ctx: Any, *grads: Any) -> Any:
        def of_one(saved: Any, grads: Any) -> Any:
            return function.backward(CtxWithSavedTensors(ctx, saved), *grads)

        notes = _notes(ctx)[over]
        dims = notes.for_backward, _where_given(known["out_dims"], grads)
        found, found_dims = each(of_one, dims)(ctx.saved_tensors, grads)
        return reductify(found, found_dims, in_dims, batch_size, notes.shapes)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        def of_one(saved: Any, tangents: Any) -> Any:
            return function.jvp(CtxWithSavedTensors(ctx, saved), *tangents)

        dims = _notes(ctx)[over].for_forward, _where_given(in_dims, tangents)
        found, found_dims = each(of_one, dims)(ctx.saved_tensors, tangents)
        return _tangents(found, found_dims, known["out_dims"], batch_size, function)

    methods = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
        "jvp": jvp,
    }
    over = defined(f"Vmapped{function.__name__}", Function, methods, generate_vmap_rule=True)
    return over, lambda: known["out_dims"]


def _where_given(dims: Any, values: Sequence[Any]) -> Any:
    """The batch dimensions of gradients or tangents: those that are None have none."""
    dims = dims if isinstance(dims, tuple) else (dims,)
    return tuple(None if value is None else dim for dim, value in zip(dims, values, strict=True))


def defined(name: str, base: type, methods: dict[str, Any], **rest: Any) -> Any:
    """A class with these static methods."""
    return type(name, (base,), {**{k: staticmethod(m) for k, m in methods.items()}, **rest})


@dataclass(frozen=True)
class _Notes:
    """What a Function of batches knows of a call: batch dimensions of what was saved, and shapes of
    the operands without the batch.
    """

    for_backward: Any
    for_forward: Any
    shapes: tuple[Any, ...]


def _notes(ctx: Any) -> dict[type, _Notes]:
    """On the context, as each level has one, and by class: of vmap over vmap the inner Function
    gets the outer one's context.
    """
    if not hasattr(ctx, "notes_of_batches"):
        ctx.notes_of_batches = {}
    notes: dict[type, _Notes] = ctx.notes_of_batches
    return notes


# --- gradients and tangents ----------------------------------------------------------------------


def reductify(
    grads: Any, dims: Any, in_dims: Any, batch_size: int, shapes: Sequence[Any] | None = None
) -> tuple[Any, ...]:
    """Gradients as autograd takes them, one for each operand: batched where the operand is.

    dims: their batch dimensions. shapes: those of the operands without the batch, None where one
    is no tensor. Autograd itself reduces a gradient that was broadcast beyond its operand, [3, 4]
    for [4], but not with a batch axis among the others, [3, B, 4] for [B, 4].
    """
    grads, dims, in_dims = (x if isinstance(x, tuple) else (x,) for x in (grads, dims, in_dims))
    shapes = shapes or (None,) * len(grads)
    each = zip(grads, dims, in_dims, shapes, strict=False)  # more gradients than operands are None
    return tuple(reductify_leaf(g, dim, in_dim, batch_size, s) for g, dim, in_dim, s in each)


def reductify_leaf(
    grad: Tensor | None, dim: int | None, in_dim: int | None, batch_size: int, shape: Any = None
) -> Tensor | None:
    """One of them: every example adds to the gradient of what they share."""
    if grad is None or (dim is None and in_dim is None):
        return grad
    if in_dim is None:
        return grad.sum(dim)
    grad = _in_front(grad, dim, batch_size)
    if shape is not None:
        broadcast = grad.dim() - 1 - len(shape)
        grad = grad.movedim(0, max(broadcast, 0)).sum_to_size(batch_size, *shape)
    return grad.movedim(0, in_dim)


def _in_front(value: Tensor, dim: int | None, batch_size: int) -> Tensor:
    """With the batch as its first axis."""
    return value.expand(batch_size, *value.shape) if dim is None else value.movedim(dim, 0)


def _tangents(found: Any, dims: Any, out_dims: Any, batch_size: int, function: Class) -> Any:
    """Tangents batched as the results are whose tangents they are."""
    if not isinstance(found, tuple):
        (tangent,) = _tangents((found,), (dims,), (out_dims,), batch_size, function)
        return tangent
    aligned = []
    for tangent, dim, out_dim in zip(found, dims, out_dims, strict=True):
        if dim is not None and out_dim is None:
            raise RuntimeError(
                f"vmap over the jvp of {function.__name__}: expected the tangent of a result that "
                f"is the same for all examples to be so too, found one for each example. Let "
                f"forward compute that result from what is batched, or override vmap."
            )
        if tangent is not None and out_dim is not None:
            tangent = _in_front(tangent, dim, batch_size).movedim(0, out_dim)
        aligned.append(tangent)
    return tuple(aligned)
