"""An autograd.Function under torch.vmap, as another autograd.Function.

    Batched = batched(Function, in_dims, randomness)

Its tensors have the batch dimensions of `in_dims`, its results have theirs in front. Forward,
setup_context, backward and jvp of the Function run for one example each, at a level of vmap of
their own: whatever shape or tensor they keep is that of an example. So a derivative of a batched
call is the Function's own, and not that of what its forward is made of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.levels import BatchLevel
from normpass.decomps.activation.torch_internals import (
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from normpass.decomps.function_ops.node import without_tangent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    FunctionClass = type[torch.autograd.Function]

_BASE = torch.autograd.Function


def batched(
    function: FunctionClass, in_dims: Sequence[int | None], randomness: str
) -> FunctionClass:
    """in_dims: of each leaf of the arguments its batch dimension, or None."""
    of = _Batched(function, in_dims, randomness)
    members = {"forward": of.forward, "setup_context": of.setup_context, "backward": of.backward}
    if function.jvp is not _BASE.jvp:
        members["jvp"] = of.jvp
    return type(
        f"{function.__name__}_batched",
        (_BASE,),
        {name: staticmethod(member) for name, member in members.items()},
    )


class _Batched:
    """What `batched` says, with its four functions as methods."""

    def __init__(
        self, function: FunctionClass, in_dims: Sequence[int | None], randomness: str
    ) -> None:
        self.function, self.in_dims, self.randomness = function, in_dims, randomness

    def forward(self, *args: Any) -> Any:
        leaves, spec = tree_flatten(args)

        def run(level: BatchLevel) -> Any:
            out = self.function.forward(*tree_unflatten(self._wrapped(level, leaves), spec))
            return tree_map(lambda y: _in_front(level, y), out)

        return self._for_examples(self._size(leaves), run)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        leaves, spec = tree_flatten(inputs)
        outs, out_spec = tree_flatten(output)
        state = _State(self._size(leaves), tree_unflatten(list(self.in_dims), spec))
        ctx.normpass_batched = state

        def run(level: BatchLevel) -> None:
            example = tree_unflatten(self._wrapped(level, leaves), spec)
            results = [level.wrap(y, 0) if _is_tensor(y) else y for y in outs]
            state.shapes = [x.shape if _is_tensor(x) else None for x in example]
            wrapped = {id(y): out for y, out in zip(results, outs, strict=True)}
            context = _ExampleContext(ctx, level, wrapped)
            self.function.setup_context(context, example, tree_unflatten(results, out_spec))

        self._for_examples(state.size, run)

    def backward(self, ctx: Any, *grads: Any) -> Any:
        state: _State = ctx.normpass_batched
        backward, count = backward_of(self.function), len(state.dims)

        def run(level: BatchLevel) -> list[Any]:
            example = [level.wrap(g, 0) if _is_tensor(g) else g for g in grads]
            found = backward(_ExampleContext(ctx, level), *example)
            found = found if isinstance(found, tuple) else (found,)
            fitted = [*map(_of_shape, found, state.shapes), *found[count:]]
            return [_in_front(level, g) for g in fitted]

        found = self._for_examples(state.size, run)
        return (*map(_reduced, found, state.dims), *found[count:])

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        state: _State = ctx.normpass_batched

        def run(level: BatchLevel) -> Any:
            pairs = zip(tangents, state.dims, strict=True)
            example = [level.wrap(t, dim) if _is_tensor(t) else t for t, dim in pairs]
            moved = self.function.jvp(_ExampleContext(ctx, level, ahead=True), *example)
            return tree_map(lambda t: _in_front(level, t), moved)

        return self._for_examples(state.size, run)

    def _for_examples(self, size: int, body: Callable[[BatchLevel], Any]) -> Any:
        """What `body` returns at a level of vmap with so many examples."""
        found = []

        def run(dummy: Tensor) -> Tensor:
            found.append(body(BatchLevel()))
            return dummy

        torch.vmap(run, randomness=self.randomness)(torch.empty(size))
        return found[0]

    def _wrapped(self, level: BatchLevel, leaves: Sequence[Any]) -> list[Any]:
        return list(map(level.wrap, leaves, self.in_dims))

    def _size(self, leaves: Sequence[Any]) -> int:
        pairs = zip(leaves, self.in_dims, strict=True)
        return next(x.shape[dim] for x, dim in pairs if dim is not None)


def backward_of(function: FunctionClass) -> Callable[..., Any]:
    """A Function's backward, by whichever of its two names."""
    return function.backward if function.vjp is _BASE.vjp else function.vjp


