"""Random graphs that take rows apart and put them together again, fused or not: the same values."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from random_graphs import WIDTH, case, check, evaluated, norm
from torch.nn import functional as F
from tracing import fuse

from normpass.passes import pieces
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.passes.lower import Lowered

STEPS = 7
# Of the sweep: a part was left that no region read; a copy made a region fit no longer.
FOUND = (566, 1152)


def apart(x: Tensor, y: Tensor, rng: random.Random) -> Tensor:
    """Of rows: parts exchanged, replaced, multiplied with each other."""
    cut = rng.choice([2, 3, 4])
    first, last = x[..., :cut], x[..., cut:]
    if rng.random() < 0.3:
        first, last = x.split([cut, WIDTH - cut], -1)
    functions: list[Callable[[], Tensor]] = [
        lambda: x * y.sin() + torch.cat([-last, first], -1) * y.cos(),
        lambda: torch.cat([-x[..., 3:], x[..., :3]], -1) + y,
        lambda: torch.cat([first * y[..., :cut], y[..., cut:]], -1),
        lambda: torch.slice_scatter(x, y[..., :2].exp(), -1, cut, cut + 2),
        lambda: torch.cat([x[..., :3] * F.gelu(x[..., 3:]), y[..., 3:]], -1),
        lambda: x + first.mean(-1, keepdim=True) - last.amax(-1, keepdim=True),
        lambda: torch.cat([x[..., 4:], x[..., :2], x[..., 2:4]], -1) * y,
        lambda: torch.cat([last, first.softmax(-1)], -1),
        lambda: torch.cat([x[:, 1:], x[:, :1]], 1) + y,
        lambda: F.pad(first, (0, WIDTH - cut)) + y,
        lambda: torch.cat([x, y], -1)[..., 3:9] + x,
        lambda: torch.cat([first, last], -1).var(-1, keepdim=True) * y,
    ]
    return rng.choice([*functions, *in_turn(x, y)])()


def in_turn(x: Tensor, y: Tensor) -> list[Callable[[], Tensor]]:
    """Of rows: every second element, and parts as one element of a dimension of so many."""
    pairs = x.unflatten(-1, (WIDTH // 2, 2))

    def turned(even: Tensor, odd: Tensor) -> Tensor:
        return x * y.sin() + torch.stack([-odd, even], -1).flatten(-2) * y.cos()

    return [
        lambda: turned(x[..., ::2], x[..., 1::2]),
        lambda: turned(*pairs.unbind(-1)),
        lambda: turned(pairs.select(-1, 0), pairs[..., 1].softmax(-1)),
        lambda: torch.cat([-x, *x.unflatten(-1, (2, 3)).unbind(-2)], -1)[..., 6:] * y,
        lambda: torch.slice_scatter(x, y[..., 1::2].tanh() * x[..., ::2], -1, 1, step=2),
        lambda: torch.slice_scatter(x, y[..., :2], -1, 2, step=3) + x[..., ::3].mean(-1, True),
        lambda: torch.select_scatter(pairs, y[..., 3:], -1, 1).flatten(-2) * y,
        lambda: pairs.flip(-1).flatten(-2) + torch.stack([y[..., 3:], x[..., :3]], -1).flatten(-2),
        lambda: x * y[..., 1:2] - y.select(-1, 0).unsqueeze(-1),
    ]


def program(seed: int) -> Callable[..., list[Tensor]]:
    def f(*inputs: Tensor) -> list[Tensor]:
        rng = random.Random(seed)
        values = list(inputs)
        for _ in range(STEPS):
            x, y = rng.choice(values[-2:]), rng.choice(values)
            made: Any = rng.choices([norm, apart, torch.mul, torch.add], [3, 5, 1, 1])[0]
            value = norm(x, rng) if made is norm else None
            value = apart(x, y, rng) if made is apart else value
            values.append(made(x, y) if value is None else value)
        values.append(norm(values[-1], rng))
        return [values[-1], *rng.sample(values[2:-1], 2)]

    return f


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LEAST_PIECE", 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "seed",
    [
        *range(60),
        *FOUND,
        *(pytest.param(s, marks=pytest.mark.sweep) for s in range(60, 4000) if s not in FOUND),
    ],
)
def test_the_same_values(seed: int) -> None:
    evaluated(*case(program, seed, (0, 2)))


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(s, marks=pytest.mark.sweep) for s in range(20, 2000))]
)
def test_so_do_those_whose_regions_are_refused(seed: int) -> None:
    """At random, or all in pieces: nothing is left of their parts in the graph."""
    rng = random.Random(seed)

    def missing(lowered: Lowered) -> str | None:
        refused = rng.random() < 0.4 if seed % 4 else bool(lowered.parts)
        return "no kernel" if refused else None

    evaluated(*case(program, seed, (0, 2)), missing=missing)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(s, marks=pytest.mark.sweep) for s in range(12, 400))]
)
def test_the_same_values_of_kernels(seed: int) -> None:
    graph, inputs = case(program, seed, (0, 2))
    expected = graph(*inputs)
    fuse(graph)
    check(graph, inputs, expected)


def test_some_are_in_pieces() -> None:
    """Else the tests above show nothing."""
    made = [each for seed in range(40) for each in evaluated(*case(program, seed, (0, 2)))]
    texts = [each.text for each in made if isinstance(each, Fused)]
    for how in ("joined", "in turn"):
        assert sum(f"\n{how}" in text for text in texts) >= 4
