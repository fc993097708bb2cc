"""Launches on CPUs, as Inductor's code makes them."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._inductor import config

from normpass.backend.run import toolchain
from normpass.backend.run.runtime import CallSite, Kernel

SCALED = """\
region scaled
axes    r=? c=48
input   x: f32[r c]
input   y: f32[r]
scaled  = mul(x, y)
output  z: f32[r c] = scaled"""


def test_a_place_that_calls_a_region_is_called_with_other_sizes() -> None:
    call = CallSite()
    for rows in (3, 700, 3, 1):
        x, y = torch.randn(rows, 48), torch.randn(rows)
        (z,) = call([x, y], [rows], SCALED)
        torch.testing.assert_close(z, x * y[:, None], rtol=0, atol=0)


def test_threads_with_other_sizes_meet_in_one_place() -> None:
    call = CallSite()

    def differences(rows: int) -> int:
        x, y = torch.randn(rows, 48), torch.randn(rows)
        right = x * y[:, None]
        return sum(not torch.equal(call([x, y], [rows], SCALED)[0], right) for _ in range(200))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(differences, (1, 2, 5, 64, 900, 1200))) == [0] * 6


def test_kernels_are_built_with_the_settings_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps them for each context, and a thread of ours builds."""
    monkeypatch.setattr(toolchain, "load", lambda source: config.cpp.simdlen)
    with config.patch({"cpp.simdlen": 128}):
        assert toolchain.start("// asked for with a setting").result() == 128


def test_what_has_no_address_is_an_error() -> None:
    """It is found in C++, where nobody else would turn it into one of Python's."""
    launch = Kernel(SCALED).launch((3,))
    assert launch is not None
    with pytest.raises(RuntimeError, match="tensor"):
        launch.run((torch.zeros(3, 48), "no tensor", torch.zeros(3, 48)), 1)


def test_tensors_are_not_kept() -> None:
    x, y = torch.randn(3, 48), torch.randn(3)
    call = CallSite()
    call([x, y], [3], SCALED)
    reference = weakref.ref(x)
    del x
    assert reference() is None
