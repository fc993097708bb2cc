"""A region's kernel on a GPU, whatever it is written in: from tensors to launches."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import torch

from normpass.backend.run.gpu_place import is_current, memory_of, on
from normpass.backend.run.layouts import Laid, lie_as_planned, outputs_in, relaid_out
from normpass.backend.run.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from normpass.backend.program.counts import Count
    from normpass.backend.run.gpu_place import New
    from normpass.backend.run.layouts import Layout, Piece
    from normpass.backend.run.prepared import Launches
    from normpass.passes.region import Region

    # Launches kernels with a region's inputs and outputs.
    Run = Callable[[Sequence[Tensor]], None]

log = logging.getLogger(__name__)


class NotBuiltError(Exception):
    """A kernel could not be built; its argument is the error that says why."""


@contextmanager
def building() -> Iterator[None]:
    """A block that builds kernels.

    Raises:
        NotBuiltError: for what goes wrong in it, but for memory of the device that it lacks.
    """
    try:
        yield
    except (torch.OutOfMemoryError, NotBuiltError):
        raise
    except Exception as error:
        raise NotBuiltError(error) from error


class Ready(NamedTuple):
    """A region's kernels for given sizes on a device: call it with inputs that lie as planned."""

    device: torch.device
    new: New
    results: tuple[Layout, ...]
    pieces: tuple[Piece, ...]
    run: Run

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if is_current(self.device):
            return self._run(inputs)
        with on(self.device):
            return self._run(inputs)

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = [self.new(*each) for each in self.results]
        outputs = outputs_in(results, self.pieces, torch.as_strided) if self.pieces else results
        self.run((*inputs, *outputs))
        return results


class GpuKernel:
    """A region's kernels for sizes of given classes. Call it with the region's input tensors and
    its run-time sizes. dialect: what they are written in. instead: how the region runs where they
    cannot be built.
    """

    dialect, instead = "", "unfused"

    def __init__(self, region: Region) -> None:
        self.region = region
        self._laid: dict[tuple[int, ...], Laid] = {}  # by run-time sizes
        self._ready: dict[tuple[int | None, tuple[int, ...]], Ready] = {}  # by device and sizes
        self._building = Lock()
        self._failed = False

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        sizes = tuple(sizes)
        laid = self.laid(sizes)
        if not lie_as_planned(inputs, laid.inputs):
            inputs = relaid_out(self.region, inputs, laid.inputs)
        ready = self.ready(sizes, inputs[0].device)
        return self.without(inputs, sizes) if ready is None else ready(inputs)

    def laid(self, sizes: tuple[int, ...]) -> Laid:
        """Where tensors lie for some sizes."""
        found = self._laid.get(sizes)
        if found is None:
            found = self._laid[sizes] = Laid.of(self.region, sizes)
        return found

    def ready(self, sizes: tuple[int, ...], device: torch.device) -> Ready | None:
        """All of a call but the tensors; None, with one warning, where the kernels cannot be built,
        or where they would read what is not there.

        Whoever asks first on a device builds them, and others wait. What goes wrong besides is the
        device's own error and is raised.
        """
        found = self._ready.get((device.index, sizes))
        if found is not None or self._failed:
            return found
        laid = self.laid(sizes)
        if not laid.is_there:
            return None
        with self._building, on(device):
            if not self._failed and (device.index, sizes) not in self._ready:
                try:
                    run = self._prepare(sizes, device)
                except NotBuiltError as error:
                    self._fail(error.args[0])
                else:
                    ready = Ready(device, memory_of(device), laid.results, laid.pieces, run)
                    self._ready[device.index, sizes] = ready
        return self._ready.get((device.index, sizes))

    def build_ahead(self, sizes: tuple[int, ...], device: torch.device) -> None:
        """Builds the kernels before they are called. The device's own errors wait until then."""
        with suppress(Exception):
            self.ready(sizes, device)

    def _prepare(self, sizes: tuple[int, ...], device: torch.device) -> Run:
        """Builds the kernels on a device, which is the current one.

        Raises:
            NotBuiltError: if that cannot be done.
        """
        raise NotImplementedError

    def launches(self, sizes: Sequence[Count], device: torch.device) -> Launches:
        """What a call launches on a device, for sizes or for what stands for them (`size_symbol`),
        where inputs begin with whole vectors.

        Raises:
            NotBuiltError: if the kernels cannot be built, or only their own library launches them.
        """
        with self._building, on(device):
            return self._launches(sizes, device)

    def _launches(self, sizes: Sequence[Count], device: torch.device) -> Launches:
        """The same on the current device."""
        raise NotImplementedError

    def without(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The region without its kernels."""
        return evaluate(self.region, inputs, sizes)

    def _fail(self, error: Exception | None) -> None:
        self._failed = True
        log.warning(
            "region %s runs %s: its %s kernel could not be built: %s "
            "(normpass why kernel-not-built)",
            *(self.region.name, self.instead, self.dialect, error),
        )
