"""What random graphs are made of, and how they are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

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
