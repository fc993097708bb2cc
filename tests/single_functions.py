"""autograd.Functions that have a test of their own."""

from __future__ import annotations

import torch
from custom_functions import Bare, Saving
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Once(Saving):
    """A backward that has no derivative of its own."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Halved(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(x, y):
        x.mul_(y)
        return x, x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad, other):
        (y,) = ctx.saved_tensors
        return (grad + 2 * other) * y, None


class Dropped(Function):
    """Random numbers, and a result that is their mask."""

    @staticmethod
    def forward(x, p):
        mask = (torch.rand_like(x) > p).to(x.dtype)
        return x * mask, mask

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return grad * ctx.saved_tensors[0], None


class Multiplied(Saving):
    """A matrix product, which autocast takes to half precision."""

    @staticmethod
    def forward(a, b):
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.mT.to(grad.dtype), a.mT.to(grad.dtype) @ grad


class Squared(Saving):
    """Complex numbers."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].conj()


class Ambiguous(Bare):
    """A vmap of its own, and a wish for a derived one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

    @staticmethod
    def vmap(info, in_dims, x):
        return x * 2, in_dims[0]


class OldStyle(Function):
    """A context in forward, and no setup_context."""

    @staticmethod
    def forward(ctx, x):
        return x * 2


class WithoutFake(Bare):
    """NumPy, and nobody says what it returns; no backward."""

    @staticmethod
    def forward(x):
        return torch.from_numpy(x.numpy() * 2)


class Changing(Bare):
    """Another structure of results for another number."""

    @staticmethod
    def forward(x, n):
        return (x * 2,) * n


class Normalized(Saving):
    """Made of a norm, whose derivative its backward asks for."""

    @staticmethod
    def forward(x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        _, pull = torch.func.vjp(Normalized.forward, x)
        return pull(grad)[0]
