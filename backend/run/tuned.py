"""A region's kernels in several forms, of which a device gets the one that it runs fastest.

Each form is built and timed on tensors of the region's sizes, the first time that they are asked
for; its name is kept in the cache, for sizes of the same classes. Sums have the same order in every
run of one form, and another one in another form.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.run import toolchain
from normpass.backend.run.gpu_kernel import GpuKernel, NotBuiltError
from normpass.backend.run.layouts import outputs_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from normpass.backend.program.counts import Count
    from normpass.backend.run.gpu_kernel import Run
    from normpass.backend.run.prepared import Launches

    Clock = Callable[[Run, Sequence[Tensor], torch.device], float]

log = logging.getLogger(__name__)

ROUNDS = 7


class TunedKernel(GpuKernel):
    """A region's kernels in the fastest of some forms. forms: by name, the usual one first. key:
    what the choice depends on besides the device. clock: seconds of a run.
    """

    dialect = "GPU"

    def __init__(
        self, forms: Mapping[str, GpuKernel], key: str, clock: Clock | None = None
    ) -> None:
        super().__init__(next(iter(forms.values())).region)
        self.forms, self.key, self.clock = forms, key, clock or seconds
        self.chosen: dict[int | None, str] = {}  # by device

    def _prepare(self, sizes: tuple[int, ...], device: torch.device) -> Run:
        known = self.chosen.get(device.index) or self._recalled(device)
        if known is not None:
            with suppress(NotBuiltError):
                run = self.forms[known]._prepare(sizes, device)
                self.chosen[device.index] = known
                return run
        return self._choose(sizes, device)

    def _launches(self, sizes: Sequence[Count], device: torch.device) -> Launches:
        """Those of what was chosen before, and of the usual form where nothing was."""
        usual = next(iter(self.forms))
        known = self.chosen.get(device.index) or self._recalled(device) or usual
        return self.forms[known].launches(sizes, device)

    def _choose(self, sizes: tuple[int, ...], device: torch.device) -> Run:
        """Times all forms, and keeps the fastest."""
        runs: dict[str, Run] = {}
        error: NotBuiltError | None = None
        for name, form in self.forms.items():
            try:
                runs[name] = form._prepare(sizes, device)
            except NotBuiltError as found:
                error = error or found
        if not runs:
            raise error or NotBuiltError(None)
        usual = next(iter(runs))
        if len(runs) == 1 or _is_capturing(device):
            return runs[usual]
        try:
            times = self._times(runs, sizes, device)
        except torch.OutOfMemoryError:
            log.info("region %s is not tuned: there is no memory for it", self.region.name)
            return runs[usual]
        fastest = self.chosen[device.index] = min(times, key=times.__getitem__)
        log.info("region %s runs fastest as %s: %s", self.region.name, fastest, times)
        with suppress(OSError):
            toolchain.write(self._place(device), fastest.encode())
        return runs[fastest]

    def _times(
        self, runs: Mapping[str, Run], sizes: tuple[int, ...], device: torch.device
    ) -> dict[str, float]:
        """Median seconds of each, in alternation, so that what disturbs one disturbs all."""
        laid = self.laid(sizes)
        inputs = [each.empty(device) for each in laid.inputs]
        results = [each.empty(device) for each in laid.results]
        outputs = outputs_in(results, laid.pieces, torch.as_strided) if laid.pieces else results
        tensors = (*inputs, *outputs)
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                found[name].append(self.clock(run, tensors, device))
        return {name: median(each) for name, each in found.items()}

    def _recalled(self, device: torch.device) -> str | None:
        with suppress(OSError, ValueError):
            found = self._place(device).read_text()
            return found if found in self.forms else None
        return None

    def _place(self, device: torch.device) -> Path:
        name = torch.cuda.get_device_name(device)
        forms = "\n".join([*self.forms, *(source_of(form) for form in self.forms.values())])
        key = toolchain.key_of("\n".join((self.key, name, torch.__version__, forms)))
        return toolchain.cache_dir() / f"{key}.form"


def source_of(form: Any) -> str:
    """A form's text: what changes in it makes another choice."""
    text: str = form.source.text
    return text


def seconds(run: Run, tensors: Sequence[Tensor], device: torch.device) -> float:
    """Of one run on a GPU, whose tensors have left its cache."""
    size = 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    torch.empty(size, dtype=torch.uint8, device=device).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run(tensors)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, which nothing may wait for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
