"""What a generated Triton module launches for given sizes, found without launching it.

Its `run` is called with others in place of tensors, memory and kernels. A kernel that is launched
then is compiled (`warmup` of Triton's JIT functions), and its grid and arguments are kept, so that
NVIDIA's driver can be given them at every call. Triton's own launcher works out the type of every
argument anew each time, which takes longer than a small kernel runs.

Uses of Triton here were checked on 3.6 and 3.9.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from normpass.backend.program.counts import divide_up
from normpass.backend.program.sizes import Sizes
from normpass.backend.run.cuda_launch import Binary, Loaded
from normpass.backend.run.prepared import Launch, Launches, OfPiece, OfTensor, Prepared, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from normpass.backend.codegen.triton_library import Card
    from normpass.backend.program.counts import Count
    from normpass.backend.program.sizes import SizeClass

WARP = 32
# Integers that fit 32 bits, and 64 alone, which are odd and not 1.
NARROW, WIDE = 3, 2**33 + 1
# Arguments that a kernel has after its own: memory that it may ask for, global and of a profiler.
SCRATCH = (0, 0)


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor, or an array in a piece of memory. begin: an address such as it has; all
    but some outputs that are parts of results begin where vectors do.
    """

    argument: OfTensor | OfPiece
    dtype: torch.dtype
    device: torch.device
    begin: int = 0

    def data_ptr(self) -> int:
        return self.begin

    def view(self, dtype: torch.dtype) -> Slot:
        return replace(self, dtype=dtype)


class _Memory:
    """Stands for the torch of a module: its arrays lie in a piece of memory. size: of that."""

    def __init__(self) -> None:
        self.size: Count = 0

    def empty(self, count: Count, *, dtype: torch.dtype, device: torch.device) -> Slot:
        slot = Slot(OfPiece(self.size), dtype, device)
        self.size += whole(count * dtype.itemsize)
        return slot

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Triton:
    """Stands for the triton of a module: it counts in whatever stands for sizes."""

    cdiv = staticmethod(divide_up)


class Launched(NamedTuple):
    """A launch. function: Triton's; kernel: what it was compiled to."""

    function: Any
    kernel: Any
    grid: tuple[Count, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Recording(NamedTuple):
    """All launches, and the size in bytes of the piece of memory that their arrays lie in."""

    launches: list[Launched]
    size: Count


def record(
    run: Callable[..., None],
    slots: Sequence[Slot],
    sizes: Sequence[Count],
    classes: Sequence[SizeClass],
    card: Card,
) -> Recording:
    """Compiles every kernel that `run`, a generated module's, launches, and launches none.

    slots: of its tensors. sizes: of the run, or what stands for them, which are of these classes,
    or any where there are none. Triton's interpreter has nothing to compile, and nothing is
    recorded.
    """
    names = run.__globals__
    found: list[Launched] = []
    like = Examples(Sizes(dict(zip(sizes, classes, strict=True)) if classes else {}))
    kernels = {k: _Kernel(v, found, like) for k, v in names.items() if _is_kernel(v)}
    memory = _Memory()
    if kernels:
        stand_ins = {**kernels, "torch": memory, "triton": _Triton}
        FunctionType(run.__code__, {**names, **stand_ins})(slots, sizes, card)
    return Recording(found, memory.size)


def _is_kernel(value: object) -> bool:
    from triton.runtime.jit import JITFunction

    return isinstance(value, JITFunction)


@dataclass(frozen=True)
class Examples:
    """Integers for expressions of sizes, as good as any that those can be: Triton compiles for how
    wide an integer is, for 1, and for multiples of 16. sizes: what is known of them.
    """

    sizes: Sizes

    def __call__(self, argument: Any) -> Any:
        if not isinstance(argument, sympy.Expr):
            return argument
        most = self.sizes.most(argument)
        is_narrow = most is not None and most < 2**31
        return abs(self.sizes.divisor(argument)) * (NARROW if is_narrow else WIDE)


class _Kernel:
    """Stands for a kernel: launched, it is compiled and noted. like: what it is compiled for in an
    argument's stead.
    """

    def __init__(self, function: Any, found: list[Launched], like: Examples) -> None:
        self.function, self.found, self.like = function, found, like

    def __getitem__(self, grid: tuple[Count, ...]) -> Callable[..., None]:
        def note(*arguments: Any, **options: Any) -> None:
            given = map(self.like, arguments)
            kernel = self.function.warmup(*given, grid=(1,), **options)
            self.found.append(Launched(self.function, kernel, grid, arguments, options))

        return note


def prepared(
    recording: Recording,
    tensors: int,
    device: torch.device,
    otherwise: Callable[[Sequence[Tensor]], None],
) -> Prepared | None:
    """A call of NVIDIA's driver; None where Triton's own launcher does more than that.

    tensors, otherwise: as `Prepared` has them.
    """
    found = launches(recording)
    return found and Prepared(found.launches, tensors, found.size, device, otherwise)


def launches(recording: Recording) -> Launches | None:
    """The launches for NVIDIA's driver; None where Triton's own launcher does more than that."""
    if torch.version.hip or not all(_is_plain(each.kernel) for each in recording.launches):
        return None
    found = [_launch(each) for each in recording.launches if 0 not in each.grid]
    return Launches(found, recording.size)


# What Triton's launcher provides for, where a kernel asks for it.
_BESIDES = (
    "global_scratch_size",
    "profile_scratch_size",
    "launch_cooperative_grid",
    "launch_pdl",
    "gsan",
)


def _is_plain(kernel: Any) -> bool:
    """Whether a compiled kernel is loaded and launched as any other of NVIDIA's."""
    metadata = kernel.metadata
    return (
        isinstance(kernel.function, int)
        and metadata.target.backend == "cuda"
        and metadata.num_ctas == 1
        and not any(getattr(metadata, name, None) for name in _BESIDES)
    )


def _launch(launched: Launched) -> Launch:
    kernel = launched.kernel
    threads = WARP * kernel.metadata.num_warps
    binary = Binary(kernel.asm["cubin"], kernel.metadata.name)
    function = Loaded(kernel.function, threads, kernel.metadata.shared, binary, owner=kernel)
    (blocks,) = launched.grid
    kinds = kernel.src.signature.values()
    given = (
        argument.argument if isinstance(argument, Slot) else argument
        for argument, kind in zip(launched.arguments, kinds, strict=True)
        if kind != "constexpr"
    )
    return Launch(function, blocks, (*given, *SCRATCH))
