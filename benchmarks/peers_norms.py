"""Norms and mixes of derivatives that are asked of several libraries, written once for all of them.

A norm is an operator of PyTorch's, and a formula that holds for torch and for jax.numpy alike. In
float64 and differentiated by PyTorch's autograd, the formula is the oracle; JAX, which has no norms
of its own but softmax, is given it too, as its users write norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from normpass.benchmarks.norms import EPS, GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.benchmarks.norms import Shape

    Function = Callable[..., Any]


@dataclass(frozen=True)
class Norm:
    """A norm of x and its parameters.

    Attributes:
        in_torch: of x and the parameters.
        formula: of torch or jax.numpy, x and the parameters.
        parameters: the shapes of the parameters, from that of x.
    """

    in_torch: Callable[..., Tensor]
    formula: Function
    parameters: Callable[[Shape], tuple[Shape, ...]]

    def primitives(self, library: Any) -> Function:
        """The formula of x and the parameters."""
        return lambda x, *parameters: self.formula(library, x, *parameters)


def standardized(library: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) over the axes"""
    centred = x - x.mean(axes, keepdims=True)
    return centred / library.sqrt((centred * centred).mean(axes, keepdims=True) + EPS)


def per_channel(values: Any, x: Any) -> Any:
    """c -> c 1 1, for x: n c *s"""
    return values.reshape((-1,) + (1,) * (x.ndim - 2))


def groups(x: Any) -> int:
    """Of the channels of x: n c *s; 3 where there are too few for the usual number."""
    return GROUPS if x.shape[1] % GROUPS == 0 else 3


def layer(library: Any, x: Any, weight: Any, bias: Any) -> Any:
    """y = standardized_d(x) * weight + bias"""
    return standardized(library, x, (-1,)) * weight + bias


def rms(library: Any, x: Any, weight: Any) -> Any:
    """y = x / sqrt(mean_d(x^2) + eps) * weight"""
    return x / library.sqrt((x * x).mean((-1,), keepdims=True) + EPS) * weight


def group(library: Any, x: Any, weight: Any, bias: Any) -> Any:
    """y = standardized over the channels of a group and all pixels, then per channel"""
    grouped = x.reshape((x.shape[0], groups(x), -1))
    y = standardized(library, grouped, (-1,)).reshape(x.shape)
    return y * per_channel(weight, x) + per_channel(bias, x)


def batch(library: Any, x: Any, weight: Any, bias: Any) -> Any:
    """y = standardized over examples and pixels, then per channel"""
    y = standardized(library, x, (0, *range(2, x.ndim)))
    return y * per_channel(weight, x) + per_channel(bias, x)


def instance(library: Any, x: Any, weight: Any, bias: Any) -> Any:
    """y = standardized over the pixels of each example's channel, then per channel"""
    y = standardized(library, x, tuple(range(2, x.ndim)))
    return y * per_channel(weight, x) + per_channel(bias, x)


def softmax(library: Any, x: Any) -> Any:
    """y = exp(x) / sum_d(exp(x)), for x that exp does not overflow of"""
    powers = library.exp(x)
    return powers / powers.sum((-1,), keepdims=True)


def weight_norm(library: Any, x: Any, length: Any) -> Any:
    """y = x / |x| * length, for each of the first axis"""
    squares = (x * x).sum(tuple(range(1, x.ndim)), keepdims=True)
    return x / library.sqrt(squares) * length


def _last(shape: Shape) -> tuple[Shape, ...]:
    return (shape[-1],), (shape[-1],)


def _channels(shape: Shape) -> tuple[Shape, ...]:
    return (shape[1],), (shape[1],)


NORMS = {
    "layer_norm": Norm(lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS), layer, _last),
    "rms_norm": Norm(
        lambda x, w: F.rms_norm(x, w.shape, w, EPS), rms, lambda shape: ((shape[-1],),)
    ),
    "group_norm": Norm(lambda x, w, b: F.group_norm(x, groups(x), w, b, EPS), group, _channels),
    "batch_norm": Norm(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, EPS), batch, _channels
    ),
    "instance_norm": Norm(
        lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=EPS), instance, _channels
    ),
    "softmax": Norm(lambda x: x.softmax(-1), softmax, lambda shape: ()),
    "weight_norm": Norm(
        # What torch.nn.utils.parametrizations.weight_norm calls.
        lambda x, length: torch._weight_norm(x, length, 0),
        weight_norm,
        lambda shape: ((shape[0], *[1] * (len(shape) - 1)),),
    ),
}


@dataclass(frozen=True)
class Library:
    """Transforms and arrays of one library, and constants of the cases in it.

    Attributes:
        transforms: torch.func or jax: grad, jvp, hessian, vmap.
        arrays: torch or jax.numpy.
        along: where derivatives are taken along.
        cotangent: what the norm's result is multiplied with before it is added up.
    """

    transforms: Any
    arrays: Any
    along: Any
    cotangent: Any

    def loss(self, norm: Function) -> Function:
        """The sum of norm(x) * cotangent."""
        return lambda x: (norm(x) * self.cotangent).sum()

    def slope(self, function: Function) -> Function:
        """The gradient of a function, along `along`."""
        return lambda x: (self.transforms.grad(function)(x) * self.along).sum()

    def tangent(self, function: Function) -> Function:
        """The derivative of a function along `along`, in forward mode."""
        return lambda x: self.transforms.jvp(function, (x,), (self.along,))[1]

    def of_examples(self, function: Function) -> Function:
        """A function of one x, of two."""
        return lambda x: self.transforms.vmap(function)(self.arrays.stack([x, x + self.along]))

    def hessian(self, function: Function) -> Function:
        """Of the first of x along its first axis."""

        def of_first(x: Any) -> Any:
            rest = x[1:]
            joined = self.arrays.concatenate
            return self.transforms.hessian(lambda v: function(joined([v, rest])))(x[:1])

        return of_first


# What is asked of a norm: its name -> the function of x that answers it.
MIXES: dict[str, Callable[[Library, Function], Function]] = {
    "forward": lambda to, norm: norm,
    "backward": lambda to, norm: to.transforms.grad(to.loss(norm)),
    "double backward": lambda to, norm: to.transforms.grad(to.slope(to.loss(norm))),
    "third order": lambda to, norm: to.transforms.grad(to.slope(to.slope(to.loss(norm)))),
    "jvp": lambda to, norm: to.tangent(to.loss(norm)),
    "jvp of jvp": lambda to, norm: to.tangent(to.tangent(to.loss(norm))),
    "hessian": lambda to, norm: to.hessian(to.loss(norm)),
    "vmap of grad": lambda to, norm: to.of_examples(to.transforms.grad(to.loss(norm))),
    "vmap of jvp": lambda to, norm: to.of_examples(to.tangent(to.loss(norm))),
}
# The same as "double backward", where the function alone is compiled and its gradient is taken
# twice from outside.
FROM_OUTSIDE = "double backward of compiled code"
