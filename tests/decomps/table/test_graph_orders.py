"""grad_graph and jvp_graph of graphs that they have made: exact to any order, in any mix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, fx

X = torch.linspace(-1.5, 1.4, 24, dtype=torch.float64).reshape(4, 6).sin() * 2
W = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
V = torch.cos(X * 3)


def _standardized(x: Tensor, dim: int) -> Tensor:
    x = x - x.mean(dim, keepdim=True)
    return x * (x.square().mean(dim, keepdim=True) + 0.25).rsqrt()


def _square(x: Tensor) -> Tensor:
    return x[:, :4] + 3 * torch.eye(4, dtype=x.dtype)


def _by_minors(A: Tensor) -> Tensor:
    """A determinant in primitives."""
    if len(A) == 1:
        return A[0, 0]
    rest = [torch.cat([A[1:, :k], A[1:, k + 1 :]], 1) for k in range(len(A))]
    return sum((-1) ** k * A[0, k] * _by_minors(r) for k, r in enumerate(rest))  # type: ignore[return-value]


def _cramer(A: Tensor) -> Tensor:
    b = A[0] + 1
    columns = [torch.cat([A[:, :k], b[:, None], A[:, k + 1 :]], 1) for k in range(len(A))]
    return torch.stack([_by_minors(c) for c in columns]) / _by_minors(A)


# A function, and the same in primitives.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "layer_norm": (
        lambda x: F.layer_norm(x, (6,), W, W.sin(), 0.25),
        lambda x: _standardized(x, 1) * W + W.sin(),
    ),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, W, W.sin(), True, 0.1, 0.25),
        lambda x: _standardized(x, 0) * W + W.sin(),
    ),
    "group_norm": (
        lambda x: F.group_norm(x[..., None], 1, W, W.sin(), 0.25)[..., 0],
        lambda x: _standardized(x, 1) * W + W.sin(),
    ),
    "rms_norm": (
        lambda x: F.rms_norm(x, (6,), W, 0.25),
        lambda x: x * (x.square().mean(1, keepdim=True) + 0.25).rsqrt() * W,
    ),
    "det": (lambda x: torch.det(_square(x)), lambda x: _by_minors(_square(x))),
    "slogdet": (
        lambda x: torch.linalg.slogdet(_square(x))[1],
        lambda x: _by_minors(_square(x)).abs().log(),
    ),
    "solve": (
        lambda x: torch.linalg.solve(_square(x), _square(x)[0] + 1),
        lambda x: _cramer(_square(x)),
    ),
    "solve from the right": (
        lambda x: torch.linalg.solve(_square(x).mT, _square(x)[:1] + 1, left=False)[0],
        lambda x: _cramer(_square(x)),
    ),
    "logcumsumexp": (
        lambda x: x.logcumsumexp(1),
        lambda x: torch.stack([x[:, : k + 1].logsumexp(1) for k in range(6)], 1),
    ),
    "scatter_reduce": (
        lambda x: x[:, :2].scatter_reduce(1, torch.tensor([[0, 1, 1, 1, 0, 0]] * 4), x, "prod"),
        lambda x: torch.stack([x[:, [0, 0, 4, 5]].prod(1), x[:, [1, 1, 2, 3]].prod(1)], 1),
    ),
    "cumprod": (
        lambda x: x.cumprod(1),
        lambda x: torch.stack([x[:, : k + 1].prod(1) for k in range(6)], 1),
    ),
}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("steps", ["rrr", "fr", "rf", "ff", "rfr"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_derivatives(name: str, steps: str) -> None:
    """Of one graph the next is made, in reverse (r) and forward (f) mode, along V each time.

    Compared with autograd's derivatives along V of the same function in primitives: the number
    that each step gives is sum(gradient * V), or the tangent of V.
    """
    ours, primitives = FUNCTIONS[name]

    def number(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def of(x: Tensor) -> Tensor:
            y = function(x)
            weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
            return (y * weights).sum()

        return of

    found: Any = number(ours)
    for step in steps:
        # With a table, for torch 2.14 to leave the constants of norms as they are.
        gm = make_fx(found, {}, tracing_mode="fake", _allow_non_fake_inputs=True)(X)
        derived = normpass.grad_graph(gm) if step == "r" else normpass.jvp_graph(gm)
        found = _along(derived, step)
    right: Any = number(primitives)
    for _ in steps:
        right = _derivative_along(right)
    assert_close(found(X), right(X.clone().requires_grad_()).detach(), rtol=1e-8, atol=1e-9)


def _along(derived: fx.GraphModule, step: str) -> Callable[[Tensor], Tensor]:
    if step == "r":
        return lambda x: (derived(x)[1][0] * V).sum()
    return lambda x: derived(x, V)[1][0]


def _derivative_along(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def derivative(x: Tensor) -> Tensor:
        return (torch.autograd.grad(function(x), x, create_graph=True)[0] * V).sum()

    return derivative
