"""Losses: derivatives of their backwards, and binary cross entropies at their bounds."""

from __future__ import annotations

from typing import Any

import pytest
import table_calls
import torch
from torch.testing import assert_close

from normpass.decomps.registry import derivative
from normpass.decomps.table.binding import jvp, vjp

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)
reductions = pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])


def probabilities(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.9 + 0.05


def compared(op: Any, grad: torch.Tensor, wanted: tuple[str, ...], **args: Any) -> None:
    """The gradients and theirs against autograd's, with the other arguments constant: PyTorch
    refuses a weight that asks for a gradient.
    """
    leaves = {name: args[name].clone().requires_grad_() for name in wanted}
    xs, g = [*leaves.values()], grad.clone().requires_grad_()
    result = op(**args | leaves)
    by_name = vjp(op)((g,), args | leaves, result, wanted)
    found = tuple(by_name[name] for name in wanted)
    expected = torch.autograd.grad(result, xs, g, create_graph=True)
    assert_close(found, expected)
    again = [
        torch.autograd.grad(first, [*xs, g], [f.cos() for f in expected], materialize_grads=True)
        for first in (found, expected)
    ]
    assert_close(*again)


@reductions
@pytest.mark.parametrize("shape", [(4, 3), (), (0, 3)], ids=str)
@pytest.mark.parametrize("weighed", [False, True])
def test_first_and_second_derivatives(
    reduction: int, shape: tuple[int, ...], weighed: bool
) -> None:
    torch.manual_seed(0)
    x, y, w, p = (probabilities(*shape) for _ in range(4))
    g = torch.randn(shape if reduction == NONE else (), dtype=torch.float64)
    h, pair = torch.randn_like(x), ("self", "target")
    both: dict[str, Any] = {"self": x, "target": y, "reduction": reduction}
    weight: dict[str, Any] = {"weight": w if weighed else None}
    compared(aten.binary_cross_entropy.default, g, pair, **both, **weight)
    of_backward, weight_of = ("grad_output", *pair), {"grad_output": g, **both, **weight}
    compared(aten.binary_cross_entropy_backward.default, h, of_backward, **weight_of)
    for positive in (None, p[..., :1] if shape else p):
        logits = {**both, "self": x - 0.5, **weight, "pos_weight": positive}
        compared(aten.binary_cross_entropy_with_logits.default, g, pair, **logits)
    huber = {"grad_output": g, **both, "self": 6 * x, "delta": 1.5}
    compared(aten.huber_loss_backward.default, h, of_backward, **huber)
    margin = {"grad_output": g, **both, "target": y - 0.5}
    compared(aten.soft_margin_loss_backward.default, h, ("grad_output", "self"), **margin)


@reductions
def test_tangents_of_a_backward(reduction: int) -> None:
    x, y = probabilities(4, 3), probabilities(4, 3)
    g = torch.randn((4, 3) if reduction == NONE else (), dtype=torch.float64)
    args = {"grad_output": g, "self": x, "target": y, "weight": None, "reduction": reduction}
    call = table_calls.Call(aten.binary_cross_entropy_backward.default, args)
    assert table_calls.check_jvp(call) == table_calls.RIGHT


def test_a_target_of_what_is_certain() -> None:
    """The loss has -100 for log(0). PyTorch's gradient is infinite there."""
    x = torch.tensor([0.0, 1.0, 0.25], dtype=torch.float64)
    y = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    args = (x, y, None, NONE)
    loss, g, h = aten.binary_cross_entropy(*args), torch.ones_like(x), 1e-6
    found = vjp(aten.binary_cross_entropy)((g,), args, loss, ["target"])["target"]
    ends = [aten.binary_cross_entropy(x, y + sign * h, None, NONE) for sign in (1, -1)]
    assert_close(found, (ends[0] - ends[1]) / (2 * h), rtol=1e-7, atol=1e-7)
    target = y.clone().requires_grad_()
    (stock,) = torch.autograd.grad(aten.binary_cross_entropy(x, target, None, NONE), target, g)
    assert stock.isinf().tolist() == [True, True, False]


def test_second_derivatives_of_what_is_certain() -> None:
    """They are finite, as PyTorch's are."""
    x = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    y = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    rule = derivative("binary_cross_entropy_double_backward")
    found = rule(torch.ones_like(x), torch.ones_like(x), x, y, None, NONE)
    assert_close(found, torch.tensor([0, 0, 1e24, 1e24], dtype=torch.float64))


def test_a_tangent_of_the_target_alone() -> None:
    x, y, t = probabilities(3), probabilities(3), torch.randn(3, dtype=torch.float64)
    for op in (aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits):
        (found,) = jvp(op)({"target": t}, (x, y), op(x, y))
        one = torch.ones((), dtype=x.dtype)
        gradients = vjp(op)((one,), (x, y), op(x, y), ["target"])
        assert_close(found, (gradients["target"] * t).sum())


def test_a_classification_without_a_path() -> None:
    """What is infinite and was made zero hands on nothing, whatever the kernel saved."""
    loss = torch.tensor([0.0, 2.0], dtype=torch.float64)
    saved = torch.tensor([[[torch.nan], [1.5]]], dtype=torch.float64)
    g = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    for backend in ("cudnn", "miopen"):
        rule = derivative(f"_{backend}_ctc_loss_backward")
        found = rule(g, loss, saved, True)
        assert_close(found, torch.tensor([[[0.0], [3.0]]], dtype=torch.float64))
        (of_g,) = torch.autograd.grad(found.sum(), g)
        assert_close(of_g, torch.tensor([0.0, 1.5], dtype=torch.float64))
        assert rule(g, loss, saved, False).isnan().any()


def test_an_absolute_value_has_no_second_derivative() -> None:
    """Which is what the smooth one is without a part that is smooth."""
    g, x, y = torch.randn(3, 4).unbind()
    found = derivative("smooth_l1_loss_double_backward")(g, x, y, MEAN, 0.0)
    assert_close(found, torch.zeros(4))
