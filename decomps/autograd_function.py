"""What the levels of torch.func do with a call of an autograd.Function: custom_function_call.

A Function stands above the dispatcher: no kernel is asked, so each level has a rule here, with the
Function and its operands as they come. A rule deals with its own level and calls again for those
below; below all levels it is the Function itself.

    Grad, Jvp       a Function of that one level, whose backward and jvp are the class's own
    Vmap            the class's `vmap`; or, with generate_vmap_rule, the class over the batch: a
                    Function again, whose every method runs under a level of vmap
    Functionalize   an error, as in torch

The rules are those of torch/_functorch/autograd_function.py, and its errors. Beyond it, a generated
rule honours mark_dirty and mark_non_differentiable, tangents that are None, and other tensors saved
for forward than for backward; what of a batch cannot be a tangent or a gradient is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from normpass.decomps.activation.torch_internals import (
    FUNCTIONALIZE,
    GRAD,
    JVP,
    VMAP,
    SingleLevelFunction,
    VmapInfo,
    add_batch_dim,
    current_level,
    custom_function_call,
    enable_single_level_autograd_function,
    prefix_flattened,
    restore_vmap,
    set_fwd_grad_enabled,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    unwrap_batched,
    unwrap_for_grad,
    wrap_for_grad,
)
from normpass.decomps.registry import register_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Class = type[Function]

FILE = "torch/_functorch/autograd_function.py"
MORE = "For more details, please see https://pytorch.org/docs/main/notes/extending.func.html"


# --- levels of grad and jvp ---------------------------------------------------------------------


@register_rule(
    "autograd",
    name="custom_function_call",
    source=f"{FILE}: CustomFunctionHigherOrderOperator, custom_function_call_grad, "
    "generate_single_level_function",
    shapes="operands: *s -> results: *t",
    why="a level's tape has the class's own backward, and the level below is asked again",
)
def custom_function_call_grad(interpreter: Any, function: Class, *operands: Any) -> Any:
    """A call at a level of grad or jvp."""
    single = generate_single_level_function(interpreter, function)
    with enable_single_level_autograd_function():
        return single.apply(*operands)


def generate_single_level_function(interpreter: Any, function: Class) -> Any:
    """The Function whose forward is a call at the level below."""
    level = interpreter.level()

    def forward(*operands: Any) -> Any:
        below = tree_map_only(torch.Tensor, lambda x: unwrap_for_grad(x, level), operands)
        # apply() turns off both modes for its forward, but this one is to be differentiated by
        # the levels below.
        with torch.enable_grad(), set_fwd_grad_enabled(True), interpreter.lower():
            results = custom_function_call(function, *below)
        return _wrapped(results, below, operands, lambda x: wrap_for_grad(x, level))

    # Through lambdas: a class that is defined here must not look as if it overrode less or more.
    methods = {
        "forward": forward,
        "setup_context": lambda ctx, inputs, output: function.setup_context(ctx, inputs, output),
        "backward": lambda ctx, *grads: (
            function.vjp if function.vjp is not Function.vjp else function.backward
        )(ctx, *grads),
        "jvp": lambda ctx, *tangents: function.jvp(ctx, *tangents),
    }
    return _defined(f"{function.__name__}Generated", SingleLevelFunction, methods)


def _wrapped(
    results: Any, below: Any, operands: Any, wrap: Callable[..., Any], dims: list[Any] | None = None
) -> Any:
    """Results as their level has them: an operand that was returned, as mark_dirty asks for, is
    that very operand.
    """
    known = dict(zip(map(id, tree_leaves(below)), tree_leaves(operands), strict=True))
    leaves, spec = tree_flatten(results)
    wrapped = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            wrapped.append(leaf)
        elif id(leaf) in known:
            wrapped.append(known[id(leaf)])
        else:
            wrapped.append(wrap(leaf) if dims is None else wrap(leaf, dims[index]))
    return tree_unflatten(wrapped, spec)


def _defined(name: str, base: type, methods: dict[str, Any], **rest: Any) -> Any:
    return type(name, (base,), {**{k: staticmethod(m) for k, m in methods.items()}, **rest})


# --- a level of vmap ----------------------------------------------------------------------------


@register_rule(
    "batching",
    name="custom_function_call",
    source=f"{FILE}: custom_function_call_vmap, custom_function_call_vmap_generate_rule",
    shapes="operands: *s -> results: *t",
    why="the class says itself what it does with a batch, or that each method may run over one",
)
def custom_function_call_vmap(
    interpreter: Any, function: Class, *operands: Any, **keywords: Any
) -> Any:
    """A call at a level of vmap.

    Raises:
        RuntimeError: if the class has no rule for vmap, or two, or its own returns something that
            is no rule's result.
    """
    own = function.vmap is not Function.vmap
    if function.generate_vmap_rule and own:
        raise RuntimeError(
            f"You tried to vmap over {function.__name__}, but it has both "
            f"generate_vmap_rule=True and an overridden vmap staticmethod. Please set "
            f"generate_vmap_rule=False or delete the overridden vmap staticmethod to avoid "
            f"ambiguity. {MORE}"
        )
    if not function.generate_vmap_rule and not own:
        raise RuntimeError(
            f"You tried to vmap over {function.__name__}, but it does not have vmap support. "
            f"Please override and implement the vmap staticmethod or set "
            f"generate_vmap_rule=True. {MORE}"
        )
    below, dims = unwrap_batched(operands, interpreter.level())
    if all(dim is None for dim in tree_leaves(dims)):
        with interpreter.lower():
            return custom_function_call(function, *operands, **keywords)
    if own:
        return _by_own_rule(interpreter, function, operands, below, dims, keywords)
    return custom_function_call_vmap_generate_rule(interpreter, function, operands, below, dims)


def _by_own_rule(
    interpreter: Any, function: Any, operands: Any, below: Any, dims: Any, keywords: dict[str, Any]
) -> Any:
    level = interpreter.level()
    info = VmapInfo(batch_size=interpreter.batch_size(), randomness=interpreter.randomness())
    with interpreter.lower():
        returned = function.vmap(info, dims, *below, **keywords)
    results, out_dims = _two(returned)
    spec = tree_flatten(results)[1]
    flat = prefix_flattened(out_dims, spec)
    if flat is None:
        raise RuntimeError(
            f"The autograd.Function's vmap staticmethod returned an incompatible "
            f"(output, out_dims) tuple. Expected out_dims={out_dims} to be compatible with the "
            f"structure of `output`. out_dims has structure {tree_flatten(out_dims)[1]} but "
            f"output has structure {spec}. {MORE}"
        )
    return _wrapped(results, below, operands, _batched_at(level), flat)


def _two(returned: Any) -> tuple[Any, Any]:
    """What a vmap staticmethod returned, if it is two things."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    found = f"{len(returned)} returns" if isinstance(returned, tuple) else f"a {type(returned)}"
    raise RuntimeError(
        "Expected the vmap staticmethod to have two returns, an output and out_dims with pytree "
        f"structure compatible with the output. Got {found} instead"
    )


