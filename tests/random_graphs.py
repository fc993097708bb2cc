"""What random graphs are made of, and how they are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from tracing import trace

from normpass.backend.run.reference import evaluate
from normpass.passes.pipeline import Fused, fuse_graph
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

    from normpass.passes.lower import Lowered
    from normpass.passes.pipeline import Decision

BATCH, ROWS, WIDTH = 3, 4, 6
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


def check(graph: GraphModule, inputs: list[Tensor], expected: list[Tensor]) -> None:
    for found, right in zip(graph(*inputs), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)


def case(
    program: Callable[[int], Callable[..., list[Tensor]]], seed: int, swapped: tuple[int, int]
) -> tuple[GraphModule, list[Tensor]]:
    """A graph of a program and what to run it with. swapped: dimensions of an input that lie in
    another order, of every third seed.
    """
    function = program(seed)
    if seed % 2:
        function = gradients(function)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(BATCH, ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    ]
    if seed % 3 == 0:
        inputs[1] = inputs[1].transpose(*swapped).contiguous().transpose(*swapped)
    return trace(function, *inputs), inputs


def evaluated(
    graph: GraphModule,
    inputs: list[Tensor],
    missing: Callable[[Lowered], str | None] = lambda lowered: None,
) -> list[Decision]:
    """Fuses a graph whose regions are evaluated without kernels, and checks it: the same values,
    nothing left of what was tried, and nothing changed where nothing was fused. missing: why there
    is no kernel for a region.
    """
    before, expected = str(graph.graph), graph(*inputs)
    decisions = fuse_graph(
        graph.graph,
        lambda inputs, sizes, text: evaluate(parse(text), inputs, sizes),
        least_bytes=0,
        missing=missing,
    )
    graph.graph.lint()
    assert not graph.graph.eliminate_dead_code()
    if not any(isinstance(decision, Fused) for decision in decisions):
        assert str(graph.graph) == before
    graph.recompile()
    check(graph, inputs, expected)
    return decisions
