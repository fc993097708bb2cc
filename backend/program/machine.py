"""What a program has to know of the machine it is for."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import cache

import torch

# Below this many elements a second worker of a CPU costs more than it brings.
ELEMENTS_PER_WORKER = 16 * 1024


@dataclass(frozen=True)
class Tiling:
    """The numbers behind the choices. A multiprocessor has 64 Ki registers of 32 bits and holds 64
    warps.

    resident: registers that a program may spend on what it holds of its row; beyond it streams.
    sums: those that it may spend on sums along a row that it reads again in each phase, and on what
    is the same for all rows. staged: bytes of such a row in all phases that are fetched while the
    one before is computed; without that the loads of all pieces would come first, and spill.
    pieces: at most so many blocks of a row are gone through one after another in a kernel's text,
    each of a piece at least, or beside such sums of a long_piece.
    tile: elements that a program of short rows works on at a time.
    chunk: elements that a program of long rows works on at a time.
    lanes: elements along the vector axis where that is divided among programs.
    narrow: the same where the program also owns a local axis; 32 floats are a cache line.
    combining: so many programs combine partial results, if each has a sector of elements at least.
    sector: floats that memory hands out at a time.
    kept: an axis of at most so many elements is held rather than streamed, if an array runs along
    it. per_thread: registers for each thread of one value of a block. warps: of one program at
    most, so that each thread has registers enough, and for each multiprocessor, where rows are
    shared out among as many programs as run at once."""

    resident: int = 40 * 1024
    sums: int = 48 * 1024
    staged: int = 136 * 1024
    pieces: int = 8
    piece: int = 256
    long_piece: int = 2048
    tile: int = 2048
    chunk: int = 4096
    lanes: int = 128
    narrow: int = 32
    combining: int = 128
    sector: int = 8
    kept: int = 64
    per_thread: int = 16
    warps: int = 16


@dataclass(frozen=True)
class Clusters:
    """The numbers behind teams (team.py), of one kind of GPU.

    blocks: of a cluster at most. shared: bytes of shared memory that a block can have. memory: the
    same of a multiprocessor, of which the system keeps some for each block. threads: of a block at
    most, so that each has registers enough. of_thread: bytes of a row, as numbers that are computed
    with, that a thread has. registers: those that it may spend on sums that it adds rows to. warps:
    of a multiprocessor. bulk: whether one copy brings all that a block has of a row, where it can.
    """

    blocks: int
    shared: int
    memory: int
    system: int = 1024
    threads: int = 512
    of_thread: int = 128
    registers: int = 64
    warps: int = 16
    bulk: bool = False


@dataclass(frozen=True)
class Blocking:
    """The numbers behind axes in blocks (blocks.py, sweeps.py). Those given here are for a CPU's
    caches of 32 KiB and 1 MiB.

    long_row: rows of at least so many elements are divided among workers if they are few.
    row_bytes: rows whose tensors take more have left a core's caches when they are read again.
    row_block: least and most elements of a block of a row: long enough for memory to be read as a
    stream, short enough for sums along it to stay in first-level cache. From 1024 to 4096 there was
    no difference. narrow: so many lanes are few, and their rows are added up in registers. Measured
    for a batch norm of 16 channels: 1.4x as fast as adding each row to an array in memory, with
    blocks of 256 to 4096 rows; of 64 channels 0.7x. column_block: least and most rows of a block
    that lanes add up: more would lose digits (CASCADE in normpass.h). sweep: bytes of what is
    reduced twice that are found again in a worker's caches. sweep_block: bytes of a block of more,
    in cache for its second reduction. least: numbers that a block has at least for each that it
    leaves.
    """

    long_row: int = 32 * 1024
    row_bytes: int = 1024 * 1024
    row_block: tuple[int, int] = (512, 2048)
    narrow: int = 32
    column_block: tuple[int, int] = (64, 256)
    sweep: int = 512 * 1024
    sweep_block: int = 128 * 1024
    least: int = 32


@dataclass(frozen=True)
class Machine:
    """What a plan has to know of the machine it is for.

    workers: fewer independent pieces of work than this do not fill it.
    kept: kept rows beyond this many elements would push the row itself out of cache. regroups:
    whether its kernels can look at an array by other axes. partial: where more sums than this are
    added up side by side, each worker has some of them whole rather than a part of all.
    has_vectors: whether loops go a vector of a register's lanes at a time. whole_lines: whether a
    vector of float32 is a line of memory. blocking: of axes that loops go through twice. tiling: of
    programs that work on blocks. clusters: of those whose threads are told apart, in CUDA C++.
    columns: whether workers divide the lanes where nothing else is parallel, and go down the rows.
    """

    workers: int
    kept: int
    partial: float = math.inf
    regroups: bool = False
    has_vectors: bool = False
    whole_lines: bool = True
    blocking: Blocking | None = None
    tiling: Tiling | None = None
    clusters: Clusters | None = None
    columns: bool = False


CPU = Machine(
    workers=8,
    kept=64 * 1024,
    partial=16 * 1024,
    regroups=True,
    has_vectors=True,
    blocking=Blocking(),
)
# Memory between phases is dearer than any function there; what fits in registers is not computed
# twice anyway. The rows that all programs work on stay in a second-level cache of 50 MB if one is
# of row_bytes; in registers a row of 40 Ki numbers does (Tiling.resident). A block of a row is
# one of a program's chunks at most. However many lanes there are, a program has a few of them.
GPU = Machine(
    workers=256,
    kept=0,
    blocking=Blocking(
        row_bytes=192 * 1024,
        row_block=(128, 4096),
        narrow=sys.maxsize,
        sweep=48 * 1024 * 4,
        sweep_block=4096 * 4,
    ),
    tiling=Tiling(),
)


# KiB of shared memory that a block of a GPU can have, by its capability; others may have less.
SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
LEAST_SHARED_KIB = 99
# From this capability on blocks form clusters, and copies are told of by barriers.
LEAST_CLUSTERED = 90


@cache
def cuda_machine(capability: int, *, columns: bool = False, bulk: bool = False) -> Machine:
    """The machine that CUDA C++ is planned for. A row that a team holds on chip needs no blocks;
    one that it does not hold is not for teams.

    capability: of the GPU, 80 for 8.0; from 90 on blocks form clusters. columns: see `Machine`.
    bulk: see `Clusters`.
    """
    kib = SHARED_KIB.get(capability, LEAST_SHARED_KIB)
    # The system has one KiB of each block's.
    has_clusters = capability >= LEAST_CLUSTERED
    blocks, bulk = 8 if has_clusters else 1, bulk and has_clusters
    clusters = Clusters(blocks, kib << 10, (kib + 1) << 10, bulk=bulk)
    never = sys.maxsize
    blocking = replace(Blocking(), row_bytes=never, sweep=never, narrow=never)
    workers = GPU.workers // clusters.blocks
    return replace(GPU, workers=workers, blocking=blocking, clusters=clusters, columns=columns)


@cache
def machine_of(device: str) -> Machine:
    """The machine that kernels for a device are planned for: here, a processor's vectors may be
    shorter than those of `CPU`.

    device: "cpu" or "cuda".
    """
    if device == "cuda":
        return GPU
    return replace(CPU, whole_lines=torch.backends.cpu.get_cpu_capability() == "AVX512")
