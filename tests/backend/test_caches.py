"""Sizes of caches, and what they decide: which regions are written past them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from normpass.backend.run import caches, runtime
from normpass.backend.run.caches import Caches, caches_of, private_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB, MIB = 1024, 1024 * 1024
NEGATION = """\
region negation
axes    r=? c=64
input   x: f32[r c]
neg     = neg(x)
output  y: f32[r c] = neg"""
ROW = 2 * 64 * 4  # bytes that it reads and writes
ROWS_PER_WORKER = runtime.ELEMENTS_PER_WORKER // 64


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes this machine one with so many threads and caches of these sizes by level."""

    def pretend(threads: int, **levels: int) -> None:
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)
        monkeypatch.setattr(caches, "_level", lambda level, usual: levels.get(f"l{level}", usual))
        forget()

    def forget() -> None:
        caches_of.cache_clear()
        private_cache.cache_clear()

    yield pretend
    monkeypatch.undo()
    forget()


def test_a_worker_has_its_own_cache_or_its_share_of_the_last(
    machine: Callable[..., None],
) -> None:
    machine(2, l2=2 * MIB, l3=64 * MIB)
    assert private_cache() == 2 * MIB
    assert caches_of("cpu") == Caches(worker=32 * MIB, shared=64 * MIB)
    machine(64, l2=2 * MIB, l3=64 * MIB)
    assert private_cache() == 2 * MIB
    assert caches_of("cpu") == Caches(worker=2 * MIB, shared=64 * MIB)


def test_usual_sizes_stand_in_where_nobody_tells(machine: Callable[..., None]) -> None:
    machine(1000)
    assert private_cache() == caches.USUAL_PRIVATE
    assert caches_of("cpu") == Caches(caches.USUAL_PRIVATE, caches.USUAL_LAST)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024K\n", MIB), ("48K", 48 * KIB), ("", 7), ("unknown\n", 7), (None, 7)],
    ids=repr,
)
def test_sizes_as_linux_tells_them(
    text: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def read_text(path: Path) -> str:
        asked.append(str(path))
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    assert caches._level(2, 7) == size
    assert asked == ["/sys/devices/system/cpu/cpu0/cache/index2/size"]


@pytest.mark.parametrize(
    ("threads", "rows", "workers"),
    [
        (1, 4 * ROWS_PER_WORKER, 1),  # one thread, however much there is to do
        (2, 2 * ROWS_PER_WORKER, 2),
        (8, 3 * ROWS_PER_WORKER, 3),  # more threads than the region keeps busy
        (8, ROWS_PER_WORKER // 2, 1),  # less than a worker's worth still has one
    ],
)
def test_what_the_workers_own_caches_keep_is_not_streamed(
    threads: int, rows: int, workers: int, machine: Callable[..., None]
) -> None:
    """The last level, which holds all of it, makes no difference."""
    kernel = runtime.Kernel(NEGATION)

    def streams(own_cache: int) -> bool:
        # The runtime has the function by name; its answer follows the level that it is made from.
        machine(threads, l2=own_cache, l3=1024 * MIB)
        return kernel._prepare(ctypes.memset, (rows,)).past_caches

    enough = -(-rows * ROW // workers)
    assert not streams(enough)
    assert streams(enough - 1)
