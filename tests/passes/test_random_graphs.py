"""Random graphs, fused or not: the same values. With what regions must cut themselves off from:
integers, random masks, gathers, slices, matrix products, and readers of everything in between.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from tracing import fuse, trace

from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BATCH, ROWS, WIDTH = 3, 4, 6
STEPS = 9
# Norms of nearly constant rows make rounding large; what is wrong is off by about 1.
TOLERANCE = 1e-6


def norm(x: Tensor, rng: random.Random) -> Tensor:
    kind = rng.choice(["layer", "rms", "softmax", "log_softmax", "channels", "group"])
    if kind == "layer":
        return F.layer_norm(x, (WIDTH,))
    if kind == "rms":
        return x * x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    if kind == "softmax":
        return x.softmax(rng.choice([-1, -2]))
    if kind == "log_softmax":
        return x.log_softmax(-1)
    if kind == "channels":
        return F.batch_norm(x, None, None, training=True)
    return F.group_norm(x, 2)


def pointwise(x: Tensor, y: Tensor, rng: random.Random) -> Tensor:
    functions: list[Callable[[], Tensor]] = [
        lambda: x + y,
        lambda: x * y.tanh(),
        lambda: torch.where(x > y, x, 0.5 * y),
        lambda: F.gelu(x),
        lambda: x.relu() - y,
        lambda: (x > 0).to(x.dtype) + y,
        lambda: x.transpose(0, 1).contiguous().transpose(0, 1) + 1,
        lambda: x.permute(2, 0, 1).clone().permute(1, 2, 0),
        lambda: x + y.sum(-1, keepdim=True),
    ]
    return rng.choice(functions)()


def barrier(x: Tensor, y: Tensor, rng: random.Random) -> Tensor:
    """What no region may hold."""
    position = torch.arange(WIDTH)
    functions: list[Callable[[], Tensor]] = [
        lambda: torch.where(position <= torch.arange(ROWS)[:, None], x, y),
        lambda: x * (position == rng.randrange(WIDTH)).to(x.dtype),
        lambda: x.gather(2, position[1:2].expand(BATCH, ROWS, 1)) + y,
        lambda: x.gather(2, (position % 3).expand(BATCH, ROWS, WIDTH)),
        lambda: torch.cat([x[:, 1:], y[:, :1]], 1),
        lambda: x.cumsum(0) / BATCH,
        lambda: x @ y.transpose(1, 2).softmax(-1)[:, :, :1] + y,
        lambda: x[1:].mean(0) + y,
    ]
    return rng.choice(functions)()


def residual(x: Tensor, y: Tensor, rng: random.Random) -> Tensor:
    """What leads out of a region and back in."""
    x, z = x.cumsum(0), rng.choice([y, x.cumsum(1)])
    both = x + z if rng.random() < 0.7 else torch.where(x > 0, z, 2 * x)
    return norm(both + barrier(both.sin(), y, rng), rng)


def program(seed: int) -> Callable[..., list[Tensor]]:
    """A function of two f64[BATCH ROWS WIDTH]; the same one for the same seed."""

    def f(*inputs: Tensor) -> list[Tensor]:
        rng = random.Random(seed)
        values = list(inputs)
        for _ in range(STEPS):
            x, y = rng.choice(values[-3:]), rng.choice(values)
            made = rng.choices([norm, pointwise, barrier, residual], [3, 3, 2, 2])[0]
            value = norm(x, rng) if made is norm else made(x, y, rng)  # type: ignore[call-arg]
            values.append(value)
        values.append(norm(values[-1], rng))
        return [values[-1], *rng.sample(values[2:-1], 2)]

    return f


def gradients(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    def f(*inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        ends = [y for y in outputs if y.requires_grad]
        return [
            *outputs,
            *torch.autograd.grad([y.sin().sum() for y in ends], leaves, allow_unused=True),
        ]

    return f


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(s, marks=pytest.mark.sweep) for s in range(40, 2000))]
)
def test_fused_graphs_compute_the_same(seed: int) -> None:
    function = program(seed)
    if seed % 2:
        function = gradients(function)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(BATCH, ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    ]
    if seed % 3 == 0:
        inputs[1] = inputs[1].transpose(0, 1).contiguous().transpose(0, 1)
    graph = trace(function, *inputs)
    expected = graph(*inputs)
    decisions = fuse(graph)
    assert any(isinstance(decision, Fused) for decision in decisions) or seed >= 40
    for found, right in zip(graph(*inputs), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)
