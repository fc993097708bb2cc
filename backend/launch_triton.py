"""Running a region on a GPU: from its text to a Triton module, and from tensors to launches.

Under TRITON_INTERPRET=1 the same code runs on CPU tensors, for tests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import tempfile
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from normpass.backend.codegen import triton as generator
from normpass.backend.plan import make_plan
from normpass.backend.reference import evaluate
from normpass.backend.toolchain import cache_dir
from normpass.backend.tree import GPU
from normpass.passes.region import Region, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from torch import Tensor

    from normpass.backend.codegen.triton_tiling import Tiling
    from normpass.passes.region import Buffer

log = logging.getLogger(__name__)

# Without a GPU, as many programs share the rows as if there were so many multiprocessors.
INTERPRETED_PROCESSORS = 3


class TritonKernel:
    """A region's Triton module. Call it with the region's input tensors and its run-time sizes.

    Raises:
        UnsupportedPlanError: if there is no Triton form of the region's plan.
    """

    def __init__(self, region: Region, tiling: Tiling | None = None) -> None:
        self.region = region
        self.source = generator.generate(make_plan(region, GPU), tiling)
        self._run: Callable[..., None] | None = None
        self._failed = False

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if self._failed:
            return evaluate(self.region, inputs, sizes)
        extents = self.region.extents(sizes)
        given = [
            _as_planned(self.region, buffer, tensor, extents)
            for buffer, tensor in zip(self.region.inputs, inputs, strict=True)
        ]
        device = given[0].device
        outputs = [
            torch.empty_strided(
                self.region.shape(output.buffer, extents),
                self.region.strides(output.buffer, extents),
                dtype=output.buffer.dtype,
                device=device,
            )
            for output in self.region.outputs
        ]
        if self._run is not None:
            self._launch(self._run, [*given, *outputs], sizes, device)
            return outputs
        return self._first(given, outputs, sizes, device)

    def _first(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        sizes: Sequence[int],
        device: torch.device,
    ) -> list[Tensor]:
        """The first call compiles. Where that fails, the region runs unfused, with one warning."""
        from triton.runtime.errors import TritonError

        try:
            run = load(self.source.text).run
            self._launch(run, [*inputs, *outputs], sizes, device)
        except torch.OutOfMemoryError:
            raise
        except (TritonError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
            self._failed = True
            log.warning(
                "region %s runs unfused: its Triton kernel could not be built: %s",
                self.region.name,
                error,
            )
            return evaluate(self.region, inputs, sizes)
        self._run = run
        return outputs

    def _launch(
        self,
        run: Callable[..., None],
        tensors: list[Tensor],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        if device.type != "cuda":
            run(tensors, sizes, INTERPRETED_PROCESSORS)
            return
        with torch.cuda.device(device):
            run(tensors, sizes, _processors(device.index))


@lru_cache(maxsize=4096)
def kernel(text: str) -> TritonKernel:
    """The Triton kernel of a region's text. It is built at the first call and kept."""
    return TritonKernel(parse(text))


@lru_cache(maxsize=4096)
def _of(region: Region) -> TritonKernel:
    return TritonKernel(region)


def launch(region: Region, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """A region's outputs, computed on its inputs' device and current stream."""
    return _of(region)(inputs, sizes)


def load(text: str) -> ModuleType:
    """A module from its text. It goes by way of a file, because Triton reads the source of its
    functions.

    The file is named by its content and put in place in one step, so processes that write the same
    one do not disturb each other; one with other content under that name is damaged and is written
    again."""
    name = f"normpass_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    directory = cache_dir() / "triton"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.py"
    if not path.exists() or path.read_bytes() != text.encode():
        with tempfile.NamedTemporaryFile(
            "w", dir=directory, encoding="utf-8", delete=False
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OSError(f"expected a Python module at {path}, found none that can be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=64)
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _as_planned(
    region: Region, buffer: Buffer, tensor: Tensor, extents: Mapping[str, int]
) -> Tensor:
    """The tensor as the kernel was planned for; a copy only where elements really lie elsewhere.

    Raises:
        ValueError: if it is another tensor altogether, with what was expected and found.
    """
    shape, strides = region.shape(buffer, extents), region.strides(buffer, extents)
    if tensor.shape != shape or tensor.dtype is not buffer.dtype:
        raise ValueError(
            f"region {region.name}: expected {buffer.name} of shape {shape} and {buffer.dtype}, "
            f"found shape {tuple(tensor.shape)} and {tensor.dtype}"
        )
    if tensor.numel() == 0 or all(
        size <= 1 or have == step
        for size, have, step in zip(shape, tensor.stride(), strides, strict=True)
    ):
        return tensor
    return torch.empty_strided(shape, strides, dtype=buffer.dtype, device=tensor.device).copy_(
        tensor
    )
