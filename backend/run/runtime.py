"""Running a region on the CPU: from its text to a kernel, and from tensors to a launch.

What a kernel reads and writes sweeps Python's own code and objects out of the caches: whatever a
launch does in Python costs some ten times what it does in a loop. So all that depends on sizes
alone is prepared once, and the tensors' addresses are taken in C++ (`launch` in normpass.h).

Uses of torch._C._dynamo.guards here were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch._C._dynamo import guards
from torch._inductor.exc import InvalidCxxCompiler
from torch.autograd import profiler

from normpass.backend.program.machine import ELEMENTS_PER_WORKER, machine_of
from normpass.backend.program.sizes import size_classes
from normpass.backend.run import known, toolchain
from normpass.backend.run.caches import private_cache
from normpass.backend.run.layouts import (
    Laid,
    Layout,
    Piece,
    Work,
    lie_as_planned,
    outputs_in,
    reads_what_is_not_there,
    relaid_out,
)
from normpass.backend.run.reference import evaluate
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from normpass.backend.program.sizes import SizeClass

log = logging.getLogger(__name__)


# What Inductor's own code calls for each tensor: ten times cheaper than the same in Python.
empty_strided = guards._empty_strided_cpu  # type: ignore[attr-defined]
reinterpret = guards._reinterpret_tensor  # type: ignore[attr-defined]
DATA_PTR = guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]


NOTHING: Mapping[int, int] = MappingProxyType({})


class Arguments(ctypes.Structure):
    """The structure of this name in normpass.h."""

    _fields_ = (
        ("data_ptr", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("most_workers", ctypes.c_int),
        ("past_caches", ctypes.c_bool),
    )


@dataclass(frozen=True)
class Launch:
    """A kernel for given sizes: call `run` with the tuple of its inputs and outputs, and how many
    threads there are. pieces: the outputs, where some of them are parts of results.
    """

    inputs: tuple[Layout, ...]
    results: tuple[Layout, ...]
    pieces: tuple[Piece, ...]
    run: Callable[[tuple[Tensor, ...], int], None]
    most_workers: int
    past_caches: bool

    def __call__(self, inputs: Sequence[Tensor], over: Mapping[int, int] = NOTHING) -> list[Tensor]:
        """Of tensors that lie as planned. over: the inputs that results are written over, by their
        numbers.
        """
        results = [
            self.written_over(over[k], inputs, want) if k in over else empty_strided(*want)
            for k, want in enumerate(self.results)
        ]
        outputs = outputs_in(results, self.pieces, reinterpret) if self.pieces else results
        self.run((*inputs, *outputs), torch.get_num_threads())
        return results

    def written_over(self, dead: int, inputs: Sequence[Tensor], want: Layout) -> Tensor:
        """A result in the place of an input, whose dimensions may be others."""
        tensor = inputs[dead]
        same = self.inputs[dead] == want
        return tensor if same else reinterpret(tensor, want.shape, want.strides, 0)


class Kernel:
    """A region's kernel for sizes of given classes. Call it with its input tensors and its run-time
    sizes.

    It is printed where this machine's cache does not know it. What cannot be printed was refused
    when the graph was compiled, and what cannot be built is a compiler's or a cache's fault: both
    run unfused, with one warning.
    """

    def __init__(self, text: str, classes: tuple[SizeClass, ...] = ()) -> None:
        self.region = parse(text)
        self.text, self.classes = text, classes
        self._function: ctypes._NamedFuncPointer | None = None
        self._launches: dict[tuple[int, ...], Launch] = {}
        self._failed = False
        try:
            if not self._recalled:  # it is built beside whatever else is; the first call waits
                toolchain.start(self.source)
        except Exception as error:
            self._fail(repr(error))

    @property
    def source(self) -> str:
        """As C++."""
        return print_kernel(self.text, self.classes)

    @cached_property
    def name(self) -> str:
        """What the cache knows it by."""
        return known.name_of(self.text, self.classes, machine_of("cpu"))

    @cached_property
    def _recalled(self) -> known.Facts | None:
        with suppress(InvalidCxxCompiler):  # there was one when the graph was compiled
            return known.recall(self.name)
        return None

    @cached_property
    def facts(self) -> known.Facts:
        """What the cache is to know of it."""
        return self._recalled or self._settled()

    def _settled(self) -> known.Facts:
        facts = known.Facts(toolchain.key_of(self.source), self._overwritable)
        known.remember(self.name, facts)
        return facts

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        launch = self.launch(tuple(sizes))
        if launch is None:
            return evaluate(self.region, inputs, sizes)
        if not lie_as_planned(inputs, launch.inputs):
            inputs = relaid_out(self.region, inputs, launch.inputs)
        return launch(inputs)

    def launch(self, sizes: tuple[int, ...]) -> Launch | None:
        """All of a launch but the tensors; None where the kernel could not be built, or would read
        what is not there.
        """
        launch = self._launches.get(sizes)
        if launch is None and reads_what_is_not_there(self.region, self.region.extents(sizes)):
            return None
        if launch is None and (function := self._function or self._load()):
            launch = self._launches[sizes] = self._prepare(function, sizes)
        return launch

    def over(self, dying: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Of inputs that die with a launch, those that the kernel may write its results over.

        dying: pairs of a result and an input, by their numbers.
        """
        region, found = self.region, dict[int, int]()
        for result, dead in dying:
            allowed = self._overwritable[region.results[result].buffers[0].name]
            if region.inputs[dead].name in allowed and dead not in found.values():
                found.setdefault(result, dead)
        return found

    @cached_property
    def _overwritable(self) -> Mapping[str, Sequence[str]]:
        if self._recalled:
            return self._recalled.overwritable
        from normpass.backend.program.in_place import overwritable
        from normpass.backend.program.plan import make_plan

        found = overwritable(make_plan(self.region, machine_of("cpu"), self.classes))
        return {output: sorted(inputs) for output, inputs in found.items()}

    def library(self) -> ctypes.CDLL:
        """Waits until it is built.

        Raises:
            CompileError: if it cannot be.
        """
        if self._recalled and (library := toolchain.found(self._recalled.library)):
            return library
        # Asked for again, because a forked child does not get what its parent was building.
        library = toolchain.built(self.source)
        self._settled()
        return library

    def _load(self) -> ctypes._NamedFuncPointer | None:
        """The kernel's entry, once it is built; None, with one warning, where that fails."""
        if self._failed:
            return None
        try:
            library = self.library()
            # It takes Python's objects, and lets go of Python itself while the kernel runs.
            function = ctypes.PyDLL(library._name, handle=library._handle).launch
            function.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_int)
            function.restype = None
            self._function = function
        except toolchain.InterruptedBuild:
            pass  # this call goes without: whoever calls next has it built
        except Exception as error:
            self._fail(error)
        return self._function

    def _fail(self, reason: object) -> None:
        self._failed = True
        log.warning(
            "region %s runs unfused: its C++ kernel could not be built: %s "
            "(normpass why kernel-not-built)",
            self.region.name,
            reason,
        )

    def _prepare(self, function: ctypes._NamedFuncPointer, sizes: tuple[int, ...]) -> Launch:
        laid = Laid.of(self.region, sizes)
        work = Work.of(self.region, self.region.extents(sizes))
        workers = max(1, work.elements // ELEMENTS_PER_WORKER)
        # What the workers' own caches cannot keep is written around them: filling a line that is
        # about to be overwritten costs more than its next reader saves, from the last level.
        past_caches = work.traffic > min(torch.get_num_threads(), workers) * private_cache()
        numbers = (ctypes.c_int64 * max(len(sizes), 1))(*sizes)
        arguments = Arguments(DATA_PTR, numbers, workers, past_caches)
        run = partial(function, ctypes.pointer(arguments))
        return Launch(laid.inputs, laid.results, laid.pieces, run, workers, past_caches)


def _after_fork() -> None:
    """Before Python 3.12 a cached property has a lock, which a thread may have held that a forked
    child lacks.
    """
    for each in vars(Kernel).values():
        if isinstance(each, cached_property) and hasattr(each, "lock"):
            each.lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@lru_cache(maxsize=4096)
def print_kernel(text: str, classes: tuple[SizeClass, ...]) -> str:
    """The C++ source of a region's text, for sizes of given classes. Whatever it raises is a fault
    of ours.
    """
    from normpass.backend.codegen import cpp
    from normpass.backend.program.plan import make_plan

    return cpp.generate(make_plan(parse(text), machine_of("cpu"), classes))


@lru_cache(maxsize=4096)
def kernel(text: str, sizes: tuple[int, ...]) -> Kernel:
    """The kernel of a region's text for its run-time sizes."""
    return _kernel(text, size_classes(sizes))


@lru_cache(maxsize=4096)
def _kernel(text: str, classes: tuple[SizeClass, ...]) -> Kernel:
    """It starts to compile at the first call and is kept."""
    return Kernel(text, classes)


def launch(inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    """torch.ops.normpass.region on CPUs without the way through the dispatcher, which costs more
    than the rest of a launch. A profiler sees the operator.
    """
    if profiler._is_profiler_enabled:
        return torch.ops.normpass.region(inputs, sizes, text)
    return kernel(text, tuple(sizes))(inputs, sizes)


class CallSite:
    """One place in Inductor's code that calls a region: `launch`, where tensors are known to lie as
    the text says. What is found at the first call is kept for the later ones.

    dying: pairs of a result and an input that nobody needs after the call, by their numbers.
    """

    def __init__(self, *dying: tuple[int, int]) -> None:
        self.dying = dying
        self.found: tuple[Sequence[int] | None, Launch | None, Mapping[int, int]]
        self.found = None, None, NOTHING

    def __call__(self, inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
        known, ready, over = self.found
        if sizes != known:
            found = kernel(text, tuple(sizes))
            ready = found.launch(tuple(sizes))
            over = found.over(self.dying) if self.dying and ready else NOTHING
            self.found = list(sizes), ready, over
        if ready is None:
            return launch(inputs, sizes, text)
        if profiler._is_profiler_enabled:  # it is to see the operator, and the same memory
            with profiler.record_function("normpass::region"):
                return ready(inputs, over)
        return ready(inputs, over)
