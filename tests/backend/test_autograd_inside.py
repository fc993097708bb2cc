"""torch.autograd.grad inside of compiled functions, against eager mode, in float64.

Dynamo traces it where torch._dynamo.config.trace_autograd_ops is on. The norm of the right answers
is written in primitives: eager layer norm's third derivatives are wrong.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from higher_order_cases import IGNORED, assert_same, numbers, weighted
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from normpass.backend.higher_order.inside import transforms
from normpass.decomps.activation import is_registered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Energy = Callable[..., Tensor]

pytestmark = [
    *IGNORED,
    pytest.mark.skipif(
        not hasattr(torch._dynamo.config, "trace_autograd_ops"),
        reason="this version of torch does not trace torch.autograd.grad",
    ),
]


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def in_primitives(h: Tensor) -> Tensor:
    c = h - h.mean(-1, keepdim=True)
    return c * (c.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def energy(norm: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return norm(torch.tanh(x @ w)) @ v


by_layer_norm = partial(energy, lambda h: F.layer_norm(h, (8,)))
by_primitives = partial(energy, in_primitives)


def forces(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    total = e(x, w, v).sum()
    (slope,) = grad(total, x, create_graph=True)
    return total, -slope


def forces_alone(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    total = e(x, w, v).sum()
    (slope,) = grad(total, x)
    return total.detach(), -slope


def forces_by_keyword(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    y = e(x, w, v)
    (slope,) = grad(outputs=y, inputs=x, grad_outputs=torch.ones_like(y), create_graph=True)
    return y.sum(), -slope


def penalty(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    (slope,) = grad(e(x, w, v).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def inner_steps(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    x = x.detach()
    for _ in range(2):
        loss = e(x, w, v).square().mean()
        for_w, for_v = grad(loss, (w, v), create_graph=True)
        w, v = w - 0.1 * for_w, v - 0.1 * for_v
    return e(x, w, v).square().mean()


def curvature(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    (slope,) = grad(e(x, w, v).sum(), x, create_graph=True)
    (second,) = grad(slope.square().sum(), x, create_graph=True)
    return second


def jacobian(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    y = e(x, w, v)[:, 0]
    (rows,) = grad(y, x, torch.eye(3, dtype=y.dtype), is_grads_batched=True, create_graph=True)
    return rows


def gradients(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    loss = penalty(e, x, w, v)
    return loss.detach(), *grad(loss, (w, v))


WHOLE = {
    one.__name__: one
    for one in (
        forces,
        forces_alone,
        forces_by_keyword,
        penalty,
        inner_steps,
        curvature,
        jacobian,
        gradients,
    )
}


LONG = ("curvature", "jacobian")  # compiled for half a minute in their second derivatives


def with_requires_grad(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    between = torch.lerp(x, x.flip(0), 0.3).detach().requires_grad_()
    return penalty(e, between, w, v)


def with_a_displacement(e: Energy, x: Tensor, w: Tensor, v: Tensor) -> Any:
    d = torch.zeros(8, 8, dtype=x.dtype, requires_grad=True)
    total = e(x + x @ d, w, v).sum()
    slope, stress = grad(total, (x, d), create_graph=True)
    return total, -slope, stress


# What Dynamo does not take whole: with a graph break it is right.
BROKEN = {one.__name__: one for one in (with_requires_grad, with_a_displacement)}


def inputs() -> list[Tensor]:
    return [numbers(3, 8), numbers(8, 8), numbers(8, 1)]


def all_of(function: Callable[..., Any], order: int) -> list[Tensor | None]:
    """The results, and their derivatives at all inputs up to this order."""
    leaves = inputs()
    values = function(*leaves)
    values = list(values) if isinstance(values, tuple) else [values]
    found: list[Tensor | None] = [y.detach() for y in values]
    for k in range(order):
        there = [torch.sin(y) for y in values if y is not None and y.requires_grad]
        if not there:
            break
        more = k + 1 < order
        values = list(grad(weighted(there), leaves, create_graph=more, allow_unused=True))
        found += [None if y is None else y.detach() for y in values]
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WHOLE)
def test_in_one_graph(name: str) -> None:
    function = WHOLE[name]
    compiled = torch.compile(
        partial(function, by_layer_norm),
        backend="normpass",
        fullgraph=True,
        options={"inner": "eager"},
    )
    order = 1 if name in LONG else 2
    assert_same(all_of(compiled, order), all_of(partial(function, by_primitives), order))


@pytest.mark.sweep
def test_by_inductor() -> None:
    compiled = torch.compile(partial(curvature, by_layer_norm), backend="normpass", fullgraph=True)
    assert_same(all_of(compiled, 1), all_of(partial(curvature, by_primitives), 1))


@pytest.mark.parametrize("name", BROKEN)
def test_dynamo_breaks_the_graph(name: str) -> None:
    function = BROKEN[name]
    options = {"inner": "eager"}
    whole = partial(function, by_layer_norm)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(whole, backend="normpass", fullgraph=True, options=options)(*inputs())
    torch._dynamo.reset()
    compiled = torch.compile(whole, backend="normpass", options=options)
    assert_same(all_of(compiled, 1), all_of(partial(function, by_primitives), 1))


def test_an_input_of_another_graph() -> None:
    """Its tape reaches out of the compiled function: Dynamo says so, or breaks the graph."""
    inner = torch.compile(
        partial(forces, by_layer_norm), backend="normpass", options={"inner": "eager"}
    )

    def outer(function: Callable[..., Any], x: Tensor, w: Tensor, v: Tensor) -> Any:
        return function(x * 1.0, w * 1.0, v)

    right = partial(outer, partial(forces, by_primitives))
    assert_same(all_of(partial(outer, inner), 2), all_of(right, 2))


def test_backward_inside() -> None:
    def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        loss = penalty(by_layer_norm, x, w, v)
        loss.backward()
        return loss.detach()

    found = []
    for function in (step, torch.compile(step, backend="normpass", options={"inner": "eager"})):
        leaves = inputs()
        found.append([function(*leaves), *(x.grad for x in leaves)])
    assert_same(found[1], found[0])


def test_rules_are_gone_afterwards() -> None:
    torch.compile(partial(forces, by_layer_norm), backend="normpass", options={"inner": "eager"})(
        *inputs()
    )
    assert not is_registered()


def forward_mode(x: Tensor) -> Tensor:
    return torch.func.jvp(torch.sin, (x,), (x,))[1]


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda x: torch.func.grad(lambda x: x.sin().sum())(x), True),
        (forward_mode, True),
        (lambda x: torch.func.jacrev(torch.sin)(x), True),
        (lambda x: checkpoint(forward_mode, x, use_reentrant=False), True),
        (lambda x: checkpoint(torch.sin, x, use_reentrant=False), False),
        (lambda x: torch.func.vmap(torch.sin)(x), True),
        (lambda x: x.sin(), False),
    ],
)
def test_which_graphs_have_transforms(function: Callable[[Tensor], Tensor], takes: bool) -> None:
    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        seen.append(transforms(graph))
        return lambda *inputs: inputs[:1]

    torch.compile(function, backend=backend, fullgraph=True)(numbers(3))
    assert seen == [takes]


def test_stock_is_right_or_fails() -> None:
    """Norms in primitives: what stock does with a derivative of what autograd.grad returned."""
    compiled = torch.compile(partial(curvature, by_primitives), backend="aot_eager", fullgraph=True)
    assert_same(all_of(compiled, 1), all_of(partial(curvature, by_primitives), 1))
    torch._dynamo.reset()
    compiled = torch.compile(partial(forces, by_primitives), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        all_of(compiled, 2)
