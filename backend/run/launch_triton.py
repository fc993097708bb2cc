"""Running a region on a GPU: from its text to a Triton module, and from tensors to launches.

Under TRITON_INTERPRET=1 the same code runs on CPU tensors, for tests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from normpass.backend.codegen import triton as generator
from normpass.backend.program.machine import GPU, Machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import Sizes, symbol
from normpass.backend.run.gpu_kernel import GpuKernel, NotBuiltError, building
from normpass.backend.run.layouts import pieces
from normpass.backend.run.prepared import VECTOR, OfTensor
from normpass.backend.run.toolchain import cache_dir
from normpass.backend.run.triton_launches import Slot, launches, prepared, record
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

    from normpass.backend.codegen.triton_kernel import Kernel
    from normpass.backend.codegen.triton_library import Card
    from normpass.backend.program.counts import Count
    from normpass.backend.program.sizes import SizeClass
    from normpass.backend.run.gpu_kernel import Run
    from normpass.backend.run.prepared import Launches
    from normpass.backend.run.triton_launches import Launched, Recording
    from normpass.passes.region import Region


log = logging.getLogger(__name__)

# Without a GPU, as many programs share the rows as if there were so many multiprocessors.
INTERPRETED_PROCESSORS = 3


@dataclass(frozen=True)
class Setting:
    """How kernels are compiled. programs: so many times as many at once on a multiprocessor as was
    planned. ahead: whether loops fetch what they read next.
    """

    programs: float = 1.0
    ahead: bool = True

    def __str__(self) -> str:
        ahead = "ahead" if self.ahead else "nothing ahead"
        return f"{self.programs:g} times the programs, {ahead}"

    def of(self, card: Card, kernels: Sequence[Kernel]) -> Card:
        """What kernels are told of a GPU under this setting."""
        most = {k.name: MOST_WARPS // k.warps for k in kernels}
        asked = {k.name: max(1, int(k.programs * self.programs)) for k in kernels}
        fitting = {name: min(count, most[name]) for name, count in asked.items()}
        return replace(
            card,
            fitting=card.fitting if self.programs == 1 else fitting,
            of_program=card.of_program if self.ahead else 0,
        )


USUAL = Setting()
# Others that may be faster.
SETTINGS = (Setting(0.5), Setting(2.0), Setting(ahead=False), Setting(2.0, ahead=False))
# Warps of a multiprocessor.
MOST_WARPS = 64


class TritonKernel(GpuKernel):
    """A region's Triton module for sizes of given classes.

    Raises:
        UnsupportedPlanError: if there is no Triton form of the region's plan.
    """

    dialect = "Triton"

    def __init__(
        self,
        region: Region,
        machine: Machine = GPU,
        classes: tuple[SizeClass, ...] = (),
        setting: Setting = USUAL,
    ) -> None:
        super().__init__(region)
        self.setting, self.classes = setting, classes
        self.source = generator.generate(make_plan(region, machine, classes))
        self._cards: dict[int | None, Card] = {}  # by device: what its kernels turned out to fit

    def _prepare(self, sizes: tuple[int, ...], device: torch.device) -> Run:
        run, built = self._recorded(sizes, device)
        card = self._cards[device.index]

        def launched_by_triton(tensors: Sequence[Tensor]) -> None:
            run(tensors, sizes, card)

        with faults.survived("preparing launches", "a region", "Triton launches its kernels"):
            tensors = len(self.region.inputs) + len(self.region.outputs)
            direct = prepared(built, tensors, device, launched_by_triton)
            if direct and built.launches:
                return direct
        return launched_by_triton

    def _launches(self, sizes: Sequence[Count], device: torch.device) -> Launches:
        _, built = self._recorded(sizes, device)
        if (found := launches(built)) is None:
            raise NotBuiltError(NotImplementedError("only Triton launches what it compiled"))
        return found

    def _recorded(
        self, sizes: Sequence[Count], device: torch.device
    ) -> tuple[Callable[..., None], Recording]:
        """A module's `run` and what it launches. Kernels whose registers do not suffice are built
        again for fewer programs at once, and those that turn out to take more than the device has,
        to fetch nothing ahead.
        """
        from triton.runtime.errors import TritonError

        found: Exception | None = None
        card = self._cards.get(device.index)
        card = card or self.setting.of(card_of(device), self.source.kernels)
        for given in (card, replace(card, of_program=0)):
            try:
                return self._fitted(sizes, device, given)
            except TritonError as error:  # more shared memory or registers than the device has
                found = error
        raise NotBuiltError(found)

    def _fitted(
        self, sizes: Sequence[Count], device: torch.device, card: Card
    ) -> tuple[Callable[..., None], Recording]:
        run, built = self._compiled(sizes, device, card)
        while crowded := _crowded(built.launches, card):
            card = replace(card, fitting={**card.fitting, **crowded})
            run, built = self._compiled(sizes, device, card)
        self._cards[device.index] = card
        return run, built

    def _compiled(
        self, sizes: Sequence[Count], device: torch.device, card: Card
    ) -> tuple[Callable[..., None], Recording]:
        with building():
            run = load(self.source.text).run
            return run, record(run, _slots(self.region, sizes, device), sizes, self.classes, card)


def _slots(region: Region, sizes: Sequence[Count], device: torch.device) -> list[Slot]:
    """What stands for a region's tensors. Outputs that are parts of a result may begin anywhere."""
    begins = [0] * len(region.inputs)
    pairs = zip(region.runtime_sizes, sizes, strict=True)
    known = [size if isinstance(size, int) else symbol(name) for name, size in pairs]
    parts = pieces(region, region.extents(known))
    known_to_divide = Sizes().divisor
    begins += [known_to_divide(part.offset) * part.layout.dtype.itemsize % VECTOR for part in parts]
    buffers = (*region.inputs, *(output.buffer for output in region.outputs))
    return [
        Slot(OfTensor(k), buffer.dtype, device, begin)
        for k, (buffer, begin) in enumerate(zip(buffers, begins, strict=True))
    ]


def _crowded(launches: Sequence[Launched], card: Card) -> dict[str, int]:
    """The kernels that spill registers, and for how many programs at once they are to be built
    instead: one fewer than those that share a multiprocessor's now. How many bytes a thread spills
    Triton knows when a kernel is loaded (`n_spills`, checked on 3.6 and 3.9).
    """
    from normpass.backend.codegen import triton_library

    found = {}
    for launched in launches:
        kernel = launched.kernel
        getattr(kernel, "_init_handles", lambda: None)()  # in others it is loaded when launched
        most = getattr(kernel.metadata, "maxnreg", None)
        if not getattr(kernel, "n_spills", 0) or not most:
            continue
        name = launched.function.__name__
        room = triton_library.REGISTERS // (32 * most * kernel.metadata.num_warps)
        # A thread has no more than so many registers, however few programs there are.
        programs = min(room, card.programs(name, room))
        if programs > 1:
            found[name] = programs - 1
    return found


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
def card_of(device: torch.device) -> Card:
    """What torch tells of a GPU (checked on 2.11 and 2.13)."""
    from normpass.backend.codegen.triton_library import Card

    if device.type != "cuda":
        return Card(INTERPRETED_PROCESSORS, 0, 0)
    told = torch.cuda.get_device_properties(device)
    return Card(
        told.multi_processor_count,
        told.shared_memory_per_multiprocessor,
        getattr(told, "shared_memory_per_block_optin", 0) or told.shared_memory_per_block,
    )
