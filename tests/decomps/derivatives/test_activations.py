"""The second derivatives of glu and gelu, against autograd's own and its third."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from normpass.decomps.registry import rules

if TYPE_CHECKING:
    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
aten = torch.ops.aten
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
by_approximation = pytest.mark.parametrize("approximate", ["none", "tanh"])
by_axis = pytest.mark.parametrize(("shape", "dim"), [((4,), 0), ((3, 6), -1), ((4, 3, 2), -3)])


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def glu(x: Tensor, dim: int) -> Tensor:
    """a * sigmoid(b), of primitives"""
    a, b = x.chunk(2, dim)
    return a / (1 + torch.exp(-b))


def gelu(x: Tensor, approximate: str) -> Tensor:
    """x * cdf(x), of primitives"""
    if approximate == "none":
        return x * (1 + torch.erf(x / 2**0.5)) / 2
    return x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


@by_axis
def test_glus_second_derivatives_are_those_of_primitives(shape: tuple[int, ...], dim: int) -> None:
    """And autograd's own, which are these formulas."""
    x = normal(*shape).requires_grad_()
    for function in (glu, functional.glu):
        y = function(x, dim)
        g, v = torch.randn_like(y).requires_grad_(), torch.randn_like(x)
        first = torch.autograd.grad(y, x, g, create_graph=True)[0]
        dx, dg = torch.autograd.grad(first, (x, g), v)
        assert_close(ops.glu_double_backward(v, g, x, dim), dx, **TIGHT)
        assert_close(ops.glu_double_backward_grad_output(v, x, dim), dg, **TIGHT)


@by_axis
def test_glus_third_derivatives_are_those_of_primitives(shape: tuple[int, ...], dim: int) -> None:
    x, g = normal(*shape).requires_grad_(), normal(*shape).chunk(2, dim)[0].requires_grad_()
    v = normal(*shape).requires_grad_()
    first = torch.autograd.grad(glu(x, dim), x, g, create_graph=True)[0]
    second = torch.autograd.grad(first, (x, g), v, create_graph=True)
    found = (
        ops.glu_double_backward(v, g, x, dim),
        ops.glu_double_backward_grad_output(v, x, dim),
    )
    h = [torch.randn_like(s) for s in second]
    third = (torch.autograd.grad(s, (x, g, v), h, retain_graph=True) for s in (found, second))
    assert_close(*third, **TIGHT)


@by_approximation
def test_gelus_second_and_third_derivatives_are_those_of_primitives(approximate: str) -> None:
    x = torch.cat([torch.linspace(-6, 6, 41).double(), torch.zeros(1).double()]).requires_grad_()
    g, v = torch.randn_like(x).requires_grad_(), torch.randn_like(x).requires_grad_()
    first = torch.autograd.grad(gelu(x, approximate), x, g, create_graph=True)[0]
    second = torch.autograd.grad(first, x, v, create_graph=True)[0]
    found = ops.gelu_double_backward(v, g, x, approximate)
    assert_close(found, second, **TIGHT)
    own = aten.gelu_backward(g, x, approximate=approximate)
    assert_close(found, torch.autograd.grad(own, x, v)[0], **TIGHT)
    h = torch.randn_like(x)
    third = (torch.autograd.grad(s, (x, g, v), h, retain_graph=True) for s in (found, second))
    assert_close(*third, **TIGHT)


@pytest.mark.parametrize("given", list(product([True, False], repeat=2)), ids=str)
def test_without_a_gradient_there_is_none(given: tuple[bool, bool]) -> None:
    x, v, g = normal(3, 4), normal(3, 4), normal(3, 2)
    some = [u if there else None for u, there in zip((v, g), given, strict=True)]
    assert (ops.glu_double_backward(*some, x, 1) is not None) == all(given)
    some = [u if there else None for u, there in zip((v, x), given, strict=True)]
    assert (ops.gelu_double_backward(*some, x, "none") is not None) == all(given)
    assert ops.glu_double_backward_grad_output(None, x, 1) is None


@by_approximation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_halves_are_no_less_exact_than_autograds_own(dtype: torch.dtype, approximate: str) -> None:
    x, g, v = (torch.randn(1000).to(dtype) for _ in range(3))
    exact = ops.gelu_double_backward(*(u.double() for u in (v, g, x)), approximate)
    leaf = x.clone().requires_grad_()
    own = aten.gelu_backward(g, leaf, approximate=approximate)
    (theirs,) = torch.autograd.grad(own, leaf, v)
    ours = ops.gelu_double_backward(v, g, x, approximate)
    error, replaced = ((u.double() - exact).abs().max() for u in (ours, theirs))
    assert ours.dtype == dtype
    assert error <= replaced
