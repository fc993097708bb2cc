"""autograd.Functions whose own rules show: each says in numbers which of them was used.

A backward gives twice the derivative that forward has, a jvp three times, a vmap adds 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Plain(Function):
    """x^2 w, without rules for jvp and vmap."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 4 * grad * x * w, 2 * grad * x * x


class Generated(Plain):
    """The same with a generated rule for vmap."""

    generate_vmap_rule = True


class OwnVmap(Plain):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> Any:
        x = x if in_dims[0] is None else x.movedim(in_dims[0], -1)
        w = w if in_dims[1] is None else w.movedim(in_dims[1], -1)
        if in_dims[0] is None and x.dim():
            x = x.unsqueeze(-1)
        if in_dims[1] is None and w.dim():
            w = w.unsqueeze(-1)
        return OwnVmap.apply(x, w) + 10, -1


class OwnJvp(Plain):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dw: Tensor) -> Tensor:
        x, w = ctx.saved_tensors
        out = 6 * x * w * dx
        return out if dw is None else out + 3 * x * x * dw


class OwnAll(OwnJvp):
    generate_vmap_rule = False
    vmap = staticmethod(
        lambda info, in_dims, x, w: (
            OwnAll.apply(_front(x, in_dims[0], w, in_dims[1]), _front(w, in_dims[1], x, in_dims[0]))
            + 10,
            0,
        )
    )


def _front(x: Tensor, dim: int | None, other: Tensor, other_dim: int | None) -> Tensor:
    """x with its batch axis in front, and as many axes as the other."""
    return x if dim is None else x.movedim(dim, 0)


class Needs(Function):
    """Gradients by what needs them: x gets 2 if w needs none, else 5."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        scale = 5 if ctx.needs_input_grad[1] else 2
        dx = scale * grad * w if ctx.needs_input_grad[0] else None
        dw = scale * grad * x if ctx.needs_input_grad[1] else None
        return dx, dw


class Marked(Function):
    """Two results, the second without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return x * x * w, x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return 4 * grad * x * w, 2 * grad * x * x

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dw: Tensor) -> Any:
        x, w = ctx.saved_tensors
        out = 6 * x * w * dx
        return (out if dw is None else out + 3 * x * x * dw), None


class InPlace(Function):
    """x *= 3 where it lies."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 6 * grad

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Any:
        return dx.mul_(9)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        x.mul_(3)
        return x, in_dims[0]


class Unmaterialized(Function):
    """Two results; a missing gradient or tangent shows as one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return x * 2, w * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return (
            None if a is None else (4 if b is None else 7) * a,
            None if b is None else (6 if a is None else 8) * b,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, dw: Any) -> Any:
        return (
            None if dx is None else (40 if dw is None else 70) * dx,
            None if dw is None else (60 if dx is None else 80) * dw,
        )


class Numbers(Function):
    """Arguments that are not tensors, with a default."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, power: int, scale: Any, name: str = "sin") -> Tensor:
        return getattr(torch, name)(x) ** power * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.power, ctx.scale, ctx.name = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 2 * ctx.power * x * ctx.scale, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return dx * 3 * ctx.power * x * ctx.scale


class OldStyle(Function):
    """forward and context in one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 4 * grad * x * w, 2 * grad * x * x


class Nested(Plain):
    """Its backward uses another Function, and so does its jvp."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return OwnJvp.apply(x, grad) * w, OwnJvp.apply(x, grad)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dw: Tensor) -> Tensor:
        x, w = ctx.saved_tensors
        out = 3 * OwnJvp.apply(x, w) * dx
        return out if dw is None else out + 5 * OwnJvp.apply(x, dw)


class NoBackward(Function):
    """For forward mode alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.cos() * dx


class NumPyLike(Function):
    """Saves its result and a number of its own on the context; sums, so that shapes matter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return (x * w).sum().expand_as(x).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.shape = inputs[0].shape
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        total = grad.sum().expand(ctx.shape)
        return 2 * total * w * y, 2 * total * x

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dw: Any) -> Tensor:
        x, w, y = ctx.saved_tensors
        out = 3 * (dx * w).sum() * y
        return out if dw is None else out + 3 * (x * dw).sum().expand(ctx.shape)


def _marked(x: Tensor, w: Tensor) -> Tensor:
    a, b = Marked.apply(x, w)
    return a * b + b.sin()


def _in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    InPlace.apply(y)
    return y * x


def _first(x: Tensor, w: Tensor) -> Tensor:
    a, _ = Unmaterialized.apply(x, w)
    return a.sin()


def _both(x: Tensor, w: Tensor) -> Tensor:
    a, b = Unmaterialized.apply(x, w * x)
    return a.sin() * b


# Functions of x and w with shapes alike, and a result of theirs.
PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, w: Plain.apply(x, w).sin(),
    "generated vmap": lambda x, w: Generated.apply(x, w).sin(),
    "own vmap": lambda x, w: OwnVmap.apply(x, w).sin(),
    "own jvp": lambda x, w: OwnJvp.apply(x, w).sin(),
    "own jvp and vmap": lambda x, w: OwnAll.apply(x, w).sin(),
    "needs_input_grad": lambda x, w: Needs.apply(x, w).sin(),
    "mark_non_differentiable": _marked,
    "mark_dirty": _in_place,
    "gradients not materialized": _first,
    "two results": _both,
    "arguments that are numbers": lambda x, w: Numbers.apply(x, 2, 1.5) * w,
    "forward with ctx": lambda x, w: OldStyle.apply(x, w).sin(),
    "a Function in backward": lambda x, w: Nested.apply(x, w).sin(),
    "no backward": lambda x, w: NoBackward.apply(x) * w,
    "sums": lambda x, w: NumPyLike.apply(x, w).sin(),
    "two of them": lambda x, w: OwnJvp.apply(Generated.apply(x, w).sin(), w),
}
