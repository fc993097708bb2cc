"""A layer norm compiled and compared with eager mode: whether anything works at all here."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from normpass.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """What normpass warns of in a block."""
    handler, log = _Warnings(), logging.getLogger("normpass")
    log.addHandler(handler)
    try:
        yield handler.seen
    finally:
        log.removeHandler(handler)


def tried(device: str) -> tuple[str, list[Finding]]:
    """A layer norm, forward and backward: how it went, and what went wrong."""
    report = "please report it, with all of this"
    begin = time.perf_counter()
    try:
        with listening() as warnings:
            fused = trial(device)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        problem = f"a layer norm fails on {device}: {type(error).__name__}: {first}"
        return "failed", [Finding(problem, report)]
    if warnings:
        return "warned", [Finding(f"a layer norm on {device}: {text}", report) for text in warnings]
    if not fused:
        return "nothing fused", [Finding(f"a layer norm is not fused on {device}", report)]
    return f"right, {fused} kernels in {time.perf_counter() - begin:.1f} s", []


def trial(device: str) -> int:
    """Regions of a layer norm's forward and backward.

    Raises:
        AssertionError: if a result is another than eager mode's.
    """
    from torch._dynamo.utils import counters
    from torch._functorch import config

    torch.manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": torch.float64}
    norm, inputs = torch.nn.LayerNorm(96, **like), torch.randn(2, 64, 96, **like)
    counters["normpass"].clear()
    # What a cache has, or this process, would not be fused again.
    torch._dynamo.reset()
    uncached = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    options: dict[str, Any] = {"least_bytes": 0, "inductor": uncached}
    compiled = torch.compile(norm, backend="normpass", options=options)
    with config.patch(enable_autograd_cache=False):
        found, expected = gradients(compiled, norm, inputs), gradients(norm, norm, inputs)
    torch.testing.assert_close(found, expected)
    return sum(n for what, n in counters["normpass"].items() if what.startswith("fused "))


def gradients(
    function: Callable[[torch.Tensor], torch.Tensor], norm: torch.nn.Module, inputs: torch.Tensor
) -> list[torch.Tensor]:
    """What a norm returns, and the gradients of a function of that."""
    x = inputs.clone().requires_grad_()
    y = function(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *norm.parameters()])]
