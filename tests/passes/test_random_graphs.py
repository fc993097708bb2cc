"""Random graphs, fused or not: the same values. With what regions must cut themselves off from:
integers, random masks, gathers, slices, matrix products, and readers of everything in between.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from random_graphs import BATCH, ROWS, WIDTH, case, check, evaluated, norm
from torch.nn import functional as F
from tracing import fuse

from normpass.passes import pipeline
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.passes.lower import Lowered
    from normpass.passes.profit import Estimate

STEPS = 9


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


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(s, marks=pytest.mark.sweep) for s in range(12, 2000))]
)
def test_fused_graphs_compute_the_same(seed: int) -> None:
    graph, inputs = case(program, seed, (0, 1))
    expected = graph(*inputs)
    decisions = fuse(graph)
    assert any(isinstance(decision, Fused) for decision in decisions) or seed >= 40
    check(graph, inputs, expected)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(s, marks=pytest.mark.sweep) for s in range(6, 2000))]
)
def test_so_do_those_whose_regions_are_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because something would be written for their sake, or at random: what is grown in their place
    is as right, and nothing is left of what was tried.
    """
    weighed, rng = pipeline.refusal, random.Random(seed)

    def refusal(lowered: Lowered, cost: Estimate, *args: Any, **kwargs: Any) -> str | None:
        return "written" if cost.written else weighed(lowered, cost, *args, **kwargs)

    monkeypatch.setattr(pipeline, "refusal", refusal)
    graph, inputs = case(program, seed, (0, 1))
    evaluated(graph, inputs, missing=lambda lowered: "no kernel" if rng.random() < 0.4 else None)
