"""Sums, products and vector norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

from normpass.decomps.axes import put_back, reduced
from normpass.decomps.derivatives.scans import products_before
from normpass.decomps.manual import Dims, Gradient, Ints, Number, Real, Tangent, manual
from normpass.decomps.neutral import ZERO

aten = torch.ops.aten

_AT_ZERO = (
    "zero, a subgradient, where the norm or an element is zero, and from there on: a norm with "
    "p < 2 has no second derivative at an element that is zero"
)


@manual(
    "grad: *n -> dself: *n *d",
    of=lambda self, opt_dims, keepdim: self.sum(opt_dims, keepdim=keepdim),
    as_given=True,
    why="a copy, where upstream returns a view of the gradient: an operator's result is its own",
)
def sum_backward(grad: Gradient, sizes: Ints, opt_dims: Dims | None, keepdim: bool) -> Tensor:
    """y = sum_d(x):  dself = grad, repeated along d"""
    if opt_dims and sizes and not keepdim:
        grad = put_back(grad, [axis % len(sizes) for axis in opt_dims])
    return grad.expand(sizes).clone()


@manual("grad: *n -> dself: *n *d", of="mean.dim")
def mean_backward(
    grad: Gradient, shape: Ints, opt_dim: Ints | None, numel: int, keepdim: bool
) -> Tensor:
    """y = mean_d(x):  dx = grad / N, N the length of d, repeated along d"""
    axes = [axis % len(shape) for axis in opt_dim or range(len(shape))] if shape else []
    count = math.prod(shape[axis] for axis in axes) if axes else 1
    return sum_backward(grad / count, shape, opt_dim, keepdim)


@manual(
    "grad: *n, self: *n *d -> dself: *n *d",
    of=lambda self, dims, keepdim: self.nansum(dims, keepdim),
)
def nansum_backward(grad: Gradient, self: Tensor, dims: Ints | None, keepdim: bool) -> Tensor:
    """y = sum_d(x), without what is NaN:  dx = grad repeated along d, zero at NaN"""
    return sum_backward(grad, self.shape, dims, keepdim) * ~self.isnan()


# --- products ------------------------------------------------------------------------------------


def _others(x: Tensor, dim: int) -> Tensor:
    """The products of all elements but each one, without a division."""
    return products_before(x, dim) * products_before(x.flip(dim), dim).flip(dim)


@manual(
    "grad: , input: *d, result: -> dinput: *d",
    sample=lambda input: {"result": input.prod()},
    of=aten.prod.default,
    why="upstream divides the result where it finds no zero, which a trace cannot ask",
)
def prod_backward(grad: Gradient, input: Tensor, result: Tensor) -> Tensor:
    """y = prod(x):  dinput_i = grad * conj(prod over j other than i of x_j)"""
    return grad * _others(input.reshape(-1), 0).reshape(input.shape).conj()


@manual(
    "grad: *n, input: *n d, result: *n -> dinput: *n d",
    name="prod_backward.dim",
    sample=lambda input, dim, keepdim: {"result": input.prod(dim, keepdim)},
    of=aten.prod.dim_int,
    why="upstream divides the result where it finds no zero, which a trace cannot ask",
)
def prod_backward_dim(
    grad: Gradient, input: Tensor, result: Tensor, dim: int, keepdim: bool
) -> Tensor:
    """y = prod_d(x):  dinput_i = grad * conj(prod over j other than i of x_j)"""
    if input.dim() == 0:
        return prod_backward(grad, input, result)
    if not keepdim:
        grad = put_back(grad, [dim % input.dim()])
    return prod_safe_zeros_backward(grad, input, dim)


@manual("grad: *n 1, inp: *n d -> dinp: *n d", of=lambda inp, dim: inp.prod(dim, keepdim=True))
def prod_safe_zeros_backward(grad: Gradient, inp: Tensor, dim: int) -> Tensor:
    """As above, of a gradient that has the axis."""
    return grad * _others(inp, dim).conj()


# --- norms ---------------------------------------------------------------------------------------


def _slope(x: Tensor, norm: Tensor, p: float, axes: Ints) -> Tensor:
    """norm = sum_d(|x|^p)^(1/p), with its axes:  dnorm / dx = sgn(x) * (|x| / norm)^(p - 1)

    p = inf:  sgn(x) / count_d, at those of the elements, count_d in number, whose |x| is the norm
    """
    if p == 1:
        return x.sgn()
    if math.isinf(p):
        size = x.abs()
        extreme = (size == norm) | size.isnan()
        return x.sgn() * extreme / extreme.sum(list(axes), keepdim=True)
    nothing = norm == 0
    # Divided by one where it is zero: an infinity would come back as NaN with the next derivative.
    norm = norm.masked_fill(nothing, 1)
    if p == 2:
        return (x / norm).masked_fill(nothing, 0)
    # Where the norm is NaN, so is the slope at zero.
    nothing = nothing | ((x == 0) & ~norm.isnan())
    ratio = (x.abs() / norm).masked_fill(nothing, 1)
    return x.sgn() * ratio.pow(p - 1).masked_fill(nothing, 0)


@manual(
    "grad: *n, self: *n *d, norm: *n -> dself: *n *d",
    name="norm_backward.dim",
    sample=lambda self, p_, dim, keepdim: {"norm": vector_norm(self, p_, dim, keepdim)},
    of=lambda self, p_, dim, keepdim: vector_norm(self, p_, dim, keepdim),
    why=_AT_ZERO,
)
def norm_backward_dim(
    grad: Gradient, self: Tensor, p_: Real | None, norm: Tensor, dim: Dims, keepdim: bool
) -> Tensor:
    """norm = sum_d(|x|^p)^(1/p):  dself = grad * sgn(x) * (|x| / norm)^(p - 1)

    p = 0 counts what is not zero and has no gradient.
    """
    p = 2.0 if p_ is None else float(p_)
    if p == 0:
        return ZERO
    axes = reduced(self, dim)
    if not keepdim:
        grad, norm = put_back(grad, axes), put_back(norm, axes)
    return grad * _slope(self, norm, p, axes)


@manual(
    "grad: , self: *d, norm: -> dself: *d",
    sample=lambda self, p_: {"norm": vector_norm(self, p_)},
    of=lambda self, p_: vector_norm(self, p_),
    why=_AT_ZERO,
)
def norm_backward(grad: Gradient, self: Tensor, p_: Real | None, norm: Tensor) -> Tensor:
    """As above, over all axes: numbers broadcast as they are."""
    return norm_backward_dim(grad, self, p_, norm, [], True)


@manual(
    "self_p: *n *d, self_t: *n *d, norm: *n -> norm_t: *n",
    name="norm_jvp.dim",
    sample=lambda self_p, p_, dim, keepdim: {"norm": vector_norm(self_p, p_, dim, keepdim)},
    of=lambda self_p, p_, dim, keepdim: vector_norm(self_p, p_, dim, keepdim),
    why=_AT_ZERO,
)
def norm_jvp_dim(
    self_p: Tensor, self_t: Tangent, p_: Real | None, norm: Tensor, dim: Dims, keepdim: bool
) -> Tensor:
    """norm = sum_d(|x|^p)^(1/p):  norm_t = sum_d(Re(conj(x_t) * sgn(x)) * (|x| / norm)^(p - 1))"""
    p = 2.0 if p_ is None else float(p_)
    if p == 0:
        return torch.zeros_like(norm)
    axes = reduced(self_p, dim)
    slope = _slope(self_p, norm if keepdim else put_back(norm, axes), p, axes)
    # The result is real, as the norm is: the imaginary part is left out.
    return (slope * self_t.conj()).sum(axes, keepdim=keepdim)


@manual(
    "self_p: *d, self_t: *d, norm: -> norm_t: ",
    sample=lambda self_p, p_: {"norm": vector_norm(self_p, p_)},
    of=lambda self_p, p_: vector_norm(self_p, p_),
    why=_AT_ZERO,
)
def norm_jvp(self_p: Tensor, self_t: Tangent, p_: Real | None, norm: Tensor) -> Tensor:
    """As above, over all axes."""
    return norm_jvp_dim(self_p, self_t, p_, norm, [], False)


@manual("grad: *n, self: *n *d, norm: *n -> dself: *n *d", of="linalg_vector_norm", why=_AT_ZERO)
def linalg_vector_norm_backward(
    grad: Gradient,
    self: Tensor,
    scalar_ord: Number,
    norm: Tensor,
    opt_dim: Ints | None,
    keepdim: bool,
) -> Tensor:
    """norm = sum_d(|x|^p)^(1/p):  dself = grad * sgn(x) * (|x| / norm)^(p - 1)"""
    return norm_backward_dim(grad, self, float(scalar_ord.real), norm, opt_dim or [], keepdim)


@manual(
    "self_p: *n *d, self_t: *n *d, norm: *n -> norm_t: *n", of="linalg_vector_norm", why=_AT_ZERO
)
def linalg_vector_norm_jvp(
    self_p: Tensor,
    self_t: Tangent,
    scalar_ord: Number,
    norm: Tensor,
    opt_dim: Ints | None,
    keepdim: bool,
) -> Tensor:
    """norm_t = sum_d(Re(conj(x_t) * sgn(x)) * (|x| / norm)^(p - 1))"""
    return norm_jvp_dim(self_p, self_t, float(scalar_ord.real), norm, opt_dim or [], keepdim)
