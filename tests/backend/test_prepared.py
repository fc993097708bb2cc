"""Launches with all that depends on sizes worked out."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from normpass.backend.run import prepared
from normpass.backend.run.prepared import Launch, OfPiece, OfTensor, Prepared

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from normpass.backend.run.prepared import Parameters

CPU = torch.device("cpu")


def values(parameters: Parameters) -> list[int]:
    return [ctypes.c_int64.from_address(at).value for at in parameters]


def refused(tensors: Sequence[torch.Tensor]) -> None:
    raise AssertionError("launched otherwise")


def test_arguments_of_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers of tensors, of bytes and of the launch's own are different arguments."""
    seen: list[tuple[str, int, int, list[int]]] = []

    def first(blocks: int, parameters: Parameters, stream: ctypes.c_void_p) -> None:
        seen.append(("first", blocks, stream.value, values(parameters)))

    def second(blocks: int, parameters: Parameters, stream: ctypes.c_void_p) -> None:
        seen.append(("second", blocks, stream.value, values(parameters)))

    monkeypatch.setattr(prepared, "stream_of", lambda _: lambda: 77)
    piece = torch.empty(512, dtype=torch.uint8)
    monkeypatch.setattr(prepared, "memory_of", lambda _: lambda *layout: piece)
    launches = (
        Launch(first, 5, (OfTensor(1), OfPiece(0), 1, -7, OfTensor(0), OfPiece(256))),
        Launch(second, 6, (0, OfPiece(256), OfTensor(1), 2**40)),
    )
    run = Prepared(launches, 2, 512, CPU, refused)
    for _ in range(2):
        x, y, at = torch.ones(64), torch.ones(64), piece.data_ptr()
        run((x, y))
        assert seen == [
            ("first", 5, 77, [y.data_ptr(), at, 1, -7, x.data_ptr(), at + 256]),
            ("second", 6, 77, [0, at + 256, y.data_ptr(), 2**40]),
        ]
        seen.clear()


def test_tensors_that_begin_elsewhere_are_launched_otherwise() -> None:
    found: list[Sequence[torch.Tensor]] = []
    run = Prepared((), 2, 0, CPU, found.append)
    x = torch.ones(65)
    run((x[:64], x[4:68]))
    assert not found
    run((x[:64], x[1:]))
    assert len(found) == 1


def test_threads_do_not_share_arguments() -> None:
    """Another thread launches while one waits for the driver."""
    kept: list[bool] = []
    tensors = [torch.ones(16) for _ in range(8)]

    def function(blocks: int, parameters: Parameters, stream: ctypes.c_void_p) -> None:
        (before,) = values(parameters)
        if before != tensors[0].data_ptr():
            return
        with ThreadPoolExecutor(1) as pool:
            for tensor in tensors[1:]:
                pool.submit(run, (tensor,)).result()
        kept.append(values(parameters) == [before])

    run = Prepared((Launch(function, 1, (OfTensor(0),)),), 1, 0, CPU, refused)
    run(tensors[:1])
    run(tensors[:1])
    assert kept == [True, True]
