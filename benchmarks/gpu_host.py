"""What a call costs the host: a compiled function with one region of normpass's against the same
with kernels of Inductor's. The queue is empty when it is called, and its work is not waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.benchmarks.gpu_cases import GpuCase, backward_of
from normpass.benchmarks.gpu_measure import said
from normpass.benchmarks.gpu_variants import NORMPASS, STOCK
from normpass.benchmarks.measure import interleave
from normpass.benchmarks.steps import stock_as_it_is

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.benchmarks.gpu_clock import Place

SHAPE = (512, 1024)
CALLS = 50
REPEATS = 40


def programs(case: GpuCase) -> dict[str, Callable[..., Any]]:
    """Functions of tensors that become one graph each, with one region in it."""
    spec = case.spec

    def forward(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> Tensor:
        return spec.function(x, weight, bias)

    def backward(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        return backward_of(spec, x, dy, weight, bias)

    return {"layer_norm forward": forward, "layer_norm backward": backward}


def measure_host(place: Place, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Seconds of the host for a call, by program and variant."""
    torch._dynamo.reset()
    case = GpuCase("layer_norm", SHAPE, "bfloat16", "backward")
    tensors = tuple(case.tensors(place.device).values())
    found = []
    for label, program in programs(case).items():
        steps: dict[str, Callable[[], object]] = {}
        failed: dict[str, str] = {}
        for name in (STOCK, *NORMPASS):
            try:
                with stock_as_it_is(name):
                    steps[name] = called(program, name, tensors)
            except Exception as error:  # of any type: the others are measured still
                failed[name] = said(error)
        times = {}
        if steps:
            clock = place.host_clock
            times = interleave(steps, repeats, place.device, calls_each=CALLS, clock=clock)
        seconds = {name: vars(timing) for name, timing in times.items()}
        found.append({"program": label, "seconds": seconds, "failed": failed})
    return found


def called(
    program: Callable[..., Any], name: str, tensors: tuple[Tensor, ...]
) -> Callable[[], object]:
    """A call of the compiled program, which is compiled by the first."""
    how: dict[str, Any] = {"backend": "inductor"}
    if name in NORMPASS:  # what is measured is a region, however small
        how = {"backend": "normpass", "options": {**NORMPASS[name], "least_bytes": 0}}
    compiled = torch.compile(program, fullgraph=True, dynamic=False, **how)

    def call() -> object:
        with torch.no_grad():
            return compiled(*tensors)

    for _ in range(3):
        call()
    return call
