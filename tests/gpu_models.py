"""Training steps of models of benchmarks/gpu_models.py compiled for a GPU that is not there.

    python tests/gpu_models.py LIBRARY SIZE MODEL

LIBRARY: gpu_absent.library(). SIZE: tiny, where everything is fused, or full, with the defaults.
Prints one JSON object: what is left to Inductor's calls of the operator, our faults and warnings,
and for each distinct region its kernels, as they are compiled and fitted to the GPU.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])

import json
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from gpu_absent import printing, told_of_a_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_ahead import usage

from normpass.backend.run import cuda_driver, cuda_launch, launch_gpu, nvrtc, prepared
from normpass.benchmarks.gpu_models import MODELS
from normpass.benchmarks.zoo import FORMATS
from normpass.doctor.trial import listening
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.backend.codegen.cuda import CudaSource
    from normpass.benchmarks.zoo import Model

GPU = torch.device("cuda", 0)


def on_gpu(value: Any, layout: torch.memory_format = torch.contiguous_format) -> Any:
    """A tensor of the same shape, without values; what is no tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    layout = layout if value.dim() == 4 else torch.contiguous_format
    return torch.empty(value.shape, dtype=value.dtype, device=GPU, memory_format=layout)


def move(module: nn.Module) -> None:
    """A model's parameters and buffers to the GPU."""
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            moved = torch.empty_strided(parameter.shape, parameter.stride(), device=GPU)
            setattr(each, name, nn.Parameter(moved))
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, on_gpu(buffer))


def train(model: Model, options: dict[str, Any], *, tiny: bool) -> list[str]:
    """Compiles a step in bfloat16 autocast, forward and backward. Inductor's code of each graph."""
    module, inputs = model.build(tiny=tiny)
    layout = FORMATS[model.formats[0]]
    module = module.to(memory_format=layout)  # type: ignore[call-overload]
    code: list[str] = []

    def step(**inputs: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model.loss(module, **inputs)

    with printing(code), FakeTensorMode(allow_non_fake_inputs=True):
        move(module)
        compiled = torch.compile(step, backend="normpass", options=options, dynamic=False)
        compiled(**{name: on_gpu(value, layout) for name, value in inputs.items()}).backward()
    return code


def local_bytes(binary: bytes, folder: Path) -> int:
    return sum(spilled for _, spilled in usage(binary, folder).values())


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """A block in which kernels are built for the GPU, and nothing can be launched."""

    def build(source: CudaSource, device: torch.device) -> dict[str, Any]:
        found = usage(nvrtc.compiled(source.text, 90), folder)
        return {
            kernel.name: SimpleNamespace(
                teams=132, spilled=found[kernel.name][1], registers=found[kernel.name][0]
            )
            for kernel in source.kernels
        }

    nothing = SimpleNamespace(cuLaunchKernel=None)
    with (
        told_of_a_gpu(partial(local_bytes, folder=folder)),
        mock.patch.object(cuda_driver, "build", build),
        mock.patch.object(cuda_launch, "library", return_value=nothing),
        mock.patch.object(prepared, "stream_of", return_value=int),
    ):
        yield


def kernels(text: str, sizes: tuple[int, ...], folder: Path) -> list[str]:
    """What each kernel of a region takes: the last ones that were built."""
    ready = launch_gpu.kernel(text, sizes, 0).ready(sizes, GPU)
    if ready is None:  # there is a warning
        return []
    run: Any = ready.run
    return [taken(launch.function, launch.blocks, folder) for launch in run.launches]


def taken(function: Any, blocks: int, folder: Path) -> str:
    if not hasattr(function, "owner"):
        return f"cuda {blocks} blocks, {function.registers} registers, {function.spilled} spilled"
    kernel = function.owner
    ((registers, spilled),) = usage(kernel.asm["cubin"], folder).values()
    return (
        f"triton {blocks} programs of {function.threads} threads, {registers} registers, "
        f"{spilled} spilled, {function.shared} bytes shared"
    )


def main(size: str, name: str) -> None:
    with listening() as warnings:
        found = examined(size, name)
    print(json.dumps({**found, "faults": faults.reported(), "warnings": warnings}))


def examined(size: str, name: str) -> dict[str, Any]:
    """The code of a model's step and the kernels of its regions."""
    begun: list[tuple[str, tuple[int, ...]]] = []
    options = {"least_bytes": 0} if size == "tiny" else {}
    with mock.patch.object(launch_gpu, "start", lambda text, sizes, _: begun.append((text, sizes))):
        code = train(MODELS[name], options, tiny=size == "tiny")
    folder = Path(tempfile.mkdtemp())
    regions = []
    for known in (launch_gpu.kernel, launch_gpu._kernel):
        known.cache_clear()  # those of the graph would be built by the driver
    with building(folder):
        for text, sizes in dict.fromkeys(begun):
            lines = text.splitlines()
            what = [lines[0], *(line for line in lines if line.startswith("axes"))]
            regions.append([*what, *kernels(text, sizes, folder)])
    called = [
        line.strip()
        for text in code
        for line in text.splitlines()
        if "torch.ops.normpass" in line and not line.strip().startswith("#")
    ]
    return {"graphs": len(code), "begun": len(begun), "regions": regions, "called": called}


if __name__ == "__main__":
    main(*sys.argv[2:])
