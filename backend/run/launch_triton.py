"""Running a region on a GPU: from its text to a Triton module, and from tensors to launches.

Under TRITON_INTERPRET=1 the same code runs on CPU tensors, for tests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from dataclasses import replace
from functools import lru_cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.codegen import triton as generator
from normpass.backend.program.machine import GPU, Machine
from normpass.backend.program.plan import make_plan
from normpass.backend.run.gpu_kernel import GpuKernel
from normpass.backend.run.toolchain import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import Tensor

    from normpass.backend.codegen.triton_library import Card
    from normpass.backend.program.sizes import SizeClass
    from normpass.passes.region import Region


log = logging.getLogger(__name__)

# Without a GPU, as many programs share the rows as if there were so many multiprocessors.
INTERPRETED_PROCESSORS = 3


class TritonKernel(GpuKernel):
    """A region's Triton module for sizes of given classes.

    Raises:
        UnsupportedPlanError: if there is no Triton form of the region's plan.
    """

    dialect = "Triton"

    def __init__(
        self, region: Region, machine: Machine = GPU, classes: tuple[SizeClass, ...] = ()
    ) -> None:
        super().__init__(region)
        self.source = generator.generate(make_plan(region, machine, classes))

    def _first(self, tensors: list[Tensor], sizes: Sequence[int], device: torch.device) -> bool:
        """The first call on a device builds the kernels before it launches any.

        Kernels whose registers do not suffice are built again for fewer programs at once, and those
        that turn out to take more than the device has, to fetch nothing ahead.
        """
        from triton.runtime.errors import TritonError

        card = card_of(device)
        found: Exception | None = None
        for given in (card, replace(card, of_program=0)):
            try:
                run = load(self.source.text).run
                built = build(run, tensors, sizes, given)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return self._fail(error)
            try:
                while crowded := _crowded(built, given):
                    given = replace(given, fitting={**given.fitting, **crowded})
                    built = build(run, tensors, sizes, given)
                run(tensors, sizes, given)
            except TritonError as error:  # more shared memory or registers than the device has
                found = error
                continue
            self._launch[tensors[0].device.index] = partial(run, card=given)
            return True
        return self._fail(found)


def build(
    run: Callable[..., None], tensors: list[Tensor], sizes: Sequence[int], card: Card
) -> list[_Build]:
    """Compiles every kernel that `run`, a generated module's, launches with these arguments, and
    launches none.

    `warmup` of Triton's JIT functions (checked on 3.6 and 3.9) does that for one. Here `run` is
    called with functions in their place that do it when they are launched. Triton's interpreter
    has nothing to compile.
    """
    from triton.runtime.jit import JITFunction

    names = run.__globals__
    builds = {k: _Build(v) for k, v in names.items() if isinstance(v, JITFunction)}
    if builds:
        FunctionType(run.__code__, {**names, **builds})(tensors, sizes, card)
    return [build for build in builds.values() if build.kernel is not None]


class _Build:
    """Stands for a kernel: launched, it is compiled. kernel: to what."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.kernel: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile(*args: Any, **options: Any) -> None:
            self.kernel = self.function.warmup(*args, grid=grid, **options)

        return compile


def _crowded(builds: Sequence[_Build], card: Card) -> dict[str, int]:
    """The kernels that spill registers, and for how many programs at once they are to be built
    instead: one fewer than those that share a multiprocessor's now. How many bytes a thread spills
    Triton knows when a kernel is loaded (`n_spills`, checked on 3.6 and 3.9).
    """
    from normpass.backend.codegen import triton_library

    found = {}
    for build in builds:
        kernel = build.kernel
        getattr(kernel, "_init_handles", lambda: None)()  # in others it is loaded when launched
        most = getattr(kernel.metadata, "maxnreg", None)
        if not getattr(kernel, "n_spills", 0) or not most:
            continue
        name = build.function.__name__
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
