"""Generated C++ and fused regions of the norms, as snapshots that reviews read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from snapshots import assert_snapshot
from torch import nn
from torch.nn import functional as F

from normpass.backend import record
from normpass.backend.explain import kernel_source
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


def decisions(name: str, dynamic: bool) -> list[Fused]:
    return fused(*CASES[name], dynamic, backward=name != "layer_norm_double_backward")


def fused(
    build: Callable[[], nn.Module], shape: tuple[int, ...], dynamic: bool, *, backward: bool
) -> list[Fused]:
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
    return [decision for decision in heard if isinstance(decision, Fused)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_regions_and_kernels(name: str, dynamic: bool) -> None:
    kind = "dynamic" if dynamic else "static"
    made = decisions(name, dynamic)
    texts = [f"# {decision.phase}\n{decision.text}" for decision in made]
    assert_snapshot(f"regions/{name}_{kind}.txt", "\n\n".join(texts))
    kernels = [f"// {decision.phase}\n{kernel_source(decision)}" for decision in made]
    assert_snapshot(f"cpp/{name}_{kind}.txt", "\n\n".join(kernels))


def test_a_kernel_that_takes_two_rows_at_a_time() -> None:
    """Rows of 128 KiB: four of them would not fit in a core's own cache."""
    made = fused(lambda: nn.LayerNorm(32768), (64, 32768), False, backward=True)
    (backward,) = (decision for decision in made if decision.phase == "backward")
    assert_snapshot("cpp/layer_norm_two_rows.txt", f"// backward\n{kernel_source(backward)}")
