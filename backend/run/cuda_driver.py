"""Kernels of CUDA C++ on a GPU, built by NVIDIA's driver.

Its Python bindings (`cuda.bindings`, checked on 13.0) come with torch's CUDA builds from 2.11 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.program.team import shared_bytes, team_of
from normpass.backend.run import nvrtc
from normpass.backend.run.cuda_launch import Binary, DriverError, Loaded, enter_context

if TYPE_CHECKING:
    from collections.abc import Mapping

    from normpass.backend.codegen.cuda import CudaSource
    from normpass.backend.program.tree import Launch


def build(source: CudaSource, device: torch.device) -> Mapping[str, Function]:
    """The kernels of a module on a device, which is the current one, by name.

    Raises:
        ImportError: without the bindings.
        CompileError: if the text cannot be compiled.
        DriverError: if the device does not take it.
    """
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    code = nvrtc.compiled(source.text, 10 * major + minor)
    enter_context()
    module = checked(driver.cuModuleLoadData(code))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return {
        kernel.name: Function(
            checked(driver.cuModuleGetFunction(module, kernel.name.encode())),
            *(kernel.launch, processors, Binary(code, kernel.name)),
        )
        for kernel in source.kernels
    }


class Function(Loaded):
    """A kernel that is loaded. teams: how many of them run at once. spilled: bytes of memory that a
    thread has for registers that do not suffice.
    """

    def __init__(self, function: Any, launch: Launch, processors: int, binary: Binary) -> None:
        from cuda.bindings import driver

        self.team = team_of(launch)
        super().__init__(int(function), self.team.threads, shared_bytes(launch), binary)
        self.kernel = function
        shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, shared, self.shared))
        local = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        self.spilled = checked(driver.cuFuncGetAttribute(local, function))
        self.teams = self._clusters() if self.team.blocks > 1 else processors * self._blocks()

    def _blocks(self) -> int:
        """How many blocks run at once on a multiprocessor."""
        from cuda.bindings import driver

        found = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            self.kernel, self.team.threads, self.shared
        )
        return max(1, checked(found))

    def _clusters(self) -> int:
        """How many clusters run at once on the device: those whose blocks find room beside each
        other.
        """
        from cuda.bindings import driver

        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = self.team.blocks, 1, 1
        config.gridDimX, config.gridDimY, config.gridDimZ = self.team.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.team.threads, 1, 1
        config.sharedMemBytes = self.shared
        config.attrs, config.numAttrs = [attribute], 1
        return max(1, checked(driver.cuOccupancyMaxActiveClusters(self.kernel, config)))


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call returns besides its status.

    Raises:
        DriverError: if that is not success.
    """
    status, *values = answer
    if status.value:
        raise DriverError(f"CUDA driver: {status.name}")
    return values[0] if values else None
