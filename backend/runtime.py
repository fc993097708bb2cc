"""Running a region on the CPU: from its text to a kernel, and from tensors to a launch."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

# What Inductor's own code calls for each tensor: ten times cheaper than the same in Python.
from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided  # type: ignore[attr-defined]
from torch._C._dynamo.guards import assert_size_stride

from normpass.backend import toolchain
from normpass.backend.caches import private_cache
from normpass.backend.codegen import cpp
from normpass.backend.plan import make_plan
from normpass.backend.reference import evaluate
from normpass.passes.region import Buffer, parse, product

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from torch import Tensor

log = logging.getLogger(__name__)

# Below this many elements a second worker costs more than it brings.
ELEMENTS_PER_WORKER = 16 * 1024


class _Layout(NamedTuple):
    """What a tensor of a region looks like for given sizes: the arguments of empty_strided."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


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
        if not _as_planned(inputs, launch.inputs):
            inputs = self._relaid_out(inputs, launch.inputs)
        outputs = [empty_strided(*want) for want in launch.outputs]
        pointers = self._pointers(*[tensor.data_ptr() for tensor in (*inputs, *outputs)])
        workers = min(torch.get_num_threads(), launch.most_workers)
        function(pointers, launch.sizes, workers, launch.past_caches)
        return outputs

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
                region.shape(buffer, extents), region.strides(buffer, extents), buffer.dtype
            )

        inputs = tuple(layout(buffer) for buffer in region.inputs)
        outputs = tuple(layout(output.buffer) for output in region.outputs)
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

    def _relaid_out(self, inputs: Sequence[Tensor], planned: Sequence[_Layout]) -> list[Tensor]:
        """The tensors as the kernel was planned for.

        Raises:
            ValueError: if they are other tensors altogether, with what was expected and found.
        """
        if len(inputs) != len(planned):
            raise ValueError(
                f"region {self.region.name}: expected {len(planned)} tensors, found {len(inputs)}"
            )
        for tensor, want in zip(inputs, planned, strict=True):
            if tensor.shape != want.shape or tensor.dtype is not want.dtype:
                raise ValueError(
                    f"region {self.region.name}: expected a tensor of shape {want.shape} and "
                    f"{want.dtype}, found shape {tuple(tensor.shape)} and {tensor.dtype}"
                )
        return [_relayout(tensor, want) for tensor, want in zip(inputs, planned, strict=True)]


def _as_planned(inputs: Sequence[Tensor], planned: Sequence[_Layout]) -> bool:
    """Whether the tensors lie in memory as the kernel expects them."""
    if len(inputs) != len(planned):
        return False
    try:
        for tensor, want in zip(inputs, planned, strict=True):
            if tensor.dtype is not want.dtype:
                return False
            assert_size_stride(tensor, want.shape, want.strides)
    except AssertionError:
        return False
    return True


def _relayout(tensor: Tensor, want: _Layout) -> Tensor:
    """A tensor with the strides that are expected; a copy if it has others."""
    if _as_planned([tensor], [want]):
        return tensor
    # Where an expanded tensor is expected, one element stands for all.
    for dim, step in enumerate(want.strides):
        if step == 0 and want.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    laid_out = torch.empty_strided(tensor.shape, want.strides, dtype=want.dtype)
    return laid_out.copy_(tensor).expand(want.shape)


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
