"""Running a region's CUDA C++: from its plan to kernels on a device, and from tensors to launches.

How many teams run at once is the device's answer, so that grids and the arrays of parts are worked
out there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from normpass.backend.codegen import cuda as generator
from normpass.backend.codegen.cuda_names import SHARES
from normpass.backend.program.counts import counted, divide_up
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import symbol
from normpass.backend.program.team import roomier, share_count, team_of
from normpass.backend.run.gpu_kernel import GpuKernel, NotBuiltError, building
from normpass.backend.run.layouts import copied
from normpass.backend.run.prepared import (
    VECTOR,
    Function,
    Launch,
    Launches,
    OfPiece,
    OfTensor,
    Prepared,
    whole,
)
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from normpass.backend.codegen.cuda import CudaSource
    from normpass.backend.program import tree
    from normpass.backend.program.counts import Count
    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass
    from normpass.backend.program.tree import Plan
    from normpass.backend.run.gpu_kernel import Run
    from normpass.backend.run.prepared import Argument
    from normpass.passes.region import Region


class Built(Function, Protocol):
    """A kernel on a device. teams: how many of them run at once. spilled: bytes of registers that a
    thread has in memory.
    """

    teams: int
    spilled: int


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
        builder: Callable[[CudaSource, torch.device], Mapping[str, Built]],
        otherwise: Callable[[], GpuKernel],
    ) -> None:
        super().__init__(region)
        self.plan = make_plan(region, machine, classes)
        self.source = generator.generate(self.plan)
        self.builder, self.otherwise = builder, otherwise
        self._calls: dict[int | None, Calls] = {}  # by device
        self._other: GpuKernel | None = None

    def _prepare(self, sizes: tuple[int, ...], device: torch.device) -> Run:
        with building():
            return self._calls_on(device).prepare(sizes, device)

    def _launches(self, sizes: Sequence[Count], device: torch.device) -> Launches:
        try:
            with building():
                return self._calls_on(device).launches(sizes)
        except NotBuiltError as error:
            self._fail(error.args[0])
            return self._instead().launches(sizes, device)

    def _calls_on(self, device: torch.device) -> Calls:
        if device.index not in self._calls:
            self._calls[device.index] = self._built(device)
        return self._calls[device.index]

    def _built(self, device: torch.device) -> Calls:
        """The kernels on a device. Those whose registers do not suffice are built again for teams
        that have more.
        """
        others: dict[int, tree.Launch] = {}
        source = self.source
        while True:
            functions = self.builder(source, device)
            spilling = [k for k in source.kernels if functions[k.name].spilled]
            found = {k.number: other for k in spilling if (other := roomier(k.launch))}
            if not found:
                return Calls(self.plan, source, functions)
            others |= found
            source = generator.generate(self.plan, others)

    def without(self, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if not self._failed:  # nothing can be launched for these sizes
            return super().without(inputs, sizes)
        return self._instead()(inputs, sizes)

    def _instead(self) -> GpuKernel:
        self._other = self._other or self.otherwise()
        return self._other


class Calls:
    """What a region's launches on a device take, for any sizes. aligned: for each tensor, to how
    many bytes it has to be; None where any address will do.
    """

    def __init__(self, plan: Plan, source: CudaSource, functions: Mapping[str, Built]) -> None:
        self.plan, self.source, self.functions = plan, source, functions
        region = plan.region
        buffers = [*region.inputs, *(output.buffer for output in region.outputs)]
        self.tensors = {f"p_{buffer.name}": OfTensor(k) for k, buffer in enumerate(buffers)}
        self.aligned = [self._alignment(buffer.name) for buffer in region.inputs]
        self.aligned += [None] * len(region.outputs)  # new tensors, which are

    def _alignment(self, name: str) -> int | None:
        """Of an input that is read along rows."""
        found = [
            VECTOR if load in team.bulk else team.lanes * load.access.buffer.dtype.itemsize
            for launch in (kernel.launch for kernel in self.source.kernels)
            for team in (team_of(launch),)
            for load in (*team.in_vectors, *launch.held)
            if load.access.buffer.name == name
        ]
        return min(max(found), VECTOR) if found else None

    def launches(self, sizes: Sequence[Count]) -> Launches:
        """The launches for some sizes, or for what stands for them."""
        known = dict(zip(self.plan.region.runtime_sizes, sizes, strict=True))
        symbols = {symbol(name): size for name, size in known.items()}
        lengths = {axis.name: counted(axis.extent, symbols) for axis in self.plan.axes}
        arguments: dict[str, Argument] = {**self.tensors}
        arguments |= {f"n_{name}": size for name, size in known.items()}
        launches: list[Launch] = []
        size: Count = 0
        for kernel in self.source.kernels:
            function, launch = self.functions[kernel.name], kernel.launch
            outer = {axis.name: lengths[axis.name] for axis in launch.outer}
            shares = share_count(launch, outer, function.teams)
            arguments[SHARES] = shares
            for space in launch.workspaces:
                count = product(lengths[axis] for axis in space.axes)
                kind = "kept"
                if space.is_shared_sum:
                    kind = "parts"
                    parts = shares * product(
                        outer[a] for a in outer.keys() - {*launch.blocks.shares, *space.axes}
                    )
                    arguments[f"n_parts_{space.value}"] = parts
                    count *= parts
                arguments[f"{kind}_{space.value}"] = OfPiece(size)
                size += whole(count * team_of(launch).width)
            if (blocks := blocks_of(launch, outer, shares)) != 0:
                taken = tuple(arguments[name] for name in kernel.arguments)
                launches.append(Launch(function, blocks, taken))
        return Launches(launches, size)

    def prepare(self, sizes: tuple[int, ...], device: torch.device) -> Prepared:
        """A call for some sizes."""
        launches, size = self.launches(sizes)

        def copied_first(tensors: Sequence[Tensor]) -> None:
            pairs = zip(tensors, self.aligned, strict=True)
            copies = [t if to is None else aligned(t, to) for t, to in pairs]
            prepared.launch([tensor.data_ptr() for tensor in copies])

        prepared = Prepared(launches, len(self.tensors), size, device, copied_first)
        return prepared


def blocks_of(launch: tree.Launch, outer: Mapping[str, Count], shares: Count) -> Count:
    """A launch's grid. outer: the lengths of its outer axes."""
    team, blocks = team_of(launch), launch.blocks
    if launch.inner:
        others = outer.keys() - set(blocks.shares)
        tiles = product(divide_up(outer[axis], blocks.size[axis]) for axis in others)
        return (shares if blocks.shares else 1) * tiles * team.blocks
    at_a_time = team.threads // launch.blocks.parts
    return divide_up(product(outer.values()), at_a_time)


def aligned(tensor: Tensor, to: int) -> Tensor:
    """The tensor, or a copy that begins at a multiple of so many bytes."""
    return copied(tensor, tensor.stride()) if tensor.data_ptr() % to else tensor
