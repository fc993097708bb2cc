"""What a row's later phase reads back: nothing transcendental is computed twice for an element, and
one array stands for all that it was computed from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from tracing import fused

from normpass.backend.program.plan import make_plan
from normpass.backend.program.tree import Compute, Keep, walk
from normpass.backend.run.runtime import kernel
from normpass.passes.region_text import parse
from normpass.passes.vocabulary import EXPENSIVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.backend.program.tree import Leaf, Plan

ROWS, WIDTH = 50, 40

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
}


def leaves(plan: Plan) -> list[Leaf]:
    return [leaf for node in plan.body for leaf in walk(node)]  # type: ignore[misc]


def norm_then(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of layer norm and then an activation."""

    def backward(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        inputs = [v.detach().requires_grad_() for v in (x, w, b)]
        y = activation(F.layer_norm(inputs[0], (WIDTH,), *inputs[1:]))
        return torch.autograd.grad(y, inputs, g)

    return backward


def then_norm(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of an activation and then layer norm."""

    def backward(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        inputs = [v.detach().requires_grad_() for v in (x, w, b)]
        y = F.layer_norm(activation(inputs[0]), (WIDTH,), *inputs[1:])
        return torch.autograd.grad(y, inputs, g)

    return backward


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", [norm_then, then_norm])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nothing_transcendental_is_computed_twice(
    name: str, order: Callable[..., Callable[..., tuple[Tensor, ...]]]
) -> None:
    x, g = torch.randn(2, ROWS, WIDTH).unbind()
    w, b = torch.randn(2, WIDTH).unbind()
    regions = fused(order(ACTIVATIONS[name]), x, w, b, g)
    computed = [
        (region.name, leaf.op.name)
        for region in regions
        for leaf in leaves(make_plan(region))
        if isinstance(leaf, Compute) and leaf.op.fn in EXPENSIVE
    ]
    assert computed
    assert len(set(computed)) == len(computed)


def test_one_array_stands_for_all_that_it_was_computed_from() -> None:
    """An exponential and an error function, of which one product is all that is needed later."""
    text = """
        region example; axes r=50 c=40; input x: f32[r c]; input g: f32[r c]
        e = exp(x); f = erf(x); h = add(e, f); gh = mul(g, h); s = sum[c](gh)
        d = sub(gh, s); output y: f32[r c] = d
    """
    kept = [leaf.value for leaf in leaves(make_plan(parse(text))) if isinstance(leaf, Keep)]
    assert kept == ["gh"]
    x, g = torch.randn(2, 50, 40).unbind()
    product = g * (x.exp() + x.erf())
    (y,) = kernel(text, ())([x, g], [])
    torch.testing.assert_close(y, product - product.sum(-1, keepdim=True), rtol=1e-5, atol=1e-4)


def test_what_is_needed_by_itself_too_is_kept_itself() -> None:
    text = """
        region example; axes r=50 c=40; input x: f32[r c]; input g: f32[r c]
        e = exp(x); ge = mul(g, e); s = sum[c](ge)
        p = mul(ge, s); q = add(p, e); output y: f32[r c] = q
    """
    kept = [leaf.value for leaf in leaves(make_plan(parse(text))) if isinstance(leaf, Keep)]
    assert kept == ["e"]


def test_a_truth_value_is_kept_as_one() -> None:
    text = """
        region example; axes r=50 c=40; input x: f32[r c]; input g: f32[r c]
        e = tanh(x); m = gt(e, 0.1); a = where(m, g, 0.0); s = sum[c](a)
        d = where(m, s, g); output y: f32[r c] = d
    """
    kept = [leaf.value for leaf in leaves(make_plan(parse(text))) if isinstance(leaf, Keep)]
    assert kept == ["m"]
    x, g = torch.randn(2, 50, 40).unbind()
    (y,) = kernel(text, ())([x, g], [])
    mask = x.tanh() > 0.1
    total = torch.where(mask, g, 0).sum(-1, keepdim=True)
    torch.testing.assert_close(y, torch.where(mask, total, g), rtol=1e-5, atol=1e-5)
