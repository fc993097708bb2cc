"""Running a region's CUDA C++: from its plan to kernels on a device, and from tensors to launches.

All that depends on sizes alone, grids, and where arrays lie in one piece of memory for all of them,
is worked out once. A launch then takes the addresses of tensors and of that piece.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from normpass.backend.codegen import cuda as generator
from normpass.backend.codegen.cuda_names import SHARES
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import symbol
from normpass.backend.program.teams import roomier, share_count, team_of
from normpass.backend.run.gpu_kernel import GpuKernel
from normpass.backend.run.layouts import copied
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from normpass.backend.codegen.cuda import CudaSource
    from normpass.backend.codegen.cuda_names import Kernel
    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass
    from normpass.backend.program.tree import Launch, Plan
    from normpass.passes.region import Region

# Where arrays begin: at a sector of memory, and where no read of 16 bytes is in two of them.
ALIGNED = 256


class Function(Protocol):
    """A kernel on a device. teams: how many of them run at once. spilled: bytes of registers that a
    thread has in memory.
    """

    teams: int
    spilled: int

    def __call__(self, blocks: int, arguments: Sequence[int]) -> None:
        """Launches it on the current stream. arguments: 8 bytes each."""


class Call(NamedTuple):
    """A launch for given sizes. blocks: its grid. tensors, spaces: which arguments are addresses
    of tensors, by number, or in the piece of memory, by bytes from its beginning. arguments: all of
    them, with the others in place.
    """

    function: Function
    blocks: int
    tensors: tuple[tuple[int, int], ...]
    spaces: tuple[tuple[int, int], ...]
    arguments: tuple[int, ...]

    def __call__(self, addresses: Sequence[int], memory: int) -> None:
        arguments = [*self.arguments]
        for k, tensor in self.tensors:
            arguments[k] = addresses[tensor]
        for k, offset in self.spaces:
            arguments[k] = memory + offset
        self.function(self.blocks, arguments)


class CudaKernel(GpuKernel):
    """A region's kernels in CUDA C++ for sizes of given classes. builder: makes functions of a
    module for a device, by name. otherwise: what runs the region where that cannot be done.

    Raises:
        UnsupportedPlanError: if there is no CUDA C++ of the region's plan.
    """

    dialect, instead = "CUDA", "in Triton"

    def __init__(
        self,
        region: Region,
        machine: Machine,
        classes: tuple[SizeClass, ...],
        builder: Callable[[CudaSource, torch.device], Mapping[str, Function]],
        otherwise: Callable[[], GpuKernel],
    ) -> None:
        super().__init__(region)
        self.plan = make_plan(region, machine, classes)
        self.source = generator.generate(self.plan)
        self.builder, self.otherwise = builder, otherwise
        self._other: GpuKernel | None = None

    def _first(self, tensors: list[Tensor], sizes: Sequence[int], device: torch.device) -> bool:
        try:
            calls = self._built(device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return self._fail(error)
        launch = self._launch[device.index] = partial(self._run, calls)
        launch(tensors, sizes)
        return True

    def _built(self, device: torch.device) -> Calls:
        """The kernels on a device. Those whose registers do not suffice are built again for teams
        that have more.
        """
        others: dict[int, Launch] = {}
        source = self.source
        while True:
            functions = self.builder(source, device)
            spilling = [k for k in source.kernels if functions[k.name].spilled]
            found = {k.number: other for k in spilling if (other := roomier(k.launch))}
            if not found:
                return Calls(self.plan, source, functions)
            others |= found
            source = generator.generate(self.plan, others)

    def _run(self, calls: Calls, tensors: list[Tensor], sizes: Sequence[int]) -> None:
        found = calls.of(tuple(sizes))
        tensors = [
            t if at is None else aligned(t, at)
            for t, at in zip(tensors, calls.aligned, strict=True)
        ]
        memory = 0
        if found.bytes:
            piece = torch.empty(found.bytes, dtype=torch.uint8, device=tensors[0].device)
            memory = piece.data_ptr()
        addresses = [tensor.data_ptr() for tensor in tensors]
        for call in found.calls:
            call(addresses, memory)

    def _without(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if not self._failed:  # nothing can be launched for these sizes
            return super()._without(inputs, sizes)
        self._other = self._other or self.otherwise()
        return self._other(inputs, sizes)


class Prepared(NamedTuple):
    """All launches for given sizes, and bytes of the piece of memory that they share."""

    calls: tuple[Call, ...]
    bytes: int


class Calls:
    """A kernel's launches on one device, by run-time sizes. aligned: for each tensor, to how many
    bytes it has to be; None where any address will do.
    """

    def __init__(self, plan: Plan, source: CudaSource, functions: Mapping[str, Function]) -> None:
        self.plan, self.source, self.functions = plan, source, functions
        region = plan.region
        buffers = [*region.inputs, *(output.buffer for output in region.outputs)]
        self.numbers = {f"p_{buffer.name}": k for k, buffer in enumerate(buffers)}
        self.aligned = [self._alignment(buffer.name) for buffer in region.inputs]
        self.aligned += [None] * len(region.outputs)  # new tensors, which are
        self._prepared: dict[tuple[int, ...], Prepared] = {}

    def _alignment(self, name: str) -> int | None:
        """Of an input that is read along rows."""
        found = [
            team_of(kernel.launch).lanes * load.access.buffer.dtype.itemsize
            for kernel in self.source.kernels
            for load in (*team_of(kernel.launch).staged, *kernel.launch.held)
            if load.access.buffer.name == name
        ]
        return min(max(found), 16) if found else None

    def of(self, sizes: tuple[int, ...]) -> Prepared:
        """The launches for some sizes."""
        found = self._prepared.get(sizes)
        if found is None:
            found = self._prepared[sizes] = self._prepare(sizes)
        return found

    def _prepare(self, sizes: tuple[int, ...]) -> Prepared:
        known = dict(zip(self.plan.region.runtime_sizes, sizes, strict=True))
        symbols = {symbol(name): size for name, size in known.items()}
        lengths = {axis.name: int(axis.extent.subs(symbols)) for axis in self.plan.axes}
        integers = {f"n_{name}": size for name, size in known.items()}
        spaces: dict[str, int] = {}
        calls, size = [], 0
        for kernel in self.source.kernels:
            function, launch = self.functions[kernel.name], kernel.launch
            outer = {axis.name: lengths[axis.name] for axis in launch.outer}
            shares = share_count(launch, outer, function.teams)
            integers[SHARES] = shares
            for space in launch.workspaces:
                count = product(lengths[axis] for axis in space.axes)
                kind = "kept"
                if space.is_shared_sum:
                    kind = "parts"
                    parts = shares * product(
                        outer[a] for a in outer.keys() - {*launch.blocks.shares, *space.axes}
                    )
                    integers[f"n_parts_{space.value}"] = parts
                    count *= parts
                spaces[f"{kind}_{space.value}"] = size
                size += -(-count * team_of(launch).width // ALIGNED) * ALIGNED
            calls.append(
                self._call(kernel, function, blocks_of(launch, outer, shares), spaces, integers)
            )
        return Prepared(tuple(call for call in calls if call.blocks), size)

    def _call(
        self,
        kernel: Kernel,
        function: Function,
        blocks: int,
        spaces: Mapping[str, int],
        integers: Mapping[str, int],
    ) -> Call:
        names = list(enumerate(kernel.arguments))
        return Call(
            function,
            blocks,
            tuple((k, self.numbers[name]) for k, name in names if name in self.numbers),
            tuple((k, spaces[name]) for k, name in names if name in spaces),
            tuple(integers.get(name, 0) for name in kernel.arguments),
        )


def blocks_of(launch: Launch, outer: Mapping[str, int], shares: int) -> int:
    """A launch's grid. outer: the lengths of its outer axes."""
    team, of_rows = team_of(launch), launch.blocks.shares
    if of_rows:
        tiles = product(n for axis, n in outer.items() if axis not in of_rows)
        return shares * tiles * team.blocks
    at_a_time = team.threads // launch.blocks.parts
    return -(-product(outer.values()) // at_a_time)


def aligned(tensor: Tensor, to: int) -> Tensor:
    """The tensor, or a copy that begins at a multiple of so many bytes."""
    return copied(tensor, tensor.stride()) if tensor.data_ptr() % to else tensor
