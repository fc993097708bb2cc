"""Programs whose derivatives are tested: what a compiled graph may do, in small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]


class Rounded(torch.autograd.Function):
    """Straight through, but for a factor that depends on the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos()


class Scaled(torch.autograd.Function):
    """Saves its input, its output, and a value that is neither: a constant for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y, z = x.exp() * scale, x.sin()
        ctx.save_for_backward(x, y, z)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y, z = ctx.saved_tensors
        return g * y + x.cos() * z * g, None


def written_inside(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    z = y + w.sum()
    y.mul_(w.sum())
    return y.tanh() * z @ w


def breaks(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).tanh()
    torch._dynamo.graph_break()
    h = F.group_norm(h, 2)
    torch._dynamo.graph_break()
    return (h @ w).sin()


def three_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = (x @ w).tanh()
    return h[0], h[1:], h.t()


PROGRAMS: dict[str, Function] = {
    "composition": lambda x, w: (x @ w).tanh() * x,
    "a view": lambda x, w: ((x @ w).tanh().view(-1), F.gelu(x @ w)[0]),
    "views of one result": three_views,
    "a view of an input": lambda x, w: (x.view(-1), (x @ w).tanh().sum()),
    "an input": lambda x, w: (x, (x @ w).tanh()),
    "detached": lambda x, w: (x @ w).tanh() * (x.detach().sin() @ w),
    "written inside": written_inside,
    "an unused input": lambda x, w: x.tanh(),
    "an integer result": lambda x, w: (x.tanh() @ w, x.argmax()),
    "graph breaks and a shared weight": breaks,
    "checkpointed": lambda x, w: checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=False),
    "a Function": lambda x, w: (Rounded.apply(x @ w) * x).sin(),
    "a Function that saves all kinds": lambda x, w: (Scaled.apply(x @ w * 0.1, 3.0) * x).sin(),
    "a Function in a checkpoint": lambda x, w: checkpoint(
        lambda x: (Scaled.apply(x @ w * 0.1, 3.0) * x).sin(), x, use_reentrant=False
    ),
}


def _deviations(x: Tensor, *axes: int) -> Tensor:
    x = x - x.mean(axes, keepdim=True)
    return x / (x.square().mean(axes, keepdim=True) + 1e-5).sqrt()


# Each as torch has it, and written out: eager mode differentiates its own wrongly from the third
# order on. x: n 4, w: 4 4
NORMS: dict[str, tuple[Function, Function]] = {
    "layer norm": (
        lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
        lambda x, w: _deviations(x, -1) * w[0] + w[1],
    ),
    "rms norm": (
        lambda x, w: F.rms_norm(x, (4,), w[0], 1e-5),
        lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[0],
    ),
    "group norm": (
        lambda x, w: F.group_norm(x, 2, w[0]),
        lambda x, w: _deviations(x.unflatten(1, (2, 2)), -1).flatten(1) * w[0],
    ),
    "batch norm": (
        lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
        lambda x, w: _deviations(x, 0) * w[0] + w[1],
    ),
    "instance norm": (
        lambda x, w: F.instance_norm(x.view(-1, 1, 4)).view(-1, 4),
        lambda x, w: _deviations(x, -1),
    ),
    "normalize": (
        lambda x, w: F.normalize(x, dim=-1),
        lambda x, w: x / x.square().sum(-1, keepdim=True).sqrt(),
    ),
}
