"""A region's kernel on a GPU: which dialect it is in."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.sizes import size_classes
from normpass.backend.run.caches import capability
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from normpass.backend.program.sizes import SizeClass
    from normpass.backend.run.gpu_kernel import GpuKernel


@lru_cache(maxsize=4096)
def kernel(text: str, sizes: tuple[int, ...], device: int | None = None) -> GpuKernel:
    """The kernel of a region's text for its run-time sizes. It is printed at the first call and
    kept.

    device: the index of the GPU; None where kernels are interpreted.

    Raises:
        UnsupportedPlanError: if there is none.
    """
    found = 0 if device is None else capability(device)
    return _kernel(text, size_classes(sizes), found)


@lru_cache(maxsize=4096)
def _kernel(text: str, classes: tuple[SizeClass, ...], capability: int) -> GpuKernel:
    region = parse(text)
    in_triton = partial(_in_triton, text, classes)
    machine = gpu_machine(region, classes, capability)
    if not machine.clusters:
        return in_triton()
    from normpass.backend.run.cuda_driver import build
    from normpass.backend.run.launch_cuda import CudaKernel

    return CudaKernel(region, machine, classes, build, in_triton)


@lru_cache(maxsize=4096)
def _in_triton(text: str, classes: tuple[SizeClass, ...]) -> GpuKernel:
    from normpass.backend.program.machine import GPU
    from normpass.backend.run.launch_triton import TritonKernel

    return TritonKernel(parse(text), GPU, classes)
