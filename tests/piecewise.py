"""What tests of kernels that have parts of rows share: inputs, both passes, the comparison."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normpass.backend.explain import record
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

HEADS, SIZE = 5, 48


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], HEADS, SIZE)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotated(x) * sin


def rms_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Qwen 3 and Gemma 3 have it."""
    return rope(F.rms_norm(heads(x), (SIZE,), w).transpose(1, 2), cos, sin)


def gated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.layer_norm(heads(x), (SIZE,), w)
    return y[..., :24] * F.gelu(y[..., 24:]) + cos[:, None, :24] * sin[:, None, 24:]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(dtype)

    x, w = drawn(3, 7, HEADS * SIZE).requires_grad_(), drawn(SIZE).requires_grad_()
    return [x, w, drawn(7, SIZE), drawn(7, SIZE)]


def both(f: Callable[..., Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    """A result, and the gradients of what requires some."""
    y = f(*args)
    numbers = torch.Generator().manual_seed(1)
    cotangent = torch.randn(y.shape, generator=numbers).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x for x in args if x.requires_grad], cotangent)]


def compiled(f: Callable[..., Tensor], args: Sequence[Tensor]) -> tuple[list[Tensor], list[Fused]]:
    torch._dynamo.reset()
    with record.listen() as decisions:
        found = both(torch.compile(f, backend="normpass", options={"least_bytes": 0}), args)
    assert all(isinstance(each, Fused) for each in decisions), decisions
    return found, [each for each in decisions if isinstance(each, Fused)]


def as_exact(found: Sequence[Tensor], f: Callable[..., Tensor], args: Sequence[Tensor]) -> None:
    """At most twice as far from float64 as eager mode, but for a few roundings."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in args]
    for each in zip(found, both(f, args), both(f, wide), strict=True):
        one, eager, exact = (x.detach() for x in each)
        assert (one.dtype, one.shape) == (eager.dtype, eager.shape)
        few = 8 * torch.finfo(one.dtype).eps * float(exact.abs().max())
        errors = [float((x.double() - exact).abs().max()) for x in (one, eager)]
        assert errors[0] <= 2 * errors[1] + few


def many(dtype: torch.dtype) -> list[Tensor]:
    """Inputs that are written around the caches: more than these hold."""
    _, w, *_ = inputs(dtype)
    cos, sin = (torch.randn(60, SIZE).to(dtype) for _ in range(2))
    return [torch.randn(500, 60, HEADS * SIZE).to(dtype).requires_grad_(), w, cos, sin]


TRITON = """
import sys, torch
from normpass.backend.run import launch_gpu
inputs = torch.load(sys.argv[1])
rows = len(inputs[0])
torch.save(launch_gpu.kernel(sys.stdin.read(), (rows,))(inputs, [rows]), sys.argv[1])
"""


def in_triton(inputs: Sequence[Tensor], text: str, folder: Path) -> list[Tensor]:
    """What a region returns in Triton's interpreter, which is for a whole process."""
    pytest.importorskip("triton")
    path = folder / "tensors"
    torch.save(list(inputs), path)
    subprocess.run(
        [sys.executable, "-c", TRITON, str(path)],
        input=text,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    found: list[Tensor] = torch.load(path)
    return found


def is_joined(fused: Fused, how: str = "joined") -> bool:
    """Whether some result is made of parts, side by side or in turn."""
    return f"\n{how}" in fused.text