def _batched_at(level: int) -> Callable[[Tensor, int | None], Any]:
    return lambda x, dim: x if dim is None else add_batch_dim(x, dim % x.dim(), level)


def custom_function_call_vmap_generate_rule(
    interpreter: Any, function: Class, operands: Any, below: Any, dims: Any
) -> Any:
    """The class over the batch, called at the level below."""
    size, randomness = interpreter.batch_size(), interpreter.randomness()
    over, out_dims = vmapify_autograd_function(function, dims, size, randomness)
    with interpreter.lower():
        results = custom_function_call(over, *below)
    flat = prefix_flattened(out_dims(), tree_flatten(results)[1])
    return _wrapped(results, below, operands, _batched_at(interpreter.level()), flat)


@register_rule(
    "batching",
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
    over = _defined(f"Vmapped{function.__name__}", Function, methods, generate_vmap_rule=True)
    return over, lambda: known["out_dims"]


def _where_given(dims: Any, values: Sequence[Any]) -> Any:
    """The batch dimensions of gradients or tangents: those that are None have none."""
    dims = dims if isinstance(dims, tuple) else (dims,)
    return tuple(None if value is None else dim for dim, value in zip(dims, values, strict=True))


# --- gradients and tangents of batches ----------------------------------------------------------


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


# --- contexts of one example --------------------------------------------------------------------


class WrappedCtx:
    """A context that is another one, except for some attributes of its own."""

    _pt_reserved_attrs: tuple[str, ...] = ("_pt_reserved_attrs", "_pt_inner_ctx")

    def __init__(self, ctx: Any) -> None:
        reserved = type(self)._pt_reserved_attrs
        if not isinstance(ctx, WrappedCtx) and any(hasattr(ctx, name) for name in reserved):
            raise RuntimeError(
                f"PyTorch reserves the {reserved} field on ctx. Please name your fields on ctx "
                "something else to avoid name collision."
            )
        self._pt_inner_ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pt_inner_ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._pt_reserved_attrs:
            self.__dict__[name] = value
        else:
            setattr(self._pt_inner_ctx, name, value)


class CtxWithSavedTensors(WrappedCtx):
    """For backward and jvp of one example: what was saved has no batch axis."""

    _pt_reserved_attrs = ("_pt_new_saved_tensors", *WrappedCtx._pt_reserved_attrs)

    def __init__(self, ctx: Any, new_saved_tensors: Any) -> None:
        super().__init__(ctx)
        self._pt_new_saved_tensors = new_saved_tensors

    @property
    def saved_tensors(self) -> Any:
        """Those of the example."""
        return self._pt_new_saved_tensors


class CtxCustomSave(WrappedCtx):
    """For setup_context of one example: the other context gets whole batches."""

    _pt_reserved_attrs = (
        "_pt_current_level",
        "dims_for_backward",
        "dims_for_forward",
        *WrappedCtx._pt_reserved_attrs,
    )

    def __init__(self, ctx: Any, current_level: int) -> None:
        super().__init__(ctx)
        self._pt_current_level = current_level
        self.dims_for_backward: Any = ()
        self.dims_for_forward: Any = ()

    def _whole(self, tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        return unwrap_batched(tensors, self._pt_current_level)

    def save_for_backward(self, *tensors: Any) -> None:
        """As of any context; the batch dimensions are kept here."""
        whole, self.dims_for_backward = self._whole(tensors)
        self._pt_inner_ctx.save_for_backward(*whole)

    def save_for_forward(self, *tensors: Any) -> None:
        """The same."""
        whole, self.dims_for_forward = self._whole(tensors)
        self._pt_inner_ctx.save_for_forward(*whole)

    def mark_dirty(self, *tensors: Any) -> None:
        """As of any context, which knows its tensors by identity."""
        self._pt_inner_ctx.mark_dirty(*self._whole(tensors)[0])

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """The same."""
        self._pt_inner_ctx.mark_non_differentiable(*self._whole(tensors)[0])


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


# --- functionalize ------------------------------------------------------------------------------


def custom_function_call_functionalize(interpreter: Any, function: Class, *operands: Any) -> Any:
    """Raises RuntimeError: there is no rule, in torch neither."""
    raise RuntimeError("NYI: Functionalize rule for custom_function_call")


RULES = {
    GRAD: custom_function_call_grad,
    JVP: custom_function_call_grad,
    VMAP: custom_function_call_vmap,
    FUNCTIONALIZE: custom_function_call_functionalize,
}
