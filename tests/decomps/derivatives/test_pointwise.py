"""Slopes of elementwise operators where they are hard: at special points, in half precision, to
second order. First order, and every mode of the rules, is tested from the registry
(tests/decomps/test_generated.py).
"""

from __future__ import annotations

import cmath
import re
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
from slope_calls import calls, close, cotangent, variants

from normpass.decomps import registry
from normpass.decomps.slopes import Elementwise
from normpass.decomps.torch_versions import I1_LOSES_NAN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

# Entries whose derivative is no slope.
EXCLUDED = {
    "aten.bernoulli.default": "random: what is drawn is no function of the tensor",
    "aten.normal.Tensor_float": "random; its gradient is defined as zero",
    "aten.normal.float_Tensor": "random; its gradient is defined as zero",
    "aten.poisson.default": "random; its gradient is defined as zero",
}

# Where PyTorch's forward and reverse modes have different limits (logit at -0.0 and at NaN).
FORWARD_DISAGREES = ("aten.logit.default",)

# Where PyTorch's derivative at NaN is a number in some versions.
LOSES_NAN = ("aten.special_i1.default", "aten.special_i1e.default")

aten = torch.ops.aten


def elementwise_entries() -> list[str]:
    """The operators of derivatives.yaml with `result: auto_element_wise`."""
    text = files("torchgen").joinpath("packaged/autograd/derivatives.yaml").read_text()
    flags = re.MULTILINE
    entries = re.split(r"^- name: ", text, flags=flags)[1:]
    found = [
        e.split("(")[0] for e in entries if re.search(r"^  result: auto_element_wise", e, flags)
    ]
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in found]


ENTRIES = elementwise_entries()
ROWS = [name for name in ENTRIES if name not in EXCLUDED]

# Some that ask for g, for x, for y and for other arguments.
HANDFUL = ["celu", "clamp", "elu", "exp", "gelu", "hardswish", "i0", "log1p", "logit", "mvlgamma"]
HANDFUL += ["neg", "polygamma", "relu", "rrelu_with_noise", "rsqrt", "sigmoid", "sinc", "softplus"]
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
rows = pytest.mark.parametrize("name", ROWS)
handful = pytest.mark.parametrize("name", [f"aten.{name}.default" for name in HANDFUL])


# --- tests --------------------------------------------------------------------------------------


def test_every_elementwise_entry_has_a_row_or_a_reason() -> None:
    known = {str(rule.op) for rule in registry.rules() if rule.kind == "vjp"}
    assert len(ENTRIES) > 80
    assert set(ENTRIES) - known == set(EXCLUDED)
    assert {str(rule.op) for rule in registry.rules() if rule.kind == "jvp"} >= set(ROWS)


@rows
def test_special_points_are_pytorchs(name: str) -> None:
    for call in variants(name):
        numbers = [float(v) for v in call.args if isinstance(v, int | float)]
        points = [
            0.0,
            1e-200,
            0.5,
            1,
            2,
            3,
            20,
            21,
            1e3,
            torch.inf,
            *numbers,
            *[1 - v for v in numbers],
        ]
        xs = torch.tensor([s * p for p in points for s in (1, -1)] + [torch.nan]).double()
        gs = torch.tensor([1.5, 0, -0.5, torch.inf, -torch.inf, torch.nan]).double()
        # Every other element of a buffer: PyTorch's vectorized kernels differ from its scalar ones
        # for NaN (hardshrink, hardtanh).
        x, g = (v.repeat_interleave(2)[::2] for v in torch.cartesian_prod(xs, gs).unbind(1))
        here = replace(call.on(x), exact=False)
        y = here(x)
        backward = here.pullback(g)
        forward = backward if name in FORWARD_DISAGREES else here.pushforward(g)
        if I1_LOSES_NAN and name in LOSES_NAN:
            nan = x.isnan()
            assert not backward[nan & g.isfinite()].isnan().any()
            backward, forward = (v.where(~nan, torch.nan) for v in (backward, forward))
        close(here.rule("vjp", g, y=y), backward, rtol=1e-6)
        close(here.rule("jvp", g, y=y), forward, rtol=1e-6)


@rows
def test_special_complex_points_are_pytorchs(name: str) -> None:
    points = [0, 1, -1, 1j, -1j, 2, -2, 0.5, -0.5j, 1 + 1j, 30 - 2j]
    x = torch.tensor(points, dtype=torch.complex128)
    for call in variants(name, torch.complex128):
        here = call.on(x)
        g = cotangent(here(x))
        close(here.rule("vjp", g), here.pullback(g))
        close(here.rule("jvp", g), here.pushforward(g))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@rows
