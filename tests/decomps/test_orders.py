"""Norms' derivatives of any order and mix, compiled with the rules registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orders
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from normpass.decomps.activate import registered
from normpass.decomps.dispatch import needs_composition

if TYPE_CHECKING:
    from collections.abc import Iterator

# What torch itself warns of while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# What no rule for a norm repairs: the derivative of the whole function fails to trace, whatever the
# norm is, and fails the same for plain products of the kind.
EXPANDED = "torch copies a tangent into memory laid out like an expanded tensor"
VIEWED = "a view's backward returns a meta tensor under forward mode"
BEYOND = {
    **{(norm, mix): EXPANDED for norm in orders.NORMS for mix in orders.MIXES if "jvp_jvp" in mix},
    ("instance_norm", "grad_jvp"): VIEWED,
    ("group_norm", "grad_jvp"): VIEWED,
    ("GroupNorm", "grad_jvp"): VIEWED,
    ("BatchNorm1d_eval", "grad_jvp"): VIEWED,
}
# Always run: modules, whose weights are closed over. The functions go the same way: `make sweep`.
ALWAYS = ("LayerNorm", "batch_norm", "BatchNorm1d_eval", "GroupNorm")
# So does what fails: after it torch 2.13 traces other functions wrongly in the same process.
CASES = [
    pytest.param(
        norm,
        mix,
        marks=() if norm in ALWAYS and (norm, mix) not in BEYOND else pytest.mark.sweep,
    )
    for norm in orders.NORMS
    for mix in orders.MIXES
]


@pytest.fixture(scope="module", autouse=True)
def rules() -> Iterator[None]:
    with registered():
        yield


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(("norm", "mix"), CASES)
def test_compiled_derivatives_are_right(norm: str, mix: str) -> None:
    found = orders.outcome(norm, mix, compiled)
    if (norm, mix) in BEYOND:
        assert not found.startswith("WRONG"), "an error, never a wrong number"
        if found != "right":
            pytest.xfail(BEYOND[norm, mix])
    assert found == "right"


@pytest.mark.parametrize("mix", ["jvp", "grad_grad_grad", "jvp_grad", "vmap_jvp", "hessian"])
@pytest.mark.parametrize("backend", ["inductor", "normpass"])
def test_other_backends(backend: str, mix: str) -> None:
    def run(function: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend=backend, fullgraph=True)

    assert orders.outcome("LayerNorm", mix, run) == "right"


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", "group_norm", "rms_norm"])
def test_first_order_graphs_are_what_they_were(norm: str) -> None:
    def operators() -> list[str]:
        graphs: list[list[str]] = []

        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
            return graph.forward

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep)
        function = orders.NORMS[norm][0]()
        x = (orders.fixed(*orders.SHAPE) * 2).requires_grad_()
        torch.compile(function, backend=backend, fullgraph=True)(x).sum().backward()
        return [name for graph in graphs for name in graph]

    ours = operators()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normpass.decomps.dispatch.needs_composition", lambda: False)
        stock = operators()
    assert ours == stock


def test_running_statistics_are_updated_under_forward_mode() -> None:
    x = orders.fixed(*orders.SHAPE) * 2 + 0.5

    def run(wrap: Any) -> tuple[torch.Tensor, ...]:
        mean, var = orders.fixed(6), orders.fixed(6) ** 2 + 0.5

        def function(v: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
            def norm(u: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.batch_norm(
                    u, mean, var, orders.W6, orders.B6, True, 0.3, orders.EPS
                )

            return torch.func.jvp(norm, (v,), (v * v,))[1]

        return wrap(function)(x, mean, var), mean, var

    for ours, right in zip(run(compiled), run(lambda function: function), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)


def test_eager_mode_asks_for_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise AssertionError("a rule was consulted in eager mode")

    monkeypatch.setattr("normpass.decomps.dispatch.needs_composition", fail)
    x = orders.fixed(*orders.SHAPE)
    orders.MIXES["jvp"](orders.NORMS["layer_norm"][0]())(x)


def test_what_needs_a_composition() -> None:
    seen: dict[str, bool] = {}

    def probe(name: str) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            seen[name] = needs_composition()
            return (x * x).sum()

        return function

    x = orders.fixed(3)
    probe("nothing")(x)
    torch.func.grad(probe("grad"))(x)
    torch.func.vmap(torch.func.grad(probe("vmap_grad")))(x[:, None])
    torch.func.grad(lambda v: torch.func.grad(probe("grad_grad"))(v).sum())(x)
    torch.func.jvp(probe("jvp"), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        probe("dual")(x)
    assert seen == {
        "nothing": False,
        "grad": False,
        "vmap_grad": False,
        "grad_grad": True,
        "jvp": True,
        "dual": True,
    }
