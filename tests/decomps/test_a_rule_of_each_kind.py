"""A rule of each kind, entered in a few lines, is listed, activated, documented and tested; a wrong
one fails the tests that are generated for it.

The operators are made up here and gone after each test, and so are the rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import generated
import generated_values
import pytest
import slope_calls
import torch
from samples import samples
from torch._inductor import decomposition as inductor
from torch.autograd.gradcheck import GradcheckError

import normpass
from normpass.decomps import registry
from normpass.decomps.activation import registered
from normpass.decomps.batching import any_of, batched_decomposition, front, outputs, trailing
from normpass.decomps.conventions import Result, like
from normpass.decomps.coverage.page import by_family, page
from normpass.decomps.registry import decomposition, formula, register_rule, slopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch._ops import OpOverload

    from normpass.decomps.registry import Rule


@pytest.fixture(autouse=True)
def _gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is not there for the next."""
    monkeypatch.setattr(registry, "_RULES", {rule.key: rule for rule in registry.rules()})


@pytest.fixture
def scaled() -> Iterator[OpOverload]:
    """made_up::scaled, x * (1 + weight), with kernels and a derivative but no rule of ours."""
    with torch.library._scoped_library("made_up", "FRAGMENT") as library:
        library.define("scaled(Tensor x, Tensor? weight) -> Tensor")
        library.impl(
            "scaled",
            lambda x, weight: x.clone() if weight is None else x * (1 + weight),
            "CompositeExplicitAutograd",
        )
        yield torch.ops.made_up.scaled.default
    if hasattr(torch.ops.made_up, "scaled"):
        del torch.ops.made_up.scaled


@pytest.fixture
def cube() -> Iterator[OpOverload]:
    """made_up::cube, x^3, which autograd takes apart."""
    with torch.library._scoped_library("made_up", "FRAGMENT") as library:
        library.define("cube(Tensor x) -> Tensor")
        library.impl("cube", lambda x: x * x * x, "CompositeImplicitAutograd")
        yield torch.ops.made_up.cube.default
    if hasattr(torch.ops.made_up, "cube"):
        del torch.ops.made_up.cube
    slope_calls.calls.cache_clear()


def added(*kinds: str) -> list[Rule]:
    """The rules that this test has entered: of these kinds, listed, and on the page."""
    new = [rule for rule in normpass.rules() if "made_up.py" in rule.source]
    assert [rule.kind for rule in new] == list(kinds)
    listed = [rule for rules in by_family().values() for rule in rules]
    for rule in new:
        assert rule in listed
        assert f"`{rule.name}`" in page()
    return new


def fails(check: Callable[..., None], *args: Any) -> bool:
    """Whether a check finds something wrong."""
    try:
        check(*args)
    except (AssertionError, GradcheckError):
        return True
    return False


# --- decomposition and autograd -----------------------------------------------------------------


def enter_decomposition(op: OpOverload, one: float) -> None:
    @decomposition(
        op,
        source="made_up.py: scaled",
        shapes="x: *n d, weight: d -> y: *n d",
        results=(Result(like("x")),),
        autograd=True,
    )
    def scaled(x: Tensor, weight: Tensor | None) -> Tensor:
        """y = x * (1 + weight)"""
        return x if weight is None else x * (one + weight)


def test_a_decomposition_and_a_composition(scaled: OpOverload) -> None:
    enter_decomposition(scaled, 1)
    found, composition = added("decomposition", "autograd")
    with registered():
        assert inductor.select_decomp_table()[scaled] is found.function
        assert scaled.py_kernels
    assert not scaled.py_kernels
    for rule in (found, composition):
        for first, second in zip(samples(rule), samples(rule, which=1), strict=True):
            generated.check_shapes(first)
            generated.check_fake(first)
            generated.check_trace(first, second)
            generated.check_derivatives(first)
            generated.check_orders(first)
            generated_values.check_replaces(first)
    generated.check_compiled(next(samples(found)))
    generated_values.check_compiled_tangent(next(samples(composition)))


def test_a_wrong_decomposition_fails(scaled: OpOverload) -> None:
    enter_decomposition(scaled, 1.001)
    for rule in added("decomposition", "autograd"):
        assert fails(generated_values.check_replaces, next(samples(rule)))


# --- batching -----------------------------------------------------------------------------------


