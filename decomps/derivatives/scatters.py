"""Reductions into groups: scatter_reduce and index_reduce.

Each place i of the result is a reduction of a group: of the elements of src whose index is i and,
if it is included, of self at i. The weights of a result in its elements are products

    dy_i = common_i * (of_self_i * dself_i + sum over e in group i of of_src_e * dsrc_e)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Tangent, manual
from normpass.decomps.neutral import ONE
from normpass.decomps.operators import is_differentiated


@dataclass(frozen=True)
class _Groups:
    """An index for each element of src, along one axis of self."""

    dim: int
    index: Tensor

    def add(self, base: Tensor, src: Tensor) -> Tensor:
        """To each group's number those of its elements."""
        return base.scatter_add(self.dim, self.index, src)

    def multiply(self, base: Tensor, src: Tensor) -> Tensor:
        """Each group's number with those of its elements."""
        return base.scatter_reduce(self.dim, self.index, src, "prod")

    def read(self, x: Tensor) -> Tensor:
        """For each element its group's number."""
        return x.gather(self.dim, self.index)

    def untouched(self, like: Tensor) -> Tensor:
        """One where the group has no element, else zero."""
        return torch.ones_like(like).scatter(self.dim, self.index, 0)


class _Weights(NamedTuple):
    common: Any
    of_self: Any
    of_src: Any


def _weights(
    groups: _Groups, self: Tensor, src: Tensor, reduce: str, include_self: bool, result: Tensor
) -> _Weights:
    """The weights of a reduction: a sum, mean, amax, amin or prod."""
    of_self: Any = ONE if include_self else groups.untouched(self)
    if reduce == "sum":
        return _Weights(ONE, of_self, ONE)
    if reduce == "mean":
        mine = torch.ones_like(self) if include_self else of_self
        return _Weights(1 / groups.add(mine, torch.ones_like(src)), of_self, ONE)
    if reduce in ("amax", "amin"):
        mine = (self == result).to(self.dtype) if include_self else of_self
        theirs = (src == groups.read(result)).to(src.dtype)
        return _Weights(1 / groups.add(mine, theirs), mine, theirs)
    return _of_product(groups, self, src, of_self)


# --- products -----------------------------------------------------------------------------------


def _of_product(groups: _Groups, self: Tensor, src: Tensor, of_self: Any) -> _Weights:
    """y = prod(x):  the product of all others, exact to the second derivative at zeros too

    p is the product of what is not zero. Where a group has z zeros and s is their sum, which is
    zero and has a derivative, the product of all but x is

        z = 0: p / x;   z = 1: p * s / x, p of the zero itself;   z = 2: p * (s - x) of a zero
    """
    mine = self if of_self is ONE else torch.ones_like(self)
    p = _of_others_than_zero(groups, mine, src)
    code = groups.add(_code(mine), _code(src))
    of_src = _without(src, groups.read(code))
    return _Weights(p, _without(self, code) if of_self is ONE else of_self, of_src)


def _of_others_than_zero(groups: _Groups, self: Tensor, src: Tensor) -> Tensor:
    """The product of what is not zero.

    torch asks for the values where it differentiates such a product: a trace cannot. Where a
    derivative is taken it is that of the sum of logarithms, of an exponential whose value is one.
    """
    self, src = self.masked_fill(self == 0, 1), src.masked_fill(src == 0, 1)
    if not is_differentiated((self, src)):
        return groups.multiply(self, src)
    logarithm = groups.add(self.abs().log(), src.abs().log())
    growth = (logarithm - logarithm.detach()).nan_to_num(0)
    return groups.multiply(self.detach(), src.detach()) * growth.exp()


def _code(x: Tensor) -> Tensor:
    """One for a zero, and the zero with it: the sum tells how many there are, and their sum."""
    return torch.where(x == 0, x + 1, 0)


def _without(x: Tensor, code: Tensor) -> Tensor:
    """The product of x's group without x, over that of its numbers that are not zero."""
    zeros = code.round()
    zero, s, one = x == 0, code - zeros, zeros == 1
    of_zero = one + (zeros == 2) * (s - x)
    of_other = ((zeros == 0) + one * s) / x.masked_fill(zero, 1)
    return torch.where(zero, of_zero, of_other)


# --- formulas -----------------------------------------------------------------------------------


def _backward(grad: Tensor, groups: _Groups, weights: _Weights) -> tuple[Tensor, Tensor]:
    common, of_self, of_src = weights
    grad = grad * common
    # A copy where nothing is multiplied: an operator's result is its own.
    of_self = grad.clone() if of_self is ONE else grad * of_self
    return of_self, groups.read(grad) * of_src


def _of_slices(index: Tensor, dim: int, src: Tensor) -> Tensor:
    """An index for each slice of src along an axis -> for each element."""
    shape = [1] * src.dim()
    if shape:
        shape[dim] = src.shape[dim]
    return index.view(shape).expand(src.shape)


def _index(self: Tensor, src: Tensor, dim: int) -> Tensor:
    """Indices that choose the first place twice, and the last never."""
    places = torch.arange(src.shape[dim], device=src.device)
    return (places - 1).clamp(min=0) % max(self.shape[dim] - 1, 1)


def _scattered(self: Tensor, src: Tensor) -> dict[str, Any]:
    return {"index": _index(self, src, -1).expand(src.shape)}


_of_reduction = partial(
    manual,
    rest="str reduce, bool include_self, Tensor result",
    why="of a product with several zeros: exact to the second derivative, not beyond",
)


@_of_reduction(
    "grad: *n d, self: *n d, index: *n m, src: *n m, result: *n d -> dself: *n d, dsrc: *n m",
    of="scatter_reduce.two",
    sample=_scattered,
    compared=("self", "src", "result"),
)
def scatter_reduce_backward(
    grad: Gradient, self: Tensor, dim: int, index: Tensor, src: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    """dself_i = grad_i * common_i * of_self_i,  dsrc_e = (grad * common)_index(e) * of_src_e"""
    groups = _Groups(dim, index)
    return _backward(grad, groups, _weights(groups, self, src, *how))


@_of_reduction(
    "grad: *n d, self: *n d, index: m, source: *n m, result: *n d -> dself: *n d, dsource: *n m",
    of="index_reduce",
    sample=lambda self, source: {"index": _index(self, source, -1)},
    compared=("self", "source", "result"),
)
def index_reduce_backward(
    grad: Gradient, self: Tensor, dim: int, index: Tensor, source: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    """As scatter_reduce's, with an index for each slice along an axis"""
    groups = _Groups(dim, _of_slices(index, dim, source))
    return _backward(grad, groups, _weights(groups, self, source, *how))


@_of_reduction(
    "self_p: *n d, self_t: *n d, index: *n m, src_p: *n m, src_t: *n m, result: *n d "
    "-> result_t: *n d",
    of="scatter_reduce.two",
    sample=_scattered,
    compared=("self_p", "src_p", "result"),
)
def scatter_reduce_jvp(
    self_p: Tensor,
    self_t: Tangent,
    dim: int,
    index: Tensor,
    src_p: Tensor,
    src_t: Tangent,
    *how: Any,
) -> Tensor:
    """dy_i = common_i * (of_self_i * dself_i + sum_e(of_src_e * dsrc_e))"""
    groups = _Groups(dim, index)
    common, of_self, of_src = _weights(groups, self_p, src_p, *how)
    total, each = self_t * of_self, src_t * of_src
    if not absent(each):
        total = groups.add(torch.zeros_like(self_p) if absent(total) else total, each)
    return total * common
