"""examples/operator_rule.py: the operator and its derivatives are right, and the fit finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from example_runs import INNER
from higher_order_cases import IGNORED
from torch.func import grad, hessian, vmap

import normpass
from normpass.examples import operator_rule
from normpass.examples.operator_rule import wright_omega

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = {
    normpass.rule.derivative: operator_rule.wright_omega_backward,
    normpass.rule.batching: operator_rule.wright_omega_batched,
    normpass.rule.decomposition: operator_rule.wright_omega_decomposed,
}
# No other test of this process is to find them among the rules.
for declared in RULES.values():
    declared.remove()

special = pytest.importorskip("scipy.special", reason="scipy is not installed (scikit-learn's)")

pytestmark = [*IGNORED, pytest.mark.usefixtures("rules")]
Z = torch.linspace(-30, 30, 121, dtype=torch.float64)
Y = torch.from_numpy(special.wrightomega(Z.numpy()))


@pytest.fixture
def rules() -> Iterator[None]:
    """As the program itself declares and registers them."""
    rules = [declare(wright_omega)(rule.function) for declare, rule in RULES.items()]
    with normpass.registered():
        yield
    for rule in rules:
        rule.remove()


def test_its_values_are_scipys() -> None:
    torch.testing.assert_close(wright_omega(Z), Y, rtol=1e-14, atol=0)
    torch.testing.assert_close(operator_rule.wright_omega_decomposed(Z), Y, rtol=1e-14, atol=0)


def test_the_loop_ends_where_there_is_no_number() -> None:
    odd = torch.tensor([torch.nan, torch.inf, 1.0], dtype=torch.float64)
    assert wright_omega(odd)[2] == 1.0


def test_the_operator_is_declared_as_torch_wants_it() -> None:
    torch.library.opcheck(wright_omega, (Z[::10].clone().requires_grad_(),))


@pytest.mark.parametrize("inner", [None, *INNER])
def test_its_derivatives_are_the_closed_ones(inner: str | None) -> None:
    """dy = y / (1 + y), and that of it: y / (1 + y)^3."""

    def orders(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vmap(grad(wright_omega))(z), vmap(hessian(wright_omega))(z)

    if inner is not None:
        options = {"inner": inner}
        orders = torch.compile(orders, backend="normpass", fullgraph=True, options=options)
    first, second = orders(Z)
    torch.testing.assert_close(first, Y / (1 + Y), rtol=1e-13, atol=0)
    torch.testing.assert_close(second, Y / (1 + Y) ** 3, rtol=1e-12, atol=0)


def test_the_loop_is_not_in_compiled_code() -> None:
    """In its place are the steps of the decomposition: no operator of ours is left."""
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    backend = torch._dynamo.backends.common.aot_autograd(
        fw_compiler=look, decompositions=normpass.decompositions()
    )
    found = torch.compile(lambda z: wright_omega(z), backend=backend)(Z)
    torch.testing.assert_close(found, Y, rtol=1e-14, atol=0)
    assert "aten.exp.default" in seen
    assert not any("wright_omega" in name for name in seen)


@pytest.mark.parametrize("inner", [None, *INNER])
def test_the_fit_finds_the_parameters(inner: str | None) -> None:
    """Which it does not know: the currents alone come from them."""
    step = operator_rule.Fit(
        lambda function: (
            function
            if inner is None
            else torch.compile(
                function, backend="normpass", fullgraph=True, options={"inner": inner}
            )
        ),
        diodes=8,
    )
    errors = [step.error().max(), *(step().max() for _ in range(5))]
    assert errors[0] > 0.1
    assert errors[-1] < 1e-12
    assert errors[3] < errors[2] ** 1.5, "Newton's method squares a small error"
