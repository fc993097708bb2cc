"""Burgers' equation by a physics-informed network: the loss is made of the network's derivatives.

    python examples/burgers_pinn.py [--backend eager] [--whole] [--steps 1000]

    u_t + u u_x = (0.01 / pi) u_xx,  u(0, x) = -sin(pi x),  u(t, -1) = u(t, 1) = 0

A training step differentiates u_xx once more, so that it takes third derivatives (Raissi et al.,
"Physics-informed neural networks", 2019). The network alone is compiled, or with --whole the
residual: the calls of torch.autograd.grad are then traced into the compiled function. Third
derivatives of LayerNorm are silently wrong in torch 2.13; normpass.register makes them right.
"""

# %%
from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VISCOSITY = 0.01 / math.pi

# %% [markdown]
# The network, and what is left of the equation.


# %%
class Network(nn.Module):
    """u at points (t, x), each a column."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        hidden: list[nn.Module] = []
        for inputs in (2, *[width] * (depth - 1)):
            hidden += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.Tanh()]
        self.body = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.body(torch.cat([t, x], 1))


def residual(u: Callable[[Tensor, Tensor], Tensor], t: Tensor, x: Tensor) -> Tensor:
    """How far u is from solving the equation at points that require gradients."""
    y = u(t, x)
    y_t, y_x = torch.autograd.grad(y.sum(), (t, x), create_graph=True)
    (y_xx,) = torch.autograd.grad(y_x.sum(), x, create_graph=True)
    return y_t + y * y_x - VISCOSITY * y_xx


# %% [markdown]
# A step of training: new points each time, in the middle, at the start and at the edges.


# %%
def training(
    compile: Callable[[Any], Any],
    whole: bool = False,
    points: int = 2048,
    width: int = 64,
    depth: int = 6,
) -> Callable[[], Tensor]:
    """A function that takes a step on new points and returns the loss. whole: compiles the
    residual instead of the network.
    """
    torch.manual_seed(0)
    network = Network(width, depth)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    u = compile(network)
    off = compile(lambda t, x: residual(network, t, x)) if whole else lambda t, x: residual(u, t, x)

    def step() -> Tensor:
        t = torch.rand(points, 1, requires_grad=True)
        x = torch.empty(points, 1).uniform_(-1, 1).requires_grad_()
        at_start = torch.empty(points // 8, 1).uniform_(-1, 1)
        at_edge = torch.rand(points // 8, 1)
        edge = torch.randint(2, at_edge.shape).to(at_edge) * 2 - 1
        known = u(torch.cat([torch.zeros_like(at_start), at_edge]), torch.cat([at_start, edge]))
        wanted = torch.cat([-torch.sin(math.pi * at_start), torch.zeros_like(at_edge)])
        loss = off(t, x).square().mean() + (known - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--whole", action="store_true", help="compile the residual as a whole")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(argv)
    torch._dynamo.config.trace_autograd_ops = options.whole
    normpass.register(eager=True)

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    step = training(compile, options.whole)
    for i in range(options.steps):
        loss = step()
        if i % 100 == 0:
            print(f"step {i}: loss {loss.item():.5f}")


# %%
if __name__ == "__main__":
    main()
