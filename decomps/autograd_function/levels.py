"""The rules of custom_function_call, by the kind of the level."""

from __future__ import annotations

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
    custom_function_call,
    enable_single_level_autograd_function,
    prefix_flattened,
    set_fwd_grad_enabled,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    unwrap_batched,
    unwrap_for_grad,
    wrap_for_grad,
)
from normpass.decomps.autograd_function.batches import FILE, defined, vmapify_autograd_function
from normpass.decomps.registry import register_rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Class = type[Function]

MORE = "For more details, please see https://pytorch.org/docs/main/notes/extending.func.html"


@register_rule(
    "autograd_function",
    name="custom_function_call_grad",
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

    # Looked up when they are called: what a class lacks is an error then, and in its own words.
    methods = {
        "forward": forward,
        "setup_context": lambda ctx, inputs, output: function.setup_context(ctx, inputs, output),
        "backward": lambda ctx, *grads: (
            function.vjp if function.vjp is not Function.vjp else function.backward
        )(ctx, *grads),
        "jvp": lambda ctx, *tangents: function.jvp(ctx, *tangents),
    }
    return defined(f"{function.__name__}Generated", SingleLevelFunction, methods)


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


@register_rule(
    "autograd_function",
    name="custom_function_call_vmap",
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


def custom_function_call_functionalize(interpreter: Any, function: Class, *operands: Any) -> Any:
    """Raises RuntimeError: there is no rule, in torch neither."""
    raise RuntimeError("NYI: Functionalize rule for custom_function_call")


RULES = {
    GRAD: custom_function_call_grad,
    JVP: custom_function_call_grad,
    VMAP: custom_function_call_vmap,
    FUNCTIONALIZE: custom_function_call_functionalize,
}