def enter_batching(op: OpOverload, one: float, calls: list[Any]) -> None:
    @register_rule(
        "batching",
        op,
        source="made_up.py: scaled_batch_rule",
        shapes="x: v *n d, weight: v d -> y: v *n d",
    )
    def scaled(info: Any, in_dims: Any, x: Tensor, weight: Tensor | None) -> Any:
        """y = x * (1 + weight), per example"""
        calls.append(in_dims)
        x = front(x, in_dims[0])
        scale = 1 if weight is None else one + trailing(front(weight, in_dims[1]), x.dim())
        (y,), (dim,) = outputs((x * scale, any_of(*in_dims)))
        return y, dim


def test_a_batching_rule(scaled: OpOverload) -> None:
    calls: list[Any] = []
    enter_batching(scaled, 1, calls)
    (rule,) = added("batching")
    for sample in samples(rule):
        generated.check_shapes(sample)
        for dims in generated_values.batchings(sample):
            generated_values.check_batched(sample, dims)
    calls.clear()
    generated_values.check_vmap_compiled(next(samples(rule)))
    assert calls, "the compiled vmap asked the rule"
    assert not scaled.py_kernels


def test_a_wrong_batching_rule_fails(scaled: OpOverload) -> None:
    enter_batching(scaled, 1.001, [])
    (rule,) = added("batching")
    assert fails(generated_values.check_batched, next(samples(rule)), (0, 0))
    assert fails(generated_values.check_vmap_compiled, next(samples(rule)))


def enter_both(op: OpOverload, one: float) -> None:
    @batched_decomposition(
        op,
        source="made_up.py: scaled",
        shapes="x: *n d, w: d -> y: *n d",
        results=(Result(like("x")),),
        of=("x w",),
        batching="made_up.py: scaled_batch_rule",
    )
    def scaled(x: Tensor, w: Tensor | None, *, v: int = 0) -> Tensor:
        """y = x * (1 + w)"""
        return x if w is None else x * (1 + (one if v else 1) * trailing(w, x.dim(), v))


def test_a_decomposition_and_its_batching_rule(scaled: OpOverload) -> None:
    enter_both(scaled, 1)
    alone, rule = added("decomposition", "batching")
    assert rule.shapes == "x: v *n d, weight: v d -> y: v *n d"
    for sample in samples(alone):
        generated.check_shapes(sample)
        generated_values.check_replaces(sample)
    for sample in samples(rule):
        generated.check_shapes(sample)
        for dims in generated_values.batchings(sample):
            generated_values.check_batched(sample, dims)


def test_a_decomposition_that_is_wrong_with_one_more_axis_fails(scaled: OpOverload) -> None:
    enter_both(scaled, 1.001)
    alone, rule = added("decomposition", "batching")
    generated_values.check_replaces(next(samples(alone)))
    assert fails(generated_values.check_batched, next(samples(rule)), (0, 0))


# --- vjp and jvp of an operator -----------------------------------------------------------------


def test_a_slope(cube: OpOverload) -> None:
    slopes({"made_up.cube.default": lambda x: 3 * x * x}, source="made_up.py")
    vjp, jvp = added("vjp", "jvp")
    assert registry.rule_of("vjp", cube) is vjp
    for dtype in (torch.float64, torch.complex128):
        (call,) = slope_calls.calls("made_up.cube.default", dtype)
        for rule in (vjp, jvp):
            slope_calls.check_against_autograd(rule, call)
        slope_calls.check_by_differences(vjp, jvp, call)
    for rule in (vjp, jvp):
        first, second = (next(slope_calls.samples_of(rule, which)) for which in (0, 1))
        generated.check_shapes(first)
        generated.check_fake(first)
        generated.check_trace(first, second)
        generated.check_derivatives(first)
        generated.check_orders(first)
        generated.check_linear(first)
        generated.check_compiled(first)


def test_a_wrong_slope_fails(cube: OpOverload) -> None:
    slopes({"made_up.cube.default": lambda x: 3.1 * x * x}, source="made_up.py")
    vjp, jvp = added("vjp", "jvp")
    (call,) = slope_calls.calls("made_up.cube.default")
    for rule in (vjp, jvp):
        assert fails(slope_calls.check_against_autograd, rule, call)
    assert fails(slope_calls.check_by_differences, vjp, jvp, call)


