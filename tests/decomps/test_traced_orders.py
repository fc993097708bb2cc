"""Norms' higher orders by nested torch.autograd.grad(create_graph=True), traced: no torch.func."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orders
import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Function = Callable[..., Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

NORMS = ("layer_norm", "batch_norm", "batch_norm_eval", "group_norm", "instance_norm", "rms_norm")
X = orders.fixed(*orders.SHAPE) * 2 + 0.5


def directional(norm: Function, order: int) -> Function:
    """x -> the gradient of this order of (norm(x) * C).sum(), along V but for the last."""

    def function(x: Tensor, v: Tensor, c: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = (norm(x) * c).sum()
        for n in range(order):
            more = n + 1 < order
            (g,) = torch.autograd.grad(value, x, create_graph=more, materialize_grads=True)
            if not g.requires_grad and more:  # batch norm of fixed statistics is linear
                return torch.zeros_like(x)
            value = (g * v).sum()
        return g.detach()

    return function


ARGS = X, orders.V, orders.C


def right(name: str, order: int) -> Tensor:
    return directional(orders.NORMS[name][1], order)(*ARGS)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NORMS)
def test_traced_by_make_fx(name: str, order: int, tracing: str) -> None:
    function = directional(orders.NORMS[name][0](), order)
    with registered(), enable_python_dispatcher():
        graph = make_fx(function, tracing_mode=tracing, _allow_non_fake_inputs=True)(*ARGS)
    torch.testing.assert_close(graph(*ARGS), right(name, order), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "instance_norm"])
def test_third_order_against_differences(name: str) -> None:
    """Central differences of the traced second order, in float64."""
    norm, h = orders.NORMS[name][0](), 1e-4
    with registered(), enable_python_dispatcher():
        second, third = (make_fx(directional(norm, n))(*ARGS) for n in (2, 3))
    steps = [second(X + s * h * orders.V, *ARGS[1:]) for s in (1, -1)]
    difference = (steps[0] - steps[1]) / (2 * h)
    torch.testing.assert_close(third(*ARGS), difference, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", [name for name in NORMS if name != "batch_norm_eval"])
def test_third_order_compiled(name: str, backend: str) -> None:
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch does not compile torch.autograd.grad")
    norm = orders.NORMS[name][0]()

    def function(x: Tensor, v: Tensor, c: Tensor) -> Tensor:
        value = (norm(x) * c).sum()
        for n in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=n < 2)
            value = (g * v).sum()
        return g.detach()

    torch._dynamo.reset()
    with registered(), torch._dynamo.config.patch(trace_autograd_ops=True):
        run: Any = torch.compile(function, backend=backend, fullgraph=True)
        found = run(X.clone().requires_grad_(), *ARGS[1:])
    torch.testing.assert_close(found, right(name, 3), rtol=1e-9, atol=1e-9)


def test_a_bias_without_a_weight() -> None:
    """PyTorch raises where it differentiates this twice."""

    def second(weight: Tensor | None, x: Tensor, bias: Tensor, g: Tensor) -> Tensor:
        x, bias, g = (v.detach().requires_grad_() for v in (x, bias, g))
        y = torch.nn.functional.layer_norm(x, (5,), weight, bias, orders.EPS)
        dx, db = torch.autograd.grad(y, (x, bias), g, create_graph=True)
        return torch.cat(torch.autograd.grad((dx * dx).sum() + (db**3).sum(), (x, g)))

    given = orders.fixed(4, 5), orders.fixed(5), orders.fixed(4, 5).cos()
    with registered(), enable_python_dispatcher():
        graph = make_fx(partial(second, None))(*given)
    right = second(torch.ones(5, dtype=torch.float64), *given)
    torch.testing.assert_close(graph(*given), right)
