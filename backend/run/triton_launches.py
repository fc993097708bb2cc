"""What a generated Triton module launches for given sizes, found without launching it.

Its `run` is called with others in place of tensors, memory and kernels. A kernel that is launched
then is compiled (`warmup` of Triton's JIT functions), and its grid and arguments are kept, so that
NVIDIA's driver can be given them at every call. Triton's own launcher works out the type of every
argument anew each time, which takes longer than a small kernel runs.

Uses of Triton here were checked on 3.6 and 3.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from normpass.backend.run.cuda_launch import Loaded
from normpass.backend.run.prepared import Launch, OfPiece, OfTensor, Prepared, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from normpass.backend.codegen.triton_library import Card

WARP = 32
# Arguments that a kernel has after its own: memory that it may ask for, global and of a profiler.
SCRATCH = (0, 0)


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor, or an array in a piece of memory. They begin where vectors do."""

    argument: OfTensor | OfPiece
    dtype: torch.dtype
    device: torch.device

    def data_ptr(self) -> int:
        return 0

    def view(self, dtype: torch.dtype) -> Slot:
        return Slot(self.argument, dtype, self.device)


class _Memory:
    """Stands for the torch of a module: its arrays lie in a piece of memory. size: of that."""

    def __init__(self) -> None:
        self.size = 0

    def empty(self, count: int, *, dtype: torch.dtype, device: torch.device) -> Slot:
        slot = Slot(OfPiece(self.size), dtype, device)
        self.size += whole(count * dtype.itemsize)
        return slot

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Launched(NamedTuple):
    """A launch. function: Triton's; kernel: what it was compiled to."""

    function: Any
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Recording(NamedTuple):
    """All launches, and the size in bytes of the piece of memory that their arrays lie in."""

    launches: list[Launched]
    size: int


def record(
    run: Callable[..., None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    sizes: Sequence[int],
    card: Card,
) -> Recording:
    """Compiles every kernel that `run`, a generated module's, launches, and launches none.

    dtypes: of its tensors. Triton's interpreter has nothing to compile, and nothing is recorded.
    """
    names = run.__globals__
    found: list[Launched] = []
    kernels = {k: _Kernel(v, found) for k, v in names.items() if _is_kernel(v)}
    memory = _Memory()
    if kernels:
        slots = [Slot(OfTensor(k), dtype, device) for k, dtype in enumerate(dtypes)]
        recorder = FunctionType(run.__code__, {**names, **kernels, "torch": memory})
        recorder(slots, sizes, card)
    return Recording(found, memory.size)


def _is_kernel(value: object) -> bool:
    from triton.runtime.jit import JITFunction

    return isinstance(value, JITFunction)


class _Kernel:
    """Stands for a kernel: launched, it is compiled and noted."""

    def __init__(self, function: Any, found: list[Launched]) -> None:
        self.function, self.found = function, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def note(*arguments: Any, **options: Any) -> None:
            kernel = self.function.warmup(*arguments, grid=grid, **options)
            self.found.append(Launched(self.function, kernel, grid, arguments, options))

        return note


def prepared(
    recording: Recording,
    tensors: int,
    device: torch.device,
    otherwise: Callable[[Sequence[Tensor]], None],
) -> Prepared | None:
    """The launches for NVIDIA's driver; None where Triton's own launcher does more than that.

    tensors, otherwise: as `Prepared` has them.
    """
    if torch.version.hip or not all(_is_plain(each.kernel) for each in recording.launches):
        return None
    launches = [_launch(each) for each in recording.launches if all(each.grid)]
    return Prepared(launches, tensors, recording.size, device, otherwise)


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
    function = Loaded(kernel.function, threads, kernel.metadata.shared, owner=kernel)
    (blocks,) = launched.grid
    kinds = kernel.src.signature.values()
    given = (
        argument.argument if isinstance(argument, Slot) else argument
        for argument, kind in zip(launched.arguments, kinds, strict=True)
        if kind != "constexpr"
    )
    return Launch(function, blocks, (*given, *SCRATCH))
