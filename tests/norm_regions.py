"""The norms whose regions and kernels are held as snapshots, and what is fused in each."""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from normpass.backend.explain import record
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class DoubleBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            grad = torch.func.grad(lambda x: F.layer_norm(x, x.shape[-1:]).pow(3).sum())(x)
            return grad.pow(2).sum()

        return torch.func.grad(inner)(x)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm(1024), (8, 16, 1024)),
    "layer_norm_wide": (lambda: nn.LayerNorm(8192), (64, 8192)),
    "rms_norm": (lambda: nn.RMSNorm(1024), (8, 16, 1024)),
    "llama_rms_norm": (lambda: LlamaRMSNorm(1024), (8, 16, 1024)),
    "group_norm": (lambda: nn.GroupNorm(8, 64), (4, 64, 16, 16)),
    "batch_norm": (lambda: nn.BatchNorm2d(64), (4, 64, 16, 16)),
    "softmax": (lambda: nn.Softmax(-1), (64, 1000)),
    "layer_norm_double_backward": (DoubleBackward, (64, 256)),
}


@functools.cache
def decisions(name: str, dynamic: bool) -> tuple[Fused, ...]:
    """What is fused in a case, forward before backward."""
    return fused(*CASES[name], dynamic, backward=name != "layer_norm_double_backward")


def fused(
    build: Callable[[], nn.Module], shape: tuple[int, ...], dynamic: bool, *, backward: bool
) -> tuple[Fused, ...]:
    """What is fused in a module; AssertionError where anything is refused."""
    torch._dynamo.reset()
    model: Any = torch.compile(
        build(),
        backend="normpass",
        dynamic=dynamic,
        options={"least_bytes": 0, "inductor": {"fx_graph_cache": False}},
    )
    x = torch.randn(shape, requires_grad=backward)
    with record.listen() as heard:
        y = model(x)
        if x.requires_grad:
            y.backward(torch.randn_like(y))
    assert all(isinstance(decision, Fused) for decision in heard), heard
    return tuple(decision for decision in heard if isinstance(decision, Fused))


def region(name: str, phase: str, *, dynamic: bool = False) -> str:
    """The text of the one region that a norm has in a phase."""
    (text,) = (one.text for one in decisions(name, dynamic) if one.phase == phase)
    return text


def made_dynamic(name: str) -> str:
    """The lines of a norm's regions that differ where sizes are known at run time only."""
    lines = []
    for phase in ("forward", "backward"):
        static, dynamic = (region(name, phase, dynamic=d).splitlines() for d in (False, True))
        changes = difflib.unified_diff(static, dynamic, n=0, lineterm="")
        lines += [f"# {phase}", *(line for line in changes if line[:2] not in ("--", "++", "@@"))]
    return "\n".join(lines)
