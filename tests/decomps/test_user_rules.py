"""Rules that users declare: derivatives, batching rules and decompositions of their operators."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import normpass
from normpass.decomps import registry
from normpass.decomps.digest import of_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

aten = torch.ops.aten


def formula(x: Tensor, beta: Tensor) -> Tensor:
    """What made_up_rules::swish computes."""
    return x * (beta * x).sigmoid()


def backward(grad: Tensor, x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """y = x s(beta x)"""
    s = (beta * x).sigmoid()
    d = s * (1 - s)
    return grad * (s + x * beta * d), grad * x * x * d


def forward(x_t: Tensor, beta_t: Tensor, x: Tensor, beta: Tensor) -> Tensor:
    s = (beta * x).sigmoid()
    d = s * (1 - s)
    return x_t * (s + x * beta * d) + beta_t * x * x * d


def batched(info: Any, in_dims: Any, x: Tensor, beta: Tensor) -> tuple[Tensor, int]:
    assert in_dims[1] is None
    return swish(x.movedim(in_dims[0], 0), beta), 0


# Never taken out again: compiled code that is cached calls it.
LIBRARY = torch.library.Library("made_up_rules", "DEF")
LIBRARY.define("swish(Tensor x, Tensor beta) -> Tensor")
LIBRARY.impl("swish", formula, "CPU")
LIBRARY.define("pair(Tensor[] xs, Tensor index) -> (Tensor sum, Tensor first)")
LIBRARY.impl("pair", lambda xs, index: (xs[0] + xs[1], xs[0] * 2), "CPU")
torch.library.register_fake(
    "made_up_rules::swish", lambda x, beta: torch.empty_like(x), lib=LIBRARY
)
swish, pair = torch.ops.made_up_rules.swish, torch.ops.made_up_rules.pair


@pytest.fixture(autouse=True)
def _removed_afterwards() -> Iterator[None]:
    yield
    for rule in list(registry.DECLARED.values()):
        rule.remove()


X = torch.sin(torch.arange(12, dtype=torch.float64) ** 2).reshape(3, 4)
V = torch.cos(torch.arange(12, dtype=torch.float64) ** 2).reshape(3, 4)
BETA = torch.tensor(1.3, dtype=torch.float64)


def by_tape(f: Callable[..., Tensor]) -> list[Tensor]:
    x, beta = X.clone().requires_grad_(), BETA.clone().requires_grad_()
    found = list(torch.autograd.grad(f(x, beta).sin().sum(), (x, beta), create_graph=True))
    for _ in range(2):
        paired = (found[-2] * V).sum() + found[-1]
        found += torch.autograd.grad(paired, (x, beta), create_graph=True)
    return [value.detach() for value in found]


def by_transforms(f: Callable[..., Tensor]) -> list[Tensor]:
    def total(x: Tensor) -> Tensor:
        return f(x, BETA).sin().sum()

    def push(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: jvp(g, (x,), (V,))[1]

    paired = grad(lambda x: (grad(total)(x) * V).sum())
    return [
        *(transform(X) for transform in (grad(total), paired, push(total), push(push(total)))),
        *(transform(X) for transform in (push(grad(total)), grad(push(total)), hessian(total))),
        *jvp(f, (X, BETA), (V, BETA)),
        vmap(grad(total), in_dims=1)(X),
        vmap(lambda v: jvp(total, (X,), (v,))[1])(torch.stack([X, V])),
    ]


@pytest.mark.parametrize("functions", [(backward,), (forward,), (backward, forward)], ids=len)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_one_function_gives_both_modes_to_any_order(
    functions: tuple[Callable[..., Any], ...],
) -> None:
    for function in functions:
        kind = "jvp" if function is forward else "vjp"
        normpass.rule.derivative("made_up_rules::swish", kind=kind)(function)
    assert_close(by_tape(swish), by_tape(formula))
    assert_close(by_transforms(swish), by_transforms(formula))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
@pytest.mark.parametrize("backend", ["aot_eager", "normpass"])
def test_compiled(backend: str, kind: str) -> None:
    function = backward if kind == "vjp" else forward
    normpass.rule.derivative(swish, kind=kind)(function)  # type: ignore[call-overload]

    def total(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, beta: f(x, beta).sin().sum()

    def second(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: jvp(grad(lambda x: total(f)(x, BETA)), (x,), (V,))[1]

    x, beta = X.clone().requires_grad_(), BETA.clone().requires_grad_()
    y = torch.compile(total(swish), backend=backend, fullgraph=True)(x, beta)
    assert_close(
        torch.autograd.grad(y, (x, beta)),
        torch.autograd.grad(total(formula)(x, beta), (x, beta)),
    )
    found = torch.compile(second(swish), backend=backend, fullgraph=True)(X)
    assert_close(found, second(formula)(X))


def test_the_table_knows_it() -> None:
    normpass.rule.derivative(swish)(backward)
    y = formula(X, BETA)
    found = normpass.vjp(swish)(V, (X, BETA), y, ["beta"])
    assert found.keys() == {"beta"}
    assert found["beta"].shape == ()
    assert_close(normpass.jvp(swish)({"x": V}, (X, BETA), y)[0], forward(V, 0 * BETA, X, BETA))
    graph = make_fx(lambda x, beta: swish(x, beta).sum(), tracing_mode="fake")(X, BETA)
    gradients = normpass.grad_graph(graph)(X, BETA)[1]
    assert_close(gradients[0], grad(lambda x: formula(x, BETA).sum())(X))


@pytest.mark.parametrize("first", ["declared", "registered"])
def test_a_decomposition_before_and_after_registering(first: str) -> None:
    from torch._inductor import decomposition as inductor

    op = swish.default
    if first == "registered":
        normpass.register()
    rule = normpass.rule.decomposition(swish)(formula)
    normpass.register()
    try:
        assert inductor.decompositions[op] is rule.function
        assert normpass.decompositions()[op] is rule.function
        rule.remove()
        assert op not in inductor.decompositions
    finally:
        normpass.unregister()
    assert op not in normpass.decompositions()


def test_a_batching_rule() -> None:
    rule = normpass.rule.batching(swish)(batched)
    assert normpass.batch_rule(swish) is rule
    assert_close(vmap(swish, in_dims=(1, None))(X, BETA), formula(X.mT, BETA))
    compiled = torch.compile(vmap(swish, in_dims=(1, None)), backend="aot_eager", fullgraph=True)
    assert_close(compiled(X, BETA), formula(X.mT, BETA))


def test_of_torchs_own_it_holds_while_rules_are_registered() -> None:
    x = X.clone().requires_grad_()
    rule = normpass.rule.derivative(aten.tanh.default)(lambda grad, self: 7 * grad)
    assert normpass.vjp(aten.tanh)(V, (X,), X.tanh())["self"].equal(7 * V)

    def gradient(backend: str = "") -> Tensor:
        f = lambda x: torch.tanh(x).sum()  # noqa: E731
        torch.compiler.reset()
        f = torch.compile(f, backend=backend) if backend else f
        return torch.autograd.grad(f(x), x)[0]

    right, declared = 1 - X.tanh() ** 2, torch.full_like(X, 7)
    assert_close(gradient("aot_eager"), right)
    with normpass.registered():
        assert_close(gradient("aot_eager"), declared)
        assert_close(gradient(), right)
    with normpass.registered(eager=True):
        assert_close(gradient(), declared)
        rule.remove()
        assert_close(gradient(), right)
        assert_close(gradient("aot_eager"), right)


def test_what_was_there_before_is_back() -> None:
    theirs = torch.library.Library("made_up_rules", "FRAGMENT")
    torch.library.register_autograd(
        "made_up_rules::swish", lambda ctx, grad: (3 * grad, None), lib=theirs
    )

    def gradient() -> Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(swish(x, BETA).sum(), x)[0]

    assert_close(gradient(), torch.full_like(X, 3))
    rule = normpass.rule.derivative(swish)(backward)
    assert_close(gradient(), backward(torch.ones_like(X), X, BETA)[0])
    rule.remove()
    rule.remove()  # harmless
    assert_close(gradient(), torch.full_like(X, 3))


def test_several_results_and_lists() -> None:
    with pytest.raises(TypeError, match=r"asks for grad; .* knows xs, index, sum, first, grads"):
        normpass.rule.derivative(pair)(lambda grad: grad)

    @normpass.rule.derivative(pair)
    def pair_backward(grad_sum, grad_first):  # type: ignore[no-untyped-def]
        twice = None if grad_first is None else 2 * grad_first
        first = sum(g for g in (grad_sum, twice) if g is not None)
        return {"xs": [first, grad_sum]}

    a, b = X.clone().requires_grad_(), V.clone().requires_grad_()
    index = torch.tensor(1)
    for results in ((0,), (1,), (0, 1)):
        y = pair([a, b], index)
        expected = [a + b, a * 2]
        total = sum((y[k] * V).sum() for k in results)
        reference = sum((expected[k] * V).sum() for k in results)
        assert_close(
            torch.autograd.grad(total, (a, b), allow_unused=True, materialize_grads=True),
            torch.autograd.grad(reference, (a, b), allow_unused=True, materialize_grads=True),
        )
    tangents = jvp(lambda a: pair([a, a], index), (X,), (V,))[1]
    assert_close(tangents, (2 * V, 2 * V))


def test_the_record() -> None:
    before = of_rules()
    rule = normpass.rule.derivative(swish)(backward)
    assert rule in normpass.rules()
    assert rule(V, X, BETA)[0].equal(backward(V, X, BETA)[0])
    assert (rule.__name__, rule.__doc__) == ("backward", backward.__doc__)
    assert inspect.signature(rule) == inspect.signature(backward)
    first = of_rules()
    other = normpass.rule.decomposition(swish)(formula)
    assert len({before, first, of_rules()}) == 3
    other.remove()
    assert of_rules() == first


def test_again_from_the_same_place_it_replaces_the_first() -> None:
    first = normpass.rule.derivative(swish)(backward)
    second = normpass.rule.derivative(swish)(backward)
    assert not any(rule is first for rule in normpass.rules())
    first.remove()
    assert any(rule is second for rule in normpass.rules())
    with pytest.raises(ValueError, match=r"two vjp rules for made_up_rules.swish.default: .*py:"):
        normpass.rule.derivative(swish)(lambda grad, x, beta: (grad, None))


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (
            lambda: normpass.rule.derivative("made_up_rules::none"),
            ValueError,
            "found 'made_up_rules::none'",
        ),
        (lambda: normpass.rule.batching(3), ValueError, "expected an operator, as 'library::name'"),
        (lambda: normpass.rule.decomposition(aten.bitwise_and), ValueError, "say which"),
        (lambda: normpass.rule.derivative(aten.tanh, kind="x"), ValueError, "expected 'vjp' or"),
        (
            lambda: normpass.rule.derivative(aten.tanh)(lambda grad, x: grad),
            TypeError,
            "asks for x; the vjp of aten.tanh.default knows self, result, grad, grads",
        ),
        (
            lambda: normpass.rule.derivative(aten.tanh, kind="jvp")(lambda grad: grad),
            TypeError,
            "asks for grad; the jvp of aten.tanh.default knows self, result, self_t, self_p",
        ),
        (
            lambda: normpass.rule.derivative("aten::add_.Tensor")(lambda grad: (grad, grad)),
            ValueError,
            "writes to none of its arguments; found aten.add_.Tensor",
        ),
        (
            lambda: normpass.rule.derivative("aten::matmul")(lambda grad: (grad, grad)),
            ValueError,
            "expected an operator with a kernel; found aten.matmul.default, which autograd takes",
        ),
        (lambda: normpass.rules()[0].remove(), ValueError, "one of normpass's own"),
    ],
)
def test_messages(declare: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        declare()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda grad, x: grad, "returns values of x, beta; found 1 values"),
        (lambda grad: (grad, None, None), "returns values of x, beta; found 3 values"),
        (lambda grad: {"y": grad}, "returns values of x, beta; found y"),
    ],
)
def test_messages_of_what_is_returned(function: Callable[..., Any], message: str) -> None:
    normpass.rule.derivative(swish)(function)
    x = X.clone().requires_grad_()
    with pytest.raises(TypeError, match=message):
        swish(x, BETA).sum().backward()
