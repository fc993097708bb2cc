"""Launches on a GPU of which all that depends on sizes alone is worked out: grids, integers, and
where arrays lie in one piece of memory for all of them.

A call then takes the addresses of tensors and of that piece. The arguments of all launches lie in
one array of cells, 8 bytes each, and a launch is given where those lie that it takes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from normpass.backend.program.counts import divide_up
from normpass.backend.run.gpu_place import memory_of, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from normpass.backend.program.counts import Count

    Parameters = ctypes.Array[ctypes.c_void_p]

# Where arrays begin: at a sector of memory.
SECTOR = 256
# Where tensors begin that kernels read and write in vectors.
VECTOR = 16


class Function(Protocol):
    """A kernel on a device."""

    def __call__(self, blocks: int, parameters: Parameters, stream: ctypes.c_void_p) -> None:
        """Launches it. parameters: where its arguments lie; of each it reads as many bytes as it
        has.
        """


@dataclass(frozen=True)
class OfTensor:
    """An argument: the address of a tensor, by its number among inputs and outputs."""

    number: int


@dataclass(frozen=True)
class OfPiece:
    """An argument: an address in the piece of memory, by bytes from its beginning."""

    offset: Count


if TYPE_CHECKING:
    Argument = Count | OfTensor | OfPiece


class Launch(NamedTuple):
    """A kernel, its grid, and its arguments."""

    function: Function
    blocks: Count
    arguments: tuple[Argument, ...]


class Launches(NamedTuple):
    """All launches of a region, and the bytes of the piece of memory that their arrays lie in:
    numbers for sizes that are known, and expressions of those that are not.
    """

    launches: Sequence[Launch]
    size: Count


class Prepared:
    """Launches for given sizes. Call it with the region's inputs and outputs.

    tensors: how many there are. size: of the piece of memory, in bytes. otherwise: what runs where
    a tensor does not begin where vectors do.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        tensors: int,
        size: int,
        device: torch.device,
        otherwise: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.launches, self.size, self.otherwise = launches, size, otherwise
        self._piece = (size,), (1,), torch.uint8
        self._new, self._stream = memory_of(device), stream_of(device)
        arguments = {argument for launch in launches for argument in launch.arguments}
        self._offsets = sorted(each.offset for each in arguments if isinstance(each, OfPiece))
        self._cells: list[int | OfTensor | OfPiece] = [
            *map(OfTensor, range(tensors)),
            *map(OfPiece, self._offsets),
            *(each for each in arguments if isinstance(each, int)),
        ]
        self._spare: list[Cells] = []

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if reduce(or_, addresses) % VECTOR:
            self.otherwise(tensors)
        else:
            self.launch(addresses)

    def launch(self, addresses: list[int]) -> None:
        """addresses: of the tensors."""
        if self.size:
            piece = self._new(*self._piece)
            begin = piece.data_ptr()
            addresses = [*addresses, *[begin + offset for offset in self._offsets]]
        try:  # other threads have others
            cells = self._spare.pop()
        except IndexError:
            cells = Cells(self._cells, self.launches)
        cells.values[: len(addresses)] = addresses
        stream = ctypes.c_void_p(self._stream())
        for launch, parameters in zip(self.launches, cells.parameters, strict=True):
            launch.function(launch.blocks, parameters, stream)
        self._spare.append(cells)


class Cells:
    """Memory for the arguments of all launches. parameters: where those of each launch lie."""

    def __init__(
        self, cells: Sequence[int | OfTensor | OfPiece], launches: Sequence[Launch]
    ) -> None:
        numbers = [cell if isinstance(cell, int) else 0 for cell in cells]
        self.values: Any = (ctypes.c_int64 * max(len(cells), 1))(*numbers)
        first, each = ctypes.addressof(self.values), ctypes.sizeof(ctypes.c_int64)
        at = {cell: first + k * each for k, cell in enumerate(cells)}
        self.parameters: list[Parameters] = [
            (ctypes.c_void_p * len(launch.arguments))(*(at[x] for x in launch.arguments))
            for launch in launches
        ]


def whole(size: Count) -> Count:
    """Bytes of an array of so many, up to where the next one begins."""
    return divide_up(size, SECTOR) * SECTOR
