"""Slopes of elementwise operators, against PyTorch's own autograd and forward AD."""

from __future__ import annotations

import cmath
import functools
import itertools
import re
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import make_tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from normpass.decomps import registry
from normpass.decomps.slopes import Elementwise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

# Entries whose derivative is no slope.
EXCLUDED = {
    "aten.bernoulli.default": "random: what is drawn is no function of the tensor",
    "aten.normal.Tensor_float": "random; its gradient is defined as zero",
    "aten.normal.float_Tensor": "random; its gradient is defined as zero",
    "aten.poisson.default": "random; its gradient is defined as zero",
}

# Arguments beyond those of the OpInfo samples; `...` is the tensor.
MORE: dict[str, list[tuple[Any, ...]]] = {
    "aten.celu.default": [(..., 0.3), (..., 2)],
    "aten.clamp.default": [(..., -0.5, 1.5), (..., -1), (..., None, 1), (..., 1, -1)],
    "aten.clamp_max.default": [(..., 1), (..., -0.5)],
    "aten.clamp_min.default": [(..., 1), (..., -0.5)],
    "aten.copysign.Scalar": [(..., 2), (..., -0.0)],
    "aten.elu.default": [(..., 0.3, 1.5, 0.7)],
    "aten.fmod.Scalar": [(..., 1.5), (..., -2)],
    "aten.hardtanh.default": [(..., 0, 6)],
    "aten.leaky_relu.default": [(..., 0.3), (..., -0.2), (..., 0)],
    "aten.logit.default": [(..., 0.0), (..., 0.2), (..., None)],
    "aten.nan_to_num.default": [(..., 1.0, 2.0, -2.0)],
    "aten.polygamma.default": [(0, ...), (2, ...)],
    "aten.pow.Scalar": [(2, ...), (0.5, ...), (-2.0, ...), (0, ...), (1, ...)],
    "aten.pow.Tensor_Scalar": [(..., a) for a in (0, 1, 2, 3, 0.5, -1.5, 2.5, -1)],
    "aten.remainder.Scalar": [(..., 1.5), (..., -2)],
    "aten.rsub.Scalar": [(..., 1.5), (..., 2, -3)],
    "aten.softplus.default": [(..., 2, 5), (..., 0.5, 20)],
    "aten.special_xlog1py.other_scalar": [(..., 2.5), (..., -1), (..., -3.0)],
    "aten.special_xlog1py.self_scalar": [(2.5, ...), (0, ...), (-1, ...)],
    "aten.sub.Scalar": [(..., 1.5), (..., 2, 3)],
    "aten.threshold.default": [(..., 0.5, 3.0), (..., -1, 2)],
    "aten.xlogy.Scalar_Other": [(..., 2.5), (..., 0), (..., -3.0)],
    "aten.xlogy.Scalar_Self": [(2.5, ...), (0, ...), (-1, ...)],
}
MORE_COMPLEX: dict[str, list[tuple[Any, ...]]] = {
    "aten.pow.Scalar": [(2 - 1j, ...), (-2, ...)],
    "aten.pow.Tensor_Scalar": [(..., 2 - 1j), (..., 0.5), (..., -2)],
    "aten.rsub.Scalar": [(..., 1.5j), (..., 2, 1 - 3j)],
    "aten.sub.Scalar": [(..., 1.5j), (..., 2, 3j)],
}

aten = torch.ops.aten

# The same functions by other operators, where PyTorch's own derivative of float64 goes through
# float32: celu's 1 / alpha, hardsigmoid's 1 / 6 (which has no second derivative either).
EXACT: dict[str, Callable[..., Tensor]] = {
    "aten.celu.default": lambda x, alpha=1.0: aten.elu(x, alpha, 1, 1 / alpha),
    "aten.hardsigmoid.default": lambda x: aten.hardtanh(x, -3, 3) / 6 + 0.5,
}

# Where PyTorch's forward and reverse modes have different limits (logit at -0.0 and at NaN).
FORWARD_DISAGREES = ("aten.logit.default",)


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


# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of an operator; `at` is where its tensor stands.

    exact: whether autograd is asked of what EXACT has for the operator.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: bool = True

    @property
    def at(self) -> int:
        return next(i for i, v in enumerate(self.args) if isinstance(v, torch.Tensor))

    @property
    def x(self) -> Tensor:
        return self.args[self.at]

    def on(self, x: Tensor) -> Call:
        """The same call of another tensor; other tensors are like it."""
        like = [torch.full_like(x, 0.3) if isinstance(v, torch.Tensor) else v for v in self.args]
        like[self.at] = x
        return replace(self, args=tuple(like))

    def double(self) -> Call:
        args = [v.double() if isinstance(v, torch.Tensor) else v for v in self.args]
        return replace(self, args=tuple(args))

    def __call__(self, x: Tensor) -> Tensor:
        args = (*self.args[: self.at], x, *self.args[self.at + 1 :])
        # Some draw noise.
        torch.manual_seed(0)
        function = EXACT.get(str(self.op), self.op) if self.exact else self.op
        return function(*args, **self.kwargs)

    def rule(
        self, kind: str, v: Tensor, x: Tensor | None = None, y: Tensor | None = None
    ) -> Tensor:
        x = self.x if x is None else x
        args = (*self.args[: self.at], x, *self.args[self.at + 1 :])
        return getattr(registry, kind)(self.op)(v, *args, result=y, **self.kwargs)

    def pullback(self, g: Tensor) -> Tensor:
        x = self.x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(self(x), x, g)
        return dx

    def pushforward(self, t: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(self(forward_ad.make_dual(self.x, t)))
        return torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent


class Recorder(TorchDispatchMode):
    """Keeps the calls of one operator."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.op = op
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is self.op:
            self.calls.append(Call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def find(name: str) -> OpOverload:
    op = registry.find_op(name)
    assert op is not None
    return op


def infos(name: str) -> list[Any]:
    """The OpInfos through which the operator is reached."""
    base = name.split(".")[1].removeprefix("special_").removesuffix("_with_noise")
    base = {"clamp_max": "clamp", "clamp_min": "clamp"}.get(base, base)
    return [info for info in op_db if info.name.split(".")[-1] == base]


@functools.cache
def calls(name: str, dtype: torch.dtype = torch.float64) -> tuple[Call, ...]:
    """All OpInfo samples as calls of the operator itself, and those with more arguments; none
    where autograd does not support the dtype.
    """
    recorder = Recorder(find(name))
    known = [info for info in infos(name) if dtype in info.supported_backward_dtypes("cpu")]
    for info in known:
        for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
            with recorder:
                info.op(sample.input, *sample.args, **sample.kwargs)
    more = MORE.get(name, []) if known else []
    more = more + (MORE_COMPLEX.get(name, []) if dtype.is_complex else [])
    for i, shape in enumerate([(5, 7), (), (0, 3)]):
        for args in more:
            x = make_tensor(shape, dtype=dtype, device="cpu", noncontiguous=i == 0)
            filled = tuple(x if v is ... else v for v in args)
            recorder.calls.append(Call(find(name), filled, {}))
    return tuple(recorder.calls)


def variants(name: str, dtype: torch.dtype = torch.float64) -> list[Call]:
    """One call for each set of arguments other than the tensor."""
    found = {}
    for call in calls(name, dtype):
        numbers = [v for v in call.args if not isinstance(v, torch.Tensor)]
        found[repr((numbers, call.at, call.kwargs))] = call
    return list(found.values())


def cotangent(y: Tensor) -> Tensor:
    """Non-uniform, of both signs."""
    return make_tensor(y.shape, dtype=y.dtype, device="cpu", low=-2, high=2)


def close(ours: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=1e-12, equal_nan=True)


# --- tests --------------------------------------------------------------------------------------


def test_every_elementwise_entry_has_a_row_or_a_reason() -> None:
    known = {str(rule.op) for rule in registry.rules() if rule.kind == "vjp"}
    assert len(ENTRIES) > 80
    assert set(ENTRIES) - known == set(EXCLUDED)
    assert {str(rule.op) for rule in registry.rules() if rule.kind == "jvp"} >= set(ROWS)


@dtypes
@rows
def test_vjp_and_jvp_are_autograds_and_forward_ads(name: str, dtype: torch.dtype) -> None:
    found = calls(name, dtype)
    assert found or dtype.is_complex
    for call in found:
        y = call(call.x)
        v, t = cotangent(y), cotangent(call.x)
        expected = call.pullback(v), call.pushforward(t)
        for result in (None, y):
            close(call.rule("vjp", v, y=result), expected[0])
            close(call.rule("jvp", t, y=result), expected[1])


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
def test_a_symbolic_trace_fits_other_sizes(name: str) -> None:
    sizes = [torch.rand(2, n, 3, dtype=torch.float64) for n in (4, 6)]
    for call, kind in itertools.product(variants(name), ("vjp", "jvp")):
        rule = on_any(call, kind)
        graph = make_fx(rule, tracing_mode="symbolic")(sizes[0], sizes[0])
        close(graph(sizes[1], sizes[1]), rule(sizes[1], sizes[1]))


def on_any(call: Call, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda v, x: call.on(x).rule(kind, v)


@handful
def test_a_rule_asked_for_beforehand_compiles(name: str) -> None:
    call = calls(name)[0]
    rule: Callable[..., Any] = registry.vjp(call.op)
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
    d = registry.vjp(aten.sinc)(torch.ones_like(x), x)
    for _ in range(order - 1):
        (d,) = torch.autograd.grad(d.sum(), x, create_graph=True)
    with mpmath.workdps(60):
        series = [mpmath.taylor(mpmath.sincpi, p, order)[order] for p in points]
        expected = [float(c * mpmath.factorial(order)) for c in series]
    close(d, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


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
    found = registry.jvp(aten.pow.Tensor_Scalar)(real[1], real[0], a)
    close(found, torch.tensor(t * a * x ** (a - 1), dtype=torch.complex128))
    found = registry.jvp(aten.pow.Scalar)(real[1], a, real[0])
    close(found, torch.tensor(t * a**x * cmath.log(a), dtype=torch.complex128))


def test_a_slope_asks_for_what_its_operator_has() -> None:
    with pytest.raises(ValueError, match=r"may ask for g, x, y and aten\.exp.*takes \(alpha\)"):
        Elementwise(aten.exp.default, lambda alpha: alpha)
