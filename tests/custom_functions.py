"""autograd.Functions with one feature each, as operators of normpass.as_op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import Function

import normpass


class Saving(Function):
    """Saves its arguments."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


class Bare(Function):
    """Saves nothing."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class Swish(Function):
    """A number among the arguments, an attribute of ctx; no jvp, no vmap."""

    @staticmethod
    def forward(x, scale):
        return x * torch.sigmoid(scale * x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.scale = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.scale * x)
        return grad * (s + ctx.scale * x * s * (1 - s)), None


class Exp(Function):
    """Saves its result; has its own jvp, and a derived vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.exp(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y

    @staticmethod
    def jvp(ctx, tangent):
        (y,) = ctx.saved_tensors
        return tangent * y


class Product(Saving):
    """Gradients that autograd reduces over what was broadcast, and only those that are needed."""

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        needs = ctx.needs_input_grad
        assert len(needs) == 2
        return grad * y if needs[0] else None, grad * x if needs[1] else None


class Sorted(Function):
    """Two results, one of them integers without a derivative."""

    @staticmethod
    def forward(x):
        values, places = torch.sort(x, dim=-1)
        return values, places

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, grad, _):
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(-1, places, grad)


class Both(Function):
    """Gradients that are None, where a result is not used."""

    @staticmethod
    def forward(x):
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, of_sin, of_cos):
        (x,) = ctx.saved_tensors
        found = None
        if of_sin is not None:
            found = of_sin * x.cos()
        if of_cos is not None:
            found = -of_cos * x.sin() + (0 if found is None else found)
        return found


class Tripled(Saving):
    """Its own vmap, which calls the Function again."""

    calls = 0

    @staticmethod
    def forward(x, y):
        return 3 * x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return 3 * grad * y, 3 * grad * x

    @staticmethod
    def vmap(info, in_dims, x, y):
        Tripled.calls += 1
        x, y = (
            v.expand(info.batch_size, *v.shape) if dim is None else v.movedim(dim, 0)
            for v, dim in zip((x, y), in_dims, strict=True)
        )
        return normpass.as_op(Tripled)(x, y), 0


class Settings(NamedTuple):
    power: int
    factors: list[float]


class Structured(Function):
    """Structures of numbers, text, a dtype, None and a constant that no schema holds; a dict."""

    @staticmethod
    def forward(x, settings, mode, dtype, nothing, activation):
        assert nothing is None
        y = x.to(dtype) ** settings.power * sum(settings.factors)
        return y + 1 if mode == "plus" else activation(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.settings, ctx.mode, *_ = inputs
        assert ctx.mode == "plus"
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        n = ctx.settings.power
        return grad * n * x ** (n - 1) * sum(ctx.settings.factors), None, None, None, None, None


class Rounded(Bare):
    """A derivative that is not that of the forward: one, where it is zero."""

    @staticmethod
    def forward(x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad * 1


class Cube(Function):
    """A tensor as an attribute of ctx, and its backward by its other name."""

    @staticmethod
    def forward(x):
        return x * x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x = inputs[0]

    @staticmethod
    def vjp(ctx, grad):
        return 3 * ctx.x**2 * grad


class Total(Function):
    """The shape of an example, which is another under vmap."""

    @staticmethod
    def forward(x):
        return x.sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.size = inputs[0].shape[-1]

    @staticmethod
    def backward(ctx, grad):
        return grad.unsqueeze(-1).expand(*grad.shape, ctx.size)


class InNumPy(Saving):
    """A forward that nobody can trace: it takes a function for fake tensors."""

    @staticmethod
    def forward(x):
        return torch.from_numpy(x.numpy() ** 3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x * x


class Item(Function):
    """Reads a number of a tensor."""

    @staticmethod
    def forward(x, y):
        return x * y.max().item()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1].max())

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Scratch(Saving):
    """Writes to a tensor that it has made."""

    @staticmethod
    def forward(x):
        y = x.clone()
        y.mul_(x).add_(1)
        y[..., 0] = 0
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        mask = torch.ones_like(x)
        mask[..., 0] = 0
        return 2 * grad * x * mask


class Passed(Bare):
    """Returns its argument, and a view of it."""

    @staticmethod
    def forward(x):
        return x, x.mT

    @staticmethod
    def backward(ctx, grad, other):
        return 2 * grad + 3 * other.mT


class Slope(Saving):
    """Differentiates within its forward."""

    @staticmethod
    def forward(x):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(at.pow(3).sum(), at)
        return found.detach()

    @staticmethod
    def backward(ctx, grad):
        return 6 * ctx.saved_tensors[0] * grad


class Described(Function):
    """Results in a tuple: a tensor, a size, text, a dict of tensors that have no derivative."""

    @staticmethod
    def forward(x):
        return x.sinh(), x.shape[-1], "sinh", {"largest": [x.amax(), None]}

    @staticmethod
    def setup_context(ctx, inputs, output):
        assert isinstance(output[1], int | torch.SymInt)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad, *others):
        assert len(others) == 3
        return grad * ctx.saved_tensors[0].cosh()


class Gathered(Function):
    """An argument of integers, and a list of tensors, which are constants."""

    @staticmethod
    def forward(x, index, factors):
        return x.gather(-1, index) * factors[0] * factors[1]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, index, factors = inputs
        ctx.save_for_backward(index, *factors)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx, grad):
        index, first, second = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_add(-1, index, grad * first * second), None, None