def test_half_precision_is_no_less_accurate(name: str, dtype: torch.dtype) -> None:
    for call in calls(name, dtype):
        y = call(call.x)
        g = cotangent(y)
        replaced, reference = call.pullback(g), call.double().pullback(g.double())
        for result in (None, y):
            ours = call.rule("vjp", g, y=result)
            assert ours.dtype == dtype
            oracles.assert_no_less_accurate(ours, replaced, reference, str(call.args))


@dtypes
@rows
def test_second_derivatives_are_right(name: str, dtype: torch.dtype) -> None:
    for call in variants(name, dtype):
        x = call.x.detach().requires_grad_()
        y = call(x)
        g, v = cotangent(y).requires_grad_(), cotangent(x)
        expected = second(torch.autograd.grad(y, x, g, create_graph=True)[0], g, x, v)
        for result in (None, y):
            ours = second(call.rule("vjp", g, x, result), g, x, v)
            for a, b in zip(ours, expected, strict=True):
                close(a, b)


def second(dx: Tensor, g: Tensor, x: Tensor, v: Tensor) -> Sequence[Tensor]:
    if not dx.requires_grad:
        return torch.zeros_like(g), torch.zeros_like(x)
    return torch.autograd.grad(dx, (g, x), v, retain_graph=True, materialize_grads=True)


@rows
def test_gradients_of_complex_numbers_are_batched(name: str) -> None:
    """A conjugate is a view, and not every operator has a batching rule for those."""
    for call in calls(name, torch.complex128)[:1]:
        g = torch.stack([cotangent(call(call.x)), cotangent(call(call.x)) * 2j])
        close(torch.vmap(lambda v, call=call: call.rule("vjp", v))(g)[1], call.rule("vjp", g[1]))


@handful
def test_a_rule_asked_for_beforehand_compiles(name: str) -> None:
    call = calls(name)[0]
    rule: Callable[..., Any] = registry.rule_of("vjp", call.op)
    x = torch.rand(5, dtype=torch.float64)
    args = call.on(x).args

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(v: Tensor, *args: Any) -> Tensor:
        return rule(v, *args, **call.kwargs)

    close(compiled(x, *args), rule(x, *args, **call.kwargs))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_sinc_is_differentiated_exactly_near_zero(order: int) -> None:
    """Where autograd has 1e-6 at x = 1e-5 and NaN for the second derivative at 0."""
    mpmath = pytest.importorskip("mpmath")
    points = [0.0, 1e-9, -1e-5, 1e-3, -0.1, 0.159, 0.16, 0.3, 2.5]
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    d = registry.rule_of("vjp", aten.sinc)(torch.ones_like(x), x)
    for _ in range(order - 1):
        (d,) = torch.autograd.grad(d.sum(), x, create_graph=True)
    with mpmath.workdps(60):
        series = [mpmath.taylor(mpmath.sincpi, p, order)[order] for p in points]
        expected = [float(c * mpmath.factorial(order)) for c in series]
    close(d, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


def test_sinc_compiles_with_gradients_that_are_not_finite() -> None:
    """Inductor takes g * 0 for zero, whatever g is."""
    g = torch.tensor([1, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    compiled = torch.compile(registry.rule_of("vjp", aten.sinc), backend="inductor")
    close(compiled(g, torch.zeros_like(g)), torch.zeros_like(g))


@pytest.mark.parametrize("name", ["elu", "celu", "softplus", "gelu", "silu", "mish", "sigmoid"])
def test_second_derivatives_stay_finite_far_out(name: str) -> None:
    x = torch.tensor([-1000.0, 1000.0], dtype=torch.float64, requires_grad=True)
    call = calls(f"aten.{name}.default")[0].on(x)
    (d,) = torch.autograd.grad(call.rule("vjp", torch.ones_like(x)).sum(), x)
    close(d, torch.zeros_like(x))


@pytest.mark.parametrize("x", [1.5, 0.25])
def test_a_real_tensor_to_a_complex_power_has_a_complex_tangent(x: float) -> None:
    """PyTorch's forward mode drops its imaginary part."""
    a, t = 2 - 1j, 0.7
    real = torch.tensor(x, dtype=torch.float64), torch.tensor(t, dtype=torch.float64)
    found = registry.rule_of("jvp", aten.pow.Tensor_Scalar)(real[1], real[0], a)
    close(found, torch.tensor(t * a * x ** (a - 1), dtype=torch.complex128))
    found = registry.rule_of("jvp", aten.pow.Scalar)(real[1], a, real[0])
    close(found, torch.tensor(t * a**x * cmath.log(a), dtype=torch.complex128))


def test_a_slope_asks_for_what_its_operator_has() -> None:
    with pytest.raises(ValueError, match=r"may ask for g, x, y and aten\.exp.*takes \(alpha\)"):
        Elementwise(aten.exp.default, lambda alpha: alpha)