@dataclass
class _State:
    """What a batched call keeps.

    size     of the batch
    dims     the arguments' batch dimensions, in the structure of the arguments
    shapes   of each argument that is a tensor that of an example
    saved    batch dimensions of the saved tensors: for backward, for forward mode
    others   what setup_context has set on its context, each as (leaves, batch dimensions, spec)
    """

    size: int
    dims: Sequence[Any]
    shapes: Sequence[Any] = ()
    saved: dict[str, list[int | None]] = field(default_factory=dict)
    others: dict[str, tuple[list[Any], list[int | None], Any]] = field(default_factory=dict)


class _ExampleContext:
    """A context as it is for one example: what is kept in it is batched, outside of the level."""

    def __init__(
        self,
        ctx: Any,
        level: BatchLevel,
        wrapped: dict[int, Any] | None = None,
        ahead: bool = False,
    ) -> None:
        """wrapped: results by the ids of what they are for one example. ahead: for a jvp."""
        state = ctx.normpass_batched
        self.__dict__.update(ctx=ctx, level=level, state=state, wrapped=wrapped, ahead=ahead)
        # Also for a backward that is transposed.
        self.__dict__["in_forward_mode"] = getattr(ctx, "normpass_in_forward_mode", False)

    def save_for_backward(self, *tensors: Any) -> None:
        self.ctx.save_for_backward(*self._kept("backward", tensors))

    def save_for_forward(self, *tensors: Any) -> None:
        self.ctx.save_for_forward(*self._kept("forward", tensors))

    def _kept(self, when: str, tensors: Sequence[Any]) -> list[Any]:
        values, self.state.saved[when] = self.level.unwrapped(tensors)
        return values

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        dims = self.state.saved.get("forward" if self.ahead else "backward", ())
        return tuple(map(self.level.wrap, self.ctx.saved_tensors, dims))

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.ctx.mark_non_differentiable(*(self.wrapped.get(id(y), y) for y in tensors))

    def __setattr__(self, name: str, value: Any) -> None:
        leaves, spec = tree_flatten(value)
        self.state.others[name] = (*self.level.unwrapped(leaves), spec)

    def __getattr__(self, name: str) -> Any:
        if name not in self.state.others:
            return getattr(self.ctx, name)
        leaves, dims, spec = self.state.others[name]
        leaves = without_tangent(leaves) if self.in_forward_mode else leaves
        return tree_unflatten(list(map(self.level.wrap, leaves, dims)), spec)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _in_front(level: BatchLevel, value: Any) -> Any:
    """A tensor below a level, with its batch dimension in front; it has one in any case."""
    if not isinstance(value, torch.Tensor):
        return value
    value, dim = level.unwrap(value)
    if dim is None:
        return value.expand(level.info.batch_size, *value.shape)
    return value.movedim(dim, 0)


def _of_shape(gradient: Any, shape: Any) -> Any:
    """The gradient of one example, which autograd would reduce to the shape of the input."""
    if not _is_tensor(gradient) or shape is None or gradient.shape == shape:
        return gradient
    return gradient.sum_to_size(shape)


def _reduced(gradient: Any, dim: Any) -> Any:
    """A gradient with the batch in front, as its input has it; an input that all examples share
    has the sum.
    """
    if not _is_tensor(gradient):
        return gradient
    return gradient.sum(0) if dim is None else gradient.movedim(0, dim)
