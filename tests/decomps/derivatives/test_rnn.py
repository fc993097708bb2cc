"""An LSTM layer of oneDNN, whose kernel is float32's alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.derivatives.rnn import _layer
from normpass.decomps.registry import derivative
from normpass.decomps.table.binding import vjp

NAMES = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_")
T, N, C, D = 5, 3, 4, 2
SHAPES = ((T, N, C), (4 * D, C), (4 * D, D), (4 * D,), (4 * D,), (N, D), (N, D))


def layer(dtype: torch.dtype, biases: bool) -> list[Any]:
    made = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in SHAPES]
    return made if biases else [t * 0 if k in (3, 4) else t for k, t in enumerate(made)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("given", list(product([True, False], repeat=3)), ids=str)
def test_the_gradients_are_those_of_steps(
    given: tuple[bool, ...], biases: bool, reverse: bool
) -> None:
    """To second order, with every choice of the results' gradients."""
    args = layer(torch.float64, biases)
    ys = _layer(*args, reverse)
    gs = [
        torch.randn_like(y).requires_grad_() if g else None for y, g in zip(ys, given, strict=True)
    ]
    numbers = (reverse, 2, D, 1, biases, True, False, [], False)
    found = derivative("mkldnn_rnn_layer_differentiable_backward")(*args, *ys, *gs, *numbers, ys[0])
    if not any(given):
        assert found == (None,) * 7
        return
    leaves = [v for k, v in enumerate(args) if biases or k not in (3, 4)]
    assert [v is None for v in found] == [not biases and k in (3, 4) for k in range(7)]
    found = [v for v in found if v is not None]
    there = [(y, g) for y, g in zip(ys, gs, strict=True) if g is not None]
    asked = {"create_graph": True, "materialize_grads": True}
    outputs, cotangents = [y for y, _ in there], [g for _, g in there]
    expected = torch.autograd.grad(outputs, leaves, cotangents, **asked)
    assert_close(found, list(expected), rtol=1e-10, atol=1e-12)
    steps = [torch.randn_like(v) for v in expected]
    again = torch.autograd.grad(found, [*leaves, *cotangents], steps, materialize_grads=True)
    right = torch.autograd.grad(expected, [*leaves, *cotangents], steps, materialize_grads=True)
    assert_close(again, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_row_of_the_operator(reverse: bool) -> None:
    args = layer(torch.float32, True)
    numbers = (reverse, [], 2, D, 1, True, False, False, True)
    op = torch.ops.aten.mkldnn_rnn_layer
    results = op(*args, *numbers)
    gs = [torch.randn_like(y) for y in results[:3]]
    expected = torch.autograd.grad(results[:3], args, gs)
    found = vjp(op)((*gs, None), (*args, *numbers), results)
    assert_close([found[n] for n in NAMES], list(expected), rtol=1e-4, atol=1e-5)
