"""A region's kernel on a GPU: which dialect it is in."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler

from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.sizes import size_classes
from normpass.backend.program.team import team_of
from normpass.backend.run import builders
from normpass.backend.run.caches import capability
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass
    from normpass.backend.run.gpu_kernel import GpuKernel, Ready
    from normpass.backend.run.launch_cuda import CudaKernel


@lru_cache(maxsize=4096)
def kernel(text: str, sizes: tuple[int, ...], device: int | None = None) -> GpuKernel:
    """The kernel of a region's text for its run-time sizes. It is printed at the first call and
    kept.

    device: the index of the GPU; None where kernels are interpreted.

    Raises:
        UnsupportedPlanError: if there is none.
    """
    return kernel_for(text, size_classes(sizes), device)


def kernel_for(text: str, classes: tuple[SizeClass, ...], device: int | None = None) -> GpuKernel:
    """That of run-time sizes of some classes, or of all sizes where there are none."""
    found = 0 if device is None else capability(device)
    return _kernel(text, classes, found, device is not None)


def start(text: str, sizes: tuple[int, ...], device: torch.device) -> Future[None]:
    """Begins to build a region's kernels beside whatever else is compiled; the first call waits.

    Raises:
        UnsupportedPlanError: if there is none.
    """
    return builders.submit(kernel(text, sizes, device.index).build_ahead, sizes, device)


@lru_cache(maxsize=4096)
def _kernel(
    text: str, classes: tuple[SizeClass, ...], capability: int, is_there: bool
) -> GpuKernel:
    region = parse(text)
    machine = gpu_machine(region, classes, capability)
    usual = _in_cuda(text, classes, machine) if machine.clusters else _in_triton(text, classes)
    if region.dialect != "tuned" or not is_there:
        return usual
    from normpass.backend.run.tuned import TunedKernel

    forms = {"usual": usual, **dict(_others(text, classes, capability))}
    return TunedKernel(forms, f"{text}\n{classes}")


@lru_cache(maxsize=4096)
def _in_triton(text: str, classes: tuple[SizeClass, ...]) -> GpuKernel:
    from normpass.backend.program.machine import GPU
    from normpass.backend.run.launch_triton import TritonKernel

    return TritonKernel(parse(text), GPU, classes)


def _in_cuda(text: str, classes: tuple[SizeClass, ...], machine: Machine) -> CudaKernel:
    from normpass.backend.run.cuda_driver import build
    from normpass.backend.run.launch_cuda import CudaKernel

    in_triton = partial(_in_triton, text, classes)
    return CudaKernel(parse(text), machine, classes, build, in_triton)


def _others(
    text: str, classes: tuple[SizeClass, ...], capability: int
) -> Iterator[tuple[str, GpuKernel]]:
    """Forms of a region's kernels besides the usual one, which may be among them."""
    from normpass.backend.program.machine import GPU
    from normpass.backend.run.launch_triton import SETTINGS, TritonKernel

    with suppress(UnsupportedPlanError):
        for setting in SETTINGS:
            yield f"triton, {setting}", TritonKernel(parse(text), GPU, classes, setting)
    with suppress(UnsupportedPlanError):
        for dialect in ("cuda", "cuda_bulk"):
            asked = replace(parse(text), dialect=dialect)
            machine = gpu_machine(asked, classes, capability)
            if machine.clusters:
                kernel = _in_cuda(text, classes, machine)
                launches = kernel.plan.launches
                if dialect == "cuda" or any(team_of(launch).bulk for launch in launches):
                    yield dialect, kernel


class CallSite:
    """One place in Inductor's code that calls a region: torch.ops.normpass.region without the way
    through the dispatcher, where tensors are known to lie as the text says. What is found at the
    first call is kept for the later ones. A profiler sees the operator.
    """

    def __init__(self) -> None:
        self.found: tuple[Sequence[int] | None, int, Ready | None] = None, -1, None

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
        known, index, ready = self.found
        if sizes != known or inputs[0].get_device() != index:
            ready = self._find(inputs[0], sizes, text)
        if ready is None:
            return torch.ops.normpass.region(inputs, sizes, text)
        if profiler._is_profiler_enabled:
            with profiler.record_function("normpass::region"):
                return ready(inputs)
        return ready(inputs)

    def _find(self, tensor: Tensor, sizes: Sequence[int], text: str) -> Ready | None:
        device = tensor.device
        ready = kernel(text, tuple(sizes), device.index).ready(tuple(sizes), device)
        self.found = list(sizes), tensor.get_device(), ready
        return ready
