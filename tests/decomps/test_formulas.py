"""What a formula gets from its declaration: neutral arguments, conventions, an operator."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from generated import opcheck
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps import registry
from normpass.decomps.conventions import Result, like, with_conventions
from normpass.decomps.neutral import ONE, ZERO
from normpass.decomps.registry import decompositions, derivative, formula, rules, slopes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
T = torch.tensor([1.0, -2.0, 4.0])


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty registry for the length of a test."""
    monkeypatch.setattr(registry, "_RULES", {})
    monkeypatch.setattr(registry, "_ROOMS", ())


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_conjugate_in_an_operator_that_stays_one(backend: str) -> None:
    """Compiled code calls operators with the keys excluded that see to lazy conjugates: PyTorch's
    own registration loses them.
    """
    g, w = (torch.complex(T, T.sin() * k) for k in (1, 2))
    op = torch.ops.normpass.mul_tensor_backward
    derivative("mul_tensor_backward")

    def gradient(g: Tensor, w: Tensor) -> Tensor:
        return op(g.conj(), w, w.dtype)

    found = torch.compile(gradient, fullgraph=True, backend=backend)(g, w)
    torch.testing.assert_close(found, torch.complex(*_conjugate_product(g, w)))


def _conjugate_product(g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of conj(g * w)."""
    return g.real * w.real - g.imag * w.imag, -(g.real * w.imag + g.imag * w.real)


# --- ZERO and ONE


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (T + ZERO, T),
        (ZERO + T, T),
        (T - ZERO, T),
        (ZERO - T, -T),
        (2.0 - ZERO, 2.0),
        (T * ONE, T),
        (ONE * T, T),
        (T / ONE, T),
        (torch.mul(T, ONE), T),
        (torch.add(T, ZERO), T),
        (2.0 * ONE, 2.0),
    ],
)
def test_what_is_not_there_changes_nothing(found: Any, right: Any) -> None:
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(right))


@pytest.mark.parametrize(
    "value",
    [
        *(T * ZERO, ZERO * T, 2 * ZERO, ZERO * 2, torch.mul(T, ZERO), ZERO / T, -ZERO),
        *(ZERO + ZERO, ZERO - ZERO, ZERO * ONE, ONE * ZERO),
        *(ZERO.sum(0), ZERO.to(torch.float64).reshape(3, 1)),
    ],
)
def test_what_is_linear_in_nothing_is_nothing(value: Any) -> None:
    assert value is ZERO


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: T / ZERO,
        lambda: torch.exp(ZERO),
        lambda: T + ONE,
        lambda: ONE.sum(),
        lambda: ZERO.exp(),
        lambda: bool(ZERO),
        lambda: torch.add(T, ZERO, alpha=2),
    ],
)
def test_anything_else_is_an_error(misuse: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, AttributeError, ZeroDivisionError)):
        misuse()


# --- conventions


def weighted(grad: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    return grad * weight, grad * x


SCHEMA = torch._C.parse_schema(
    "normpass::weighted(Tensor? grad, Tensor x, Tensor? weight, bool[2] mask) -> (Tensor, Tensor)"
)
WEIGHTED = with_conventions(
    weighted, SCHEMA, (Result(like("x")), Result(like("weight"))), zeros=["grad"], ones=["weight"]
)


@pytest.mark.parametrize(("given", "weight"), list(product([True, False], repeat=2)))
def test_none_is_a_neutral_argument(given: bool, weight: bool) -> None:
    g, w = (T if given else None), (T + 1 if weight else None)
    dx, dw = WEIGHTED(g, T, w, [True, True])
    assert (dx is None) == (not given)
    assert (dw is None) == (not given or not weight), "no weight, no gradient of it"
    if g is not None:
        assert torch.equal(dx, g if w is None else g * w)


def test_masked_results_are_none() -> None:
    assert WEIGHTED(T, T, T, [False, True])[0] is None
    assert WEIGHTED(T, T, T, [True, False])[1] is None


def test_halves_are_raised_and_come_back() -> None:
    x = torch.tensor([1.0, 257.0]).bfloat16()
    dx, _ = WEIGHTED(x, x, torch.full((2,), 1 / 3), [True, True])
    assert dx.dtype is torch.bfloat16
    assert torch.equal(dx, (x.float() / 3).bfloat16())


def test_the_gradient_of_a_real_tensor_is_real() -> None:
    dx, _ = WEIGHTED(T * 2j + 1, T, T, [True, True])
    assert torch.equal(dx, T)


def test_an_unknown_name_is_an_error() -> None:
    results = (Result(like("x")), Result(like("x")))
    with pytest.raises(ValueError, match=r"takes \(grad, x, weight, mask\); zeros and ones name y"):
        with_conventions(weighted, SCHEMA, results, zeros=["y"])


# --- a formula as an operator

softmax_double_backward = derivative("softmax_double_backward")


def softmax_arguments() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    g, go, x = torch.randn(3, 4, 5, dtype=torch.float64, generator=generator).unbind()
    return g, go, x.softmax(1)


def primitive(g: Tensor, go: Tensor, y: Tensor) -> Tensor:
    """The derivative in y, along g, of y * (go - sum(go * y)), by autograd."""

    def first(y: Tensor) -> Tensor:
        return (y * (go - (go * y).sum(1, keepdim=True)) * g).sum()

    return grad(first)(y)


def test_the_operator_computes_the_formula() -> None:
    g, go, y = softmax_arguments()
    op = torch.ops.normpass.softmax_double_backward.default
    assert softmax_double_backward.op is op
    torch.testing.assert_close(op(g, go, 1, y), primitive(g, go, y))
    torch.testing.assert_close(softmax_double_backward(g, go, 1, y), primitive(g, go, y))
    assert softmax_double_backward(None, go, 1, y) is None
    opcheck(op, (g, go, 1, y))
    opcheck(op, tuple(v.requires_grad_() if v is y else v for v in (g, go, 1, y)))


def test_transforms_go_through_the_operator() -> None:
    g, go, y = softmax_arguments()
    op = torch.ops.normpass.softmax_double_backward.default
    each = vmap(op, in_dims=(0, None, None, 0))(g[:, None], go[:1], 1, y[:, None])
    right = torch.stack([primitive(a[None], go[:1], b[None]) for a, b in zip(g, y, strict=True)])
    torch.testing.assert_close(each, right)

    def run(f: Any) -> Tensor:
        return jvp(lambda v: f(g, go, v).sin(), (y,), (g,))[1]

    torch.testing.assert_close(run(lambda g, go, v: op(g, go, 1, v)), run(primitive))
    assert torch.autograd.gradgradcheck(lambda v: op(g, go, 1, v), y.clone().requires_grad_())


def test_below_autograd_the_operator_is_one_node_that_the_table_resolves() -> None:
    g, go, y = softmax_arguments()
    op = torch.ops.normpass.softmax_double_backward.default
    traced = make_fx(lambda *a: op(*a[:2], 1, a[2]), tracing_mode="symbolic")(g, go, y)
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [op]
    table = decompositions()
    resolved = make_fx(traced, decomposition_table=table)(g, go, y)
    assert op not in {n.target for n in resolved.graph.nodes}
    torch.testing.assert_close(resolved(g, go, y), primitive(g, go, y))


# --- a rule of each kind in a few lines


@pytest.mark.usefixtures("scratch")
def test_a_formula_in_ten_lines() -> None:
    @formula(
        "vjp",
        "square_backward_for_a_test(Tensor? grad, Tensor self) -> Tensor",
        source="a.cpp: square_backward",
        shapes="grad: *s, self: *s -> dself: *s",
        results=(Result(like("self")),),
        zeros=("grad",),
    )
    def square_backward_for_a_test(grad: Tensor, self: Tensor) -> Tensor:
        return 2 * grad * self

    rule = derivative("square_backward_for_a_test")
    assert rules() == (rule,)
    assert torch.equal(rule(T, T), 2 * T * T)
    assert torch.equal(torch.ops.normpass.square_backward_for_a_test(T, T), 2 * T * T)
    assert rule(None, T) is None
    assert rule.op in decompositions()


@pytest.mark.usefixtures("scratch")
def test_a_slope_in_one_line() -> None:
    slopes({"aten.square.default": lambda x: 2 * x, "aten.no_such.default": abs}, source="a.yaml")
    assert [rule.kind for rule in rules()] == ["vjp", "jvp"]
    assert torch.equal(registry.rule_of("vjp", aten.square)(T, T), 2 * T * T)
    assert torch.equal(registry.rule_of("jvp", aten.square)(T, T), 2 * T * T)


@pytest.mark.usefixtures("scratch")
def test_a_slope_that_asks_for_what_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"the slope of aten.tanh.default may ask for .*x, y"):
        slopes({"aten.tanh.default": lambda z: z}, source="a.yaml")
