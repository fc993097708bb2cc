"""Norms' derivatives of any order and mix, compiled with the rules registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orders
import pytest
import torch

from normpass.decomps.activation import registered
from normpass.decomps.activation.levels import needs_composition

if TYPE_CHECKING:
    from collections.abc import Iterator

# What torch itself warns of while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# Always run: modules, whose weights are closed over, and the norm that stock gets wrong most. The
# others go the same way, and other backends compile what aot_eager has traced: `make sweep`.
ALWAYS = ("LayerNorm", "batch_norm", "BatchNorm1d_eval", "GroupNorm")
FEW = ("jvp", "grad_grad", "jacrev")  # of what has no rule of its own
LONG = ("vmap_hessian", "hessian_hessian")


def is_always_run(norm: str, mix: str) -> bool:
    if norm in ALWAYS:
        return mix not in LONG or (norm, mix) == ("LayerNorm", "vmap_hessian")
    return norm in ("BatchNorm1d", "weight_norm", "spectral_norm") and mix in FEW


CASES = [
    pytest.param(norm, mix, marks=() if is_always_run(norm, mix) else pytest.mark.sweep)
    for norm in orders.NORMS
    for mix in orders.MIXES
]
SAMPLE = ("jvp", "jvp_jvp", "grad_jvp", "grad_grad_grad", "vmap_jvp", "hessian")
ON_OTHERS = [
    pytest.param(
        norm, mix, marks=() if norm == "LayerNorm" and mix in SAMPLE else pytest.mark.sweep
    )
    for norm in orders.NORMS
    for mix in orders.MIXES
]


@pytest.fixture(scope="module", autouse=True)
def rules() -> Iterator[None]:
    with registered():
        yield


def compiled(function: Any, backend: str = "aot_eager", **kwargs: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **kwargs)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("norm", "mix"), CASES)
def test_compiled_derivatives_are_right(norm: str, mix: str) -> None:
    assert orders.outcome(norm, mix, compiled) == "right"


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("norm", "mix"), ON_OTHERS)
@pytest.mark.parametrize("backend", ["inductor", "normpass"])
def test_other_backends(backend: str, norm: str, mix: str) -> None:
    assert orders.outcome(norm, mix, lambda function: compiled(function, backend)) == "right"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("mix", ["jvp_jvp", "grad_jvp", "grad_grad_grad", "vmap_grad"])
@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm", "group_norm"])
def test_sizes_stay_symbolic(norm: str, mix: str) -> None:
    assert orders.outcome(norm, mix, lambda function: compiled(function, dynamic=True)) == "right"


@pytest.mark.parametrize("norm", ["LayerNorm", "batch_norm"])
def test_linearize(norm: str) -> None:
    """What it returns is right, and can be compiled once it was called: Dynamo does not fold its
    constants.
    """
    make, primitives = orders.NORMS[norm]
    x = orders.fixed(*orders.SHAPE) * 2 + 0.5
    value, pushforward = torch.func.linearize(torch.func.grad(orders.loss(make())), x)
    right = torch.func.grad(orders.loss(primitives))
    torch.testing.assert_close(value, right(x), rtol=1e-9, atol=1e-9)
    tangent = orders.along(right)(x)
    torch.testing.assert_close(pushforward(orders.V), tangent, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(compiled(pushforward)(orders.V), tangent, rtol=1e-9, atol=1e-9)


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

    monkeypatch.setattr("normpass.decomps.activation.kernels.needs_composition", fail)
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
