"""Running a region on the CPU: from its text to a kernel, and from tensors to a launch."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from normpass.backend import toolchain
from normpass.backend.codegen import cpp
from normpass.backend.plan import make_plan
from normpass.backend.reference import evaluate
from normpass.passes.region import Buffer, parse, product

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from torch import Tensor

log = logging.getLogger(__name__)

# Where the operating system does not tell the last cache's size, this is assumed.
USUAL_CACHE = 32 * 1024 * 1024
# Below this many elements a second worker costs more than it brings.
ELEMENTS_PER_WORKER = 16 * 1024


@dataclass(frozen=True)
class _Layout:
    """What a tensor of a region looks like for given sizes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Launch:
    """All that depends on sizes alone."""

    inputs: tuple[_Layout, ...]
    outputs: tuple[_Layout, ...]
    sizes: ctypes.Array[ctypes.c_int64]
    most_workers: int
    past_caches: bool


class Kernel:
    """A compiled region. Call it with its input tensors and its run-time sizes."""

    def __init__(self, text: str) -> None:
        self.region = parse(text)
        self._library: Future[ctypes.CDLL] | None = None
        try:
            self.source = cpp.generate(make_plan(self.region))
            self._library = toolchain.start(self.source)
        except Exception as error:  # a fault of ours, of whatever kind, must not cost a user's run
            self.source = ""
            self._warn(repr(error))
        self._function: ctypes._NamedFuncPointer | None = None
        self._launches: dict[tuple[int, ...], _Launch] = {}
        tensors = len(self.region.inputs) + len(self.region.outputs)
        self._pointers = ctypes.c_void_p * tensors

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        function = self._function or self._load()
        if function is None:
            return evaluate(self.region, inputs, sizes)
        key = tuple(sizes)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._prepare(key)
        if len(inputs) != len(launch.inputs):
            raise ValueError(
                f"region {self.region.name}: expected {len(launch.inputs)} tensors, "
                f"found {len(inputs)}"
            )
        tensors = [
            tensor
            if tensor.stride() == want.strides
            and tensor.shape == want.shape
            and tensor.dtype is want.dtype
            else self._relayout(tensor, want)
            for tensor, want in zip(inputs, launch.inputs, strict=True)
        ]
        tensors += [
            torch.empty_strided(want.shape, want.strides, dtype=want.dtype)
            for want in launch.outputs
        ]
        workers = min(torch.get_num_threads(), launch.most_workers)
        pointers = self._pointers(*[tensor.data_ptr() for tensor in tensors])
        function(pointers, launch.sizes, workers, launch.past_caches)
        return tensors[len(inputs) :]

    def _load(self) -> ctypes._NamedFuncPointer | None:
        """The kernel's entry, once it is built; None, with one warning, where that fails."""
        if self._library is None:
            return None
        try:
            # Asked for again, because a forked child does not get what its parent was building.
            function = toolchain.start(self.source).result().kernel
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_bool)
            function.restype = None
            self._function = function
        except (toolchain.CompileError, OSError, AttributeError) as error:
            self._library = None
            self._warn(error)
            return None
        return self._function

    def _warn(self, reason: object) -> None:
        log.warning(
            "region %s runs unfused: its C++ kernel could not be built: %s",
            self.region.name,
            reason,
        )

    def _prepare(self, sizes: tuple[int, ...]) -> _Launch:
        region = self.region
        extents = region.extents(sizes)

        def layout(buffer: Buffer) -> _Layout:
            return _Layout(
                buffer.dtype, region.shape(buffer, extents), region.strides(buffer, extents)
            )

        inputs = tuple(layout(buffer) for buffer in region.inputs)
        outputs = tuple(layout(output.buffer) for output in region.outputs)
        elements = product(extents[axis.name] for axis in region.axes)
        traffic = sum(product(t.shape) * t.dtype.itemsize for t in (*inputs, *outputs))
        return _Launch(
            inputs,
            outputs,
            (ctypes.c_int64 * max(len(sizes), 1))(*sizes),
            max(1, elements // ELEMENTS_PER_WORKER),
            traffic > last_cache(),
        )

    def _relayout(self, tensor: Tensor, want: _Layout) -> Tensor:
        """The tensor as the kernel was planned for; a copy only where elements really lie
        elsewhere.

        Raises:
            ValueError: if it is another tensor altogether, with what was expected and found.
        """
        if tensor.shape != want.shape or tensor.dtype is not want.dtype:
            raise ValueError(
                f"region {self.region.name}: expected a tensor of shape {want.shape} and "
                f"{want.dtype}, found shape {tuple(tensor.shape)} and {tensor.dtype}"
            )
        if all(
            size <= 1 or have == step
            for size, have, step in zip(want.shape, tensor.stride(), want.strides, strict=True)
        ):
            return tensor
        # Where an expanded tensor is expected, one element stands for all.
        for dim, step in enumerate(want.strides):
            if step == 0 and want.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        laid_out = torch.empty_strided(tensor.shape, want.strides, dtype=want.dtype)
        return laid_out.copy_(tensor).expand(want.shape)


@cache
def last_cache() -> int:
    """Bytes that the last cache holds, as Linux tells it."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return USUAL_CACHE


@lru_cache(maxsize=4096)
def kernel(text: str) -> Kernel:
    """The kernel of a region's text. It starts to compile at the first call and is kept."""
    return Kernel(text)
