"""A region's kernel on a GPU, whatever it is written in: from tensors to launches."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from normpass.backend.run.layouts import Laid, lie_as_planned, outputs_in, relaid_out
from normpass.backend.run.reference import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from normpass.passes.region import Region

log = logging.getLogger(__name__)


class GpuKernel:
    """A region's kernels for sizes of given classes. Call it with the region's input tensors and
    its run-time sizes. dialect: what they are written in. instead: how the region runs where they
    cannot be built.
    """

    dialect, instead = "", "unfused"

    def __init__(self, region: Region) -> None:
        self.region = region
        self._laid: dict[tuple[int, ...], Laid] = {}  # by run-time sizes
        self._launch: dict[int | None, Callable[..., None]] = {}  # by device
        self._failed = False

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        laid = self._laid.get(key := tuple(sizes))
        if laid is None:
            laid = self._laid[key] = Laid.of(self.region, sizes)
        if not lie_as_planned(inputs, laid.inputs):
            inputs = relaid_out(self.region, inputs, laid.inputs)
        if self._failed or not laid.is_there:
            return self._without(inputs, sizes)
        device = inputs[0].device
        results = [each.empty(device) for each in laid.results]
        outputs = outputs_in(results, laid.pieces, torch.as_strided) if laid.pieces else results
        tensors = [*inputs, *outputs]
        with on(device):
            if launch := self._launch.get(device.index):
                launch(tensors, sizes)
            elif not self._first(tensors, sizes, device):
                return self._without(inputs, sizes)
        return results

    def _first(self, tensors: list[Tensor], sizes: Sequence[int], device: torch.device) -> bool:
        """The first call on a device builds the kernels and keeps what launches them, so that only
        what goes wrong in building leaves the region without them, with one warning. What goes
        wrong in a launch is the device's own error and is raised. Whether it was launched.
        """
        raise NotImplementedError

    def _without(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The region without its kernels."""
        return evaluate(self.region, inputs, sizes)

    def _fail(self, error: Exception | None) -> bool:
        self._failed = True
        log.warning(
            "region %s runs %s: its %s kernel could not be built: %s",
            *(self.region.name, self.instead, self.dialect, error),
        )
        return False


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device the current one, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
