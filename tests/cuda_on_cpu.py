"""CUDA C++ without a GPU: built for a CPU, where its threads are fibers
(cuda_on_cpu/cuda_device.cuh).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_regions

from normpass.backend.codegen import cuda
from normpass.backend.program.machine import cuda_machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.team import shared_bytes, team_of
from normpass.backend.run.launch_cuda import CudaKernel
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from normpass.backend.codegen.cuda import CudaSource
    from normpass.backend.codegen.cuda_names import Kernel
    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass
    from normpass.backend.program.tree import Plan
    from normpass.backend.run.prepared import Parameters
    from normpass.passes.region import Region

HEADERS = Path(cuda.__file__).parent
FIBERS = Path(__file__).parent / "cuda_on_cpu"
# Teams that run at once, so that rows are shared out.
TEAMS = 3


def plan_of(name: str, capability: int = 90, **changed: str) -> Plan:
    """A region of triton_regions, planned for CUDA C++; see its `fill`."""
    text = triton_regions.fill(getattr(triton_regions, name.upper()), **changed)
    return make_plan(parse(text), cuda_machine(capability))


class OnCpu:
    """A kernel of a module that was built for a CPU."""

    def __init__(self, library: ctypes.CDLL, kernel: Kernel) -> None:
        self.run = getattr(library, f"run_{kernel.name}")
        self.run.argtypes = (ctypes.c_int64, ctypes.c_void_p)
        self.teams, self.spilled = TEAMS, 0

    def __call__(self, blocks: int, parameters: Parameters, stream: ctypes.c_void_p) -> None:
        self.run(blocks, parameters)


def build(source: CudaSource, device: torch.device) -> Mapping[str, Any]:
    """The functions of a module, by name, for tensors of a CPU."""
    library = ctypes.CDLL(str(built(source)))
    return {k.name: OnCpu(library, k) for k in source.kernels}


def changed(text: str, instead: str) -> Callable[..., Mapping[str, Any]]:
    """Builds a module with another text in one place."""

    def build_other(source: CudaSource, device: torch.device) -> Mapping[str, Any]:
        assert text in source.text
        return build(replace(source, text=source.text.replace(text, instead)), device)

    return build_other


# A softmax of 20 and of 40 rows whose kernel has another text in one place.
CHANGED = """
import json, sys
import cuda_on_cpu, torch
from normpass.backend.run.launch_cuda import CudaKernel
from normpass.passes.region_text import parse
from triton_regions import SOFTMAX, fill

width, numbers, *texts = sys.argv[1:]
machine = cuda_on_cpu.small(**json.loads(numbers))
build = cuda_on_cpu.changed(*texts)
kernel = CudaKernel(parse(fill(SOFTMAX, c=width)), machine, (), build, None)
for rows in (20, 40):
    x = torch.randn(rows, int(width))
    torch.testing.assert_close(kernel([x], [rows])[0], torch.softmax(x, 1))
"""


def said_of_a_fault(text: str, instead: str, width: int, **numbers: int) -> str:
    """What a softmax says on a small GPU if its kernel has `instead` in place of a text. It may end
    with its process.
    """
    paths = [str(FIBERS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", CHANGED, str(width), json.dumps(numbers), text, instead]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


def built(source: CudaSource) -> Path:
    """A library with a function `run_<kernel>(grid, arguments)` for each kernel of a module."""
    text = source.text
    for kernel in source.kernels:
        team = team_of(kernel.launch)
        text += (
            f'extern "C" void run_{kernel.name}(int64_t grid, void* const* arguments) {{\n'
            f"  host::launch({kernel.name}, grid, {team.threads}, {team.blocks}, "
            f"{shared_bytes(kernel.launch)}, arguments);\n}}\n"
        )
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = Path(tempfile.mkdtemp())
    file = folder / f"{name}.cpp"
    file.write_text(text)
    library = folder / f"{name}.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-w"]
    command += ["-ffp-contract=off", f"-I{FIBERS}", f"-I{HEADERS}", str(file), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stderr[:3000]}"
    return library


def kernel_of(
    region: Region, machine: Machine, classes: tuple[SizeClass, ...] = (), crowded: int = 0
) -> CudaKernel:
    """A region's CUDA C++ for tensors of a CPU. crowded: so many times registers do not suffice."""
    built_before = itertools.count()

    def spilling(source: CudaSource, device: torch.device) -> Mapping[str, Any]:
        functions = build(source, device)
        is_crowded = next(built_before) < crowded
        for function in functions.values():
            function.spilled = int(is_crowded)
        return functions

    def otherwise() -> Any:
        raise AssertionError("the kernel could not be built")

    return CudaKernel(region, machine, classes, spilling, otherwise)


def small(**numbers: int) -> Machine:
    """A GPU whose blocks have so little of something that short rows take clusters."""
    machine = cuda_machine(90)
    assert machine.clusters
    return replace(machine, clusters=replace(machine.clusters, **numbers))