# --- formulas -----------------------------------------------------------------------------------


def enter_vjp(name: str, factor: float) -> None:
    @formula(
        "vjp",
        f"{name}(Tensor? grad, Tensor self, Tensor result) -> Tensor",
        source=f"made_up.py: {name}",
        shapes="grad: *s, self: *s, result: *s -> dself: *s",
        results=(Result(like("self"), None),),
        zeros=("grad",),
        sample=lambda self: {"result": self**3},
        of=lambda self: self**3,
    )
    def cube_backward(grad: Tensor, self: Tensor, result: Tensor) -> Tensor:
        """y = x^3:  dself = 3 * grad * conj(x)^2"""
        return factor * grad * (self * self).conj()


def enter_double_backward(name: str, factor: float) -> None:
    @formula(
        "double_backward",
        f"{name}(Tensor? grad, Tensor? grad_output, Tensor self) -> (Tensor, Tensor)",
        source=f"made_up.py: {name}",
        shapes="grad: *s, grad_output: *s, self: *s -> dgrad_output: *s, dself: *s",
        results=(Result(like("self"), None), Result(like("self"), None)),
        zeros=("grad", "grad_output"),
        of=lambda grad_output, self: 3 * grad_output * self * self,
    )
    def cube_double_backward(grad: Tensor, grad_output: Tensor, self: Tensor) -> Any:
        """dx = 3 * g * x^2:  dgrad_output = 3 * v * x^2,  dself = 6 * v * g * x"""
        return 3 * grad * self * self, factor * grad * grad_output * self


def enter_jvp(name: str, factor: float) -> None:
    @formula(
        "jvp",
        f"{name}(Tensor self_p, Tensor? self_t) -> Tensor",
        source=f"made_up.py: {name}",
        shapes="self_p: *s, self_t: *s -> y_t: *s",
        results=(Result(like("self_p"), None),),
        zeros=("self_t",),
        of=lambda self_p: self_p**3,
    )
    def cube_jvp(self_p: Tensor, self_t: Tensor) -> Tensor:
        """y = x^3:  y_t = 3 * x_t * x^2"""
        return factor * self_t * self_p * self_p


FORMULAS = {"vjp": (enter_vjp, 3), "double_backward": (enter_double_backward, 6)}
FORMULAS["jvp"] = (enter_jvp, 3)
by_kind = pytest.mark.parametrize("kind", FORMULAS)


@by_kind
def test_a_formula(kind: str) -> None:
    enter, factor = FORMULAS[kind]
    enter(f"cube_{kind}_for_a_test", factor)
    (rule,) = added(kind)
    assert normpass.derivative(rule.name) is rule
    assert normpass.decompositions()[rule.op] is rule.function  # type: ignore[index]
    with registered():
        assert inductor.select_decomp_table()[rule.op] is rule.function  # type: ignore[index]
    for first, second in zip(samples(rule), samples(rule, which=1), strict=True):
        generated.check_shapes(first)
        generated.check_fake(first)
        generated.check_trace(first, second)
        generated.check_derivatives(first)
        generated.check_orders(first)
        generated.check_linear(first)
        generated_values.check_derivative_of(first)
    generated.check_compiled(next(samples(rule)))
    generated.check_operator(next(samples(rule)))


@by_kind
def test_a_wrong_formula_fails(kind: str) -> None:
    enter, factor = FORMULAS[kind]
    enter(f"wrong_{kind}_for_a_test", factor + 0.001)
    (rule,) = added(kind)
    assert fails(generated_values.check_derivative_of, next(samples(rule)))


def test_a_formula_that_is_not_linear_fails() -> None:
    @formula(
        "vjp",
        "offset_for_a_test(Tensor? grad, Tensor self) -> Tensor",
        source="made_up.py: offset",
        shapes="grad: *s, self: *s -> dself: d *s",
        results=(Result(like("self"), None),),
        zeros=("grad",),
    )
    def offset(grad: Tensor, self: Tensor) -> Tensor:
        """dself = grad + x, of one axis less than said"""
        return grad + self

    (rule,) = added("vjp")
    assert fails(generated.check_linear, next(samples(rule)))
    with pytest.raises(ValueError, match="has 2 axes, the tensor's are"):
        generated.check_shapes(next(samples(rule)))
