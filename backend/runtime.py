"""Running a region on the CPU: from its text to a kernel, and from tensors to a launch."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

# What Inductor's own code calls for each tensor: ten times cheaper than the same in Python.
from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided  # type: ignore[attr-defined]

from normpass.backend import toolchain
from normpass.backend.caches import private_cache
from normpass.backend.codegen import cpp
from normpass.backend.layouts import Layout, lie_as_planned, relaid_out
from normpass.backend.plan import make_plan
from normpass.backend.reference import evaluate
from normpass.passes.region import parse, product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

log = logging.getLogger(__name__)

# Below this many elements a second worker costs more than it brings.
ELEMENTS_PER_WORKER = 16 * 1024


@dataclass(frozen=True)
class _Launch:
    """All that depends on sizes alone."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    sizes: ctypes.Array[ctypes.c_int64]
    most_workers: int
    past_caches: bool


class Kernel:
    """A region's kernel. Call it with its input tensors and its run-time sizes.

    What cannot be printed was refused when the graph was compiled, and what cannot be built is a
    compiler's or a cache's fault: both run unfused, with one warning.
    """

    def __init__(self, text: str) -> None:
        self.region = parse(text)
        self._function: ctypes._NamedFuncPointer | None = None
        self._launches: dict[tuple[int, ...], _Launch] = {}
        tensors = len(self.region.inputs) + len(self.region.outputs)
        self._pointers = ctypes.c_void_p * tensors
        self._failed = False
        try:
            self.source = print_kernel(text)
            toolchain.start(self.source)  # beside whatever else is compiled; the first call waits
        except Exception as error:
            self._fail(repr(error))

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        function = self._function or self._load()
        if function is None:
            return evaluate(self.region, inputs, sizes)
        key = tuple(sizes)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._prepare(key)
        if not lie_as_planned(inputs, launch.inputs):
            inputs = relaid_out(self.region, inputs, launch.inputs)
        outputs = [empty_strided(*want) for want in launch.outputs]
        pointers = self._pointers(*[tensor.data_ptr() for tensor in (*inputs, *outputs)])
        workers = min(torch.get_num_threads(), launch.most_workers)
        function(pointers, launch.sizes, workers, launch.past_caches)
        return outputs

    def _load(self) -> ctypes._NamedFuncPointer | None:
        """The kernel's entry, once it is built; None, with one warning, where that fails."""
        if self._failed:
            return None
        try:
            # Asked for again, because a forked child does not get what its parent was building.
            function = toolchain.start(self.source).result().kernel
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_bool)
            function.restype = None
            self._function = function
        except Exception as error:
            self._fail(error)
        return self._function

    def _fail(self, reason: object) -> None:
        self._failed = True
        log.warning(
            "region %s runs unfused: its C++ kernel could not be built: %s",
            self.region.name,
            reason,
        )

    def _prepare(self, sizes: tuple[int, ...]) -> _Launch:
        region = self.region
        extents = region.extents(sizes)
        inputs = tuple(Layout.of(region, buffer, extents) for buffer in region.inputs)
        outputs = tuple(Layout.of(region, output.buffer, extents) for output in region.outputs)
        elements = product(extents[axis.name] for axis in region.axes)
        traffic = sum(product(t.shape) * t.dtype.itemsize for t in (*inputs, *outputs))
        workers = max(1, elements // ELEMENTS_PER_WORKER)
        return _Launch(
            inputs,
            outputs,
            (ctypes.c_int64 * max(len(sizes), 1))(*sizes),
            workers,
            # What the workers' own caches cannot keep is written around them: filling a line that
            # is about to be overwritten costs more than its next reader saves, from the last level.
            traffic > min(torch.get_num_threads(), workers) * private_cache(),
        )


@lru_cache(maxsize=4096)
def print_kernel(text: str) -> str:
    """The C++ source of a region's text. Whatever it raises is a fault of ours."""
    return cpp.generate(make_plan(parse(text)))


@lru_cache(maxsize=4096)
def kernel(text: str) -> Kernel:
    """The kernel of a region's text. It starts to compile at the first call and is kept."""
    return Kernel(text)


def launch(inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    """torch.ops.normpass.region on CPUs without the way through the dispatcher, which costs more
    than the rest of a launch. A profiler sees the operator.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        from normpass.backend.op import region_op

        return region_op(inputs, sizes, text)
    return kernel(text)(inputs, sizes)
