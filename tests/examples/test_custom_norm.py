"""examples/custom_norm.py: its norm is fused unregistered, and its numbers are right in float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from example_runs import INNER, assert_trains_as_eager
from higher_order_cases import numbers

import normpass
from normpass.examples import custom_norm


@pytest.mark.parametrize("inner", INNER)
def test_training_is_eagers(inner: str) -> None:
    sizes = {"width": 16, "depth": 2, "images": 32, "dtype": torch.float64}
    assert_trains_as_eager(custom_norm.Training, inner, fullgraph=True, **sizes)


def by_hand(
    x: np.ndarray, weight: np.ndarray, p: float, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """y and the gradients of x, weight and p, by NumPy:

    y = r x weight,  r = m^(-1/p),  m = mean_d(a^p),  a = |x| + e

    dweight = sum_n(g r x)
    dx      = r (gw - a^(p - 1) sign(x) / m * mean_d(gw x)),  gw = g weight
    dp      = sum(gw x r (log(m) / p - mean_d(a^p log(a)) / m) / p)
    """
    a, gw = np.abs(x) + custom_norm.SMALLEST, g * weight
    m = (a**p).mean(-1, keepdims=True)
    r = m ** (-1 / p)
    dx = r * (gw - a ** (p - 1) * np.sign(x) / m * (gw * x).mean(-1, keepdims=True))
    of_p = (np.log(m) / p - (a**p * np.log(a)).mean(-1, keepdims=True) / m) / p
    return r * x * weight, dx, (g * r * x).sum(0), (gw * x * r * of_p).sum()


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("p", [1.0, 2.0, 2.7])
def test_its_gradients_are_those_by_hand(p: float, inner: str) -> None:
    norm = custom_norm.PowerNorm(24).double()
    with torch.no_grad():
        norm.p.fill_(p)
        norm.weight.copy_(numbers(24))
    x, g = numbers(6, 24), numbers(24, 6).detach().T.contiguous()
    options = {"inner": inner, "least_bytes": 0}
    y = torch.compile(norm, backend="normpass", fullgraph=True, options=options)(x)
    found = (y, *torch.autograd.grad(y, (x, norm.weight, norm.p), g))
    arrays = (t.detach().numpy() for t in (x, norm.weight))
    right = by_hand(*arrays, p, g.numpy())
    for ours, want in zip(found, right, strict=True):
        torch.testing.assert_close(ours.detach(), torch.as_tensor(want), rtol=1e-10, atol=1e-12)


def test_at_two_it_is_rms_norm() -> None:
    """But for what keeps either from dividing by zero."""
    x = numbers(6, 24).detach()
    right = torch.nn.functional.rms_norm(x, (24,), eps=0.0)
    torch.testing.assert_close(custom_norm.PowerNorm(24).double()(x), right, rtol=1e-4, atol=1e-4)


def test_its_forward_and_backward_are_regions() -> None:
    """Each of the two norms, with nothing registered for them."""
    model = custom_norm.classifier(512, 2)
    options = {"inner": "eager"}  # what compiles the rest has no say in it, and takes longest
    report = normpass.explain(model, torch.randn(1437, 64), options=options)
    assert all(region.name.startswith("power_norm") for region in report.regions)
    fused = sorted((region.module, region.phase) for region in report.regions)
    assert fused == [(module, phase) for module in "14" for phase in ("backward", "forward")]
    assert not report.refused


def test_it_learns() -> None:
    compile = partial(torch.compile, backend="normpass", options={"inner": "eager"})
    step = custom_norm.Training(compile, width=64, depth=2, images=360)
    for _ in range(30):
        step()
    assert step.accuracy() > 0.8
    assert all(abs(p - 2) > 1e-3 for p in step.exponents())
