"""Cumulative sums and products.

Cumulative products and sums of exponentials have linear recurrences for derivatives: what reaches
one element from the next, times a factor, and what comes anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Tangent, manual
from normpass.decomps.neutral import ONE
from normpass.decomps.operators import is_differentiated

aten = torch.ops.aten


def products_before(x: Tensor, dim: int) -> Tensor:
    """The products of all that comes before each element along dim; of nothing it is one."""
    size = list(x.shape)
    size[dim] = 1
    # What is cut off is nothing, but of an empty row.
    before = torch.cat([x.new_ones(size), aten.slice(x, dim, 0, -1)], dim)
    return before.narrow(dim, 0, x.shape[dim]).cumprod(dim)


# --- recurrences ---------------------------------------------------------------------------------


def _recurrence(links: Tensor, terms: Tensor, *, reverse: bool = False) -> Tensor:
    """s_0 = t_0,  s_(i+1) = t_(i+1) + l_i s_i       along the last axis: links l, terms t
    in reverse s_i = t_i + l_i s_(i+1)
    """
    if reverse:
        return _steps(pad(links.flip(-1), (1, 0)), terms.flip(-1)).flip(-1)
    return _steps(pad(links, (1, 0)), terms)


def _steps(factors: Tensor, terms: Tensor) -> Tensor:
    """s_i = t_i + f_i s_(i-1)

    Two steps are one of the same kind, s_i = (t_i + f_i t_(i-1)) + f_i f_(i-1) s_(i-2): the odd
    places are a recurrence of half the length.
    """
    size = terms.shape[-1]
    if not isinstance(size, int):
        return _in_blocks(factors, terms)
    if size <= 4:
        return _pairs(factors, terms)
    factors, terms = (pad(v, (0, size % 2)) for v in (factors, terms))
    (f, t), (odd_f, odd_t) = ((factors[..., k::2], terms[..., k::2]) for k in (0, 1))
    ends = _steps(odd_f * f, odd_t + odd_f * t)
    first = t + f * pad(ends, (1, -1))
    return torch.stack([first, ends], -1).flatten(-2)[..., :size]


def _in_blocks(factors: Tensor, terms: Tensor, levels: int = 2) -> Tensor:
    """The same, of a length that is a symbol: it is not asked, so that a trace holds for all.

    In blocks of 32 s is that from zero, and what came before, times all factors; the ends of blocks
    are a recurrence. There are two at least: of a length of one a trace would take note.
    """
    if levels == 0:
        return _pairs(factors, terms)
    size, block = terms.shape[-1], 32
    count = size // block + 2
    f, t = (
        pad(v, (0, count * block - size)).unflatten(-1, (count, block)) for v in (factors, terms)
    )
    within, through = _steps(f, t), f.cumprod(-1)
    ends = _in_blocks(through[..., -1], within[..., -1], levels - 1)
    before = pad(ends, (1, -1)).unsqueeze(-1)
    return (within + through * before).flatten(-2)[..., :size]


def _pairs(factors: Tensor, terms: Tensor) -> Tensor:
    """s_i = sum_{k <= i}(t_k prod_{k < j <= i}(f_j))"""
    i = torch.arange(terms.shape[-1], device=terms.device)
    k = i.unsqueeze(-1)
    # factors: *n d -> *n k i
    products = torch.where(i > k, factors.unsqueeze(-2), 1).cumprod(-1)
    return (torch.where(i >= k, products, 0) * terms.unsqueeze(-1)).sum(-2)


def _rows(dim: int, *tensors: Tensor) -> list[Tensor]:
    """Tensors with dim last; a number is a row of one."""
    return [v.movedim(dim, -1) if v.dim() else v.unsqueeze(0) for v in tensors]


def _unrowed(rows: Tensor, dim: int, like: Tensor) -> Tensor:
    return rows.movedim(-1, dim) if like.dim() else rows.squeeze(0)


# --- products ------------------------------------------------------------------------------------


@manual(
    "grad: *n d, input: *n d, output: *n d -> dinput: *n d",
    source="aten/src/ATen/native/ReduceOps.cpp: cumprod_backward",
    sample=lambda input, dim: {"output": input.cumprod(dim)},
    of=aten.cumprod.default,
    why="by a division it would be a cumulative sum, but wrong at zeros, and the ways around them "
    "either ask for the values or are wrong to second order",
)
def cumprod_backward(grad: Gradient, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """y_i = prod_{j <= i}(x_j):

    dinput_k = conj(prod_{j < k}(x_j)) * s_k,  s_k = grad_k + conj(x_(k+1)) * s_(k+1)
    """
    x, g = _rows(dim, input.conj(), grad)
    later = _recurrence(x[..., 1:], g, reverse=True)
    return _unrowed(products_before(x, -1) * later, dim, input)


@manual("self_t: *n d, self_p: *n d, result: *n d -> result_t: *n d", of="cumprod")
def cumprod_jvp(self_t: Tangent, self_p: Tensor, result: Tensor, dim: int) -> Tensor:
    """y_i = prod_{j <= i}(x_j):  y_t_i = x_t_i * prod_{j < i}(x_j) + x_i * y_t_(i-1)"""
    x, t = _rows(dim, self_p, self_t)
    return _unrowed(_recurrence(x[..., 1:], t * products_before(x, -1)), dim, self_p)


# --- sums ----------------------------------------------------------------------------------------


@manual("grad: *n d -> dself: *n d", of=aten.cumsum.default)
def cumsum_backward(grad: Gradient, dim: int) -> Tensor:
    """y_i = sum_{j <= i}(x_j):  dx_j = sum_{i >= j}(grad_i)"""
    if absent(grad) or grad.dim() == 0 or grad.numel() <= 1:
        return grad
    return grad.flip(dim).cumsum(dim).flip(dim)


def _exp_of_difference(x: Tensor, y: Tensor) -> Tensor:
    """exp(x - y), one where both are the same infinity."""
    same = (x == y) & x.isinf()
    return torch.where(same, 0, x - y).exp()


def _shares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Any]:
    """y_i = log(sum_{j <= i}(exp(x_j))) -> exp(x_i - y_i), exp(y_i - y_(i+1)), and their recurrence

        1 = exp(x_i - y_i) + exp(y_(i-1) - y_i) * 1

    whose derivative is not nothing: y is only the scale in which exponentials are finite, and what
    is divided by the recurrence has the same derivatives whatever those of y are. PyTorch's are
    NaN at infinities: nothing goes through it. But of a trace y has its own from this formula.
    """
    differentiated = is_differentiated((x, y))
    y = y.detach() if differentiated else y
    new, links = _exp_of_difference(x, y), _exp_of_difference(y[..., :-1], y[..., 1:])
    return new, links, _recurrence(links, new) if differentiated else ONE


@manual("grad: *n d, self: *n d, result: *n d -> dself: *n d", of="logcumsumexp")
def logcumsumexp_backward(grad: Gradient, self: Tensor, result: Tensor, dim: int) -> Tensor:
    """y_i = log(sum_{j <= i}(exp(x_j))):

    dx_j = conj(exp(x_j - y_j)) * s_j,  s_j = grad_j + conj(exp(y_j - y_(j+1))) * s_(j+1)
    """
    x, y, g = _rows(dim, self, result, grad)
    new, links, one = _shares(x, y)
    later = _recurrence(links.conj(), g / one.conj(), reverse=True)
    return _unrowed(new.conj() * later, dim, self)


@manual("self_p: *n d, self_t: *n d -> result_t: *n d", of=aten.logcumsumexp.default)
def logcumsumexp_jvp(self_p: Tensor, self_t: Tangent, dim: int) -> Tensor:
    """y_i = log(sum_{j <= i}(exp(x_j))):

    y_t_i = exp(x_i - y_i) * x_t_i + exp(y_(i-1) - y_i) * y_t_(i-1)
    """
    x, t = _rows(dim, self_p, self_t)
    new, links, one = _shares(x, x.logcumsumexp(-1))
    return _unrowed(_recurrence(links, new * t) / one, dim, self_p)
