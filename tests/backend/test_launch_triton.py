"""Launching Triton kernels: what goes wrong in building leaves a region unfused, what goes wrong in
a launch is raised.

Without a GPU, Triton compiles for one that a driver of the tests' claims to have.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import triton_regions
from triton_driver import fake_gpu

from normpass.backend.codegen import triton_library
from normpass.backend.codegen.triton_library import Card
from normpass.backend.run import launch_triton
from normpass.backend.run.launch_triton import TritonKernel
from normpass.backend.run.triton_launches import Launched, Recording, record
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton", reason="Triton is not installed")


def kernel_of(text: str, width: int) -> TritonKernel:
    return TritonKernel(parse(triton_regions.fill(text, c=str(width))))


def softmax_kernel(width: int) -> TritonKernel:
    return kernel_of(triton_regions.SOFTMAX, width)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("normpass")]


def test_a_damaged_file_in_the_cache_is_written_again(fresh_cache: Path) -> None:
    text = softmax_kernel(9).source.text
    launch_triton.load(text)
    (file,) = (fresh_cache / "normpass" / "triton").glob("*.py")
    file.write_text("raise SystemExit")
    assert launch_triton.load(text).run
    assert file.read_text() == text


@pytest.mark.usefixtures("faults_are_meant")
@pytest.mark.parametrize(
    "error", [RuntimeError("PassManager::run failed"), OSError("no C compiler"), KeyError("axis")]
)
def test_a_kernel_that_cannot_be_built_runs_unfused_with_one_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(launch_triton, "record", refuse)
    kernel, x = softmax_kernel(9), torch.randn(4, 9)
    for _ in range(2):
        (y,) = kernel([x], [4])
        torch.testing.assert_close(y, torch.softmax(x, 1))
    (warning,) = warnings_of(caplog)
    assert f"region softmax runs unfused: its Triton kernel could not be built: {error}" in warning


def test_building_compiles_every_kernel_and_launches_none() -> None:
    kernel = kernel_of(triton_regions.LAYER_NORM_BACKWARD, 64)
    run = launch_triton.load(kernel.source.text).run
    slots = launch_triton._slots(kernel.region, (6,), torch.device("cpu"))
    with fake_gpu(AssertionError("launched")):
        record(run, slots, (6,), (), Card(132, 228 << 10, 227 << 10))
    assert len(kernel.source.kernels) > 1
    for printed in kernel.source.kernels:
        cached = run.__globals__[printed.name].device_caches[0][0]
        assert len(cached) == 1, printed.name


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_an_error_of_the_device_is_raised(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_gpu(error), pytest.raises(type(error), match=str(error)[:10]):
        softmax_kernel(10)([torch.randn(4, 10)], [4])
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("faults_are_meant")
def test_a_kernel_that_does_not_fit_the_device_runs_unfused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from triton.runtime.errors import OutOfResources

    x = torch.randn(4, 11)
    with fake_gpu(OutOfResources(300_000, 232_448, "shared memory")):
        (y,) = softmax_kernel(11)([x], [4])
    torch.testing.assert_close(y, torch.softmax(x, 1))
    (warning,) = warnings_of(caplog)
    assert "out of resource: shared memory" in warning


# ---- what a kernel takes of a GPU


def built(card: Card, suffice: int) -> Recording:
    """A kernel that spills unless so few programs of it run at once."""
    programs = card.programs("softmax_0", 4)
    most = triton_library.options(4, programs)["maxnreg"]
    kernel = SimpleNamespace(
        _init_handles=lambda: None,
        metadata=SimpleNamespace(maxnreg=most, num_warps=4, target=SimpleNamespace(backend="")),
        n_spills=0 if programs <= suffice else 8,
        function=1,
    )
    return Recording([Launched(SimpleNamespace(__name__="softmax_0"), kernel, (1,), (), {})], 0)


@pytest.mark.parametrize(("suffice", "asked"), [(4, [4]), (2, [4, 3, 2]), (0, [4, 3, 2, 1])])
def test_kernels_that_spill_are_built_for_fewer_programs_at_once(
    suffice: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they do not, or one is left, which spills."""
    recorded: list[int] = []
    launched: list[Card] = []

    def record(run: object, dtypes: object, device: object, sizes: object, card: Card) -> Recording:
        recorded.append(card.programs("softmax_0", 4))
        return built(card, suffice)

    def run(tensors: object, sizes: object, card: Card) -> None:
        launched.append(card)

    monkeypatch.setattr(launch_triton, "record", record)
    monkeypatch.setattr(launch_triton, "load", lambda _: SimpleNamespace(run=run))
    kernel, x = softmax_kernel(9), torch.randn(4, 9)
    for _ in range(2):
        kernel([x], [4])
    assert recorded == asked
    kernel([torch.randn(5, 9)], [5])
    assert recorded == [*asked, *asked[-1:]]  # other sizes begin with what fits
    assert [card.programs("softmax_0", 4) for card in launched] == asked[-1:] * 3


@pytest.mark.usefixtures("faults_are_meant")
@pytest.mark.parametrize("at_all", [True, False])
def test_what_does_not_fit_fetches_nothing_ahead(
    at_all: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And stays unfused, with one warning, where it does not fit even so."""
    from triton.runtime.errors import OutOfResources

    tried: list[Card] = []
    launched: list[Card] = []

    def crowded(launches: object, card: Card) -> dict[str, int]:
        tried.append(card)
        if card.of_program or not at_all:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return {}

    def run(tensors: object, sizes: object, card: Card) -> None:
        launched.append(card)

    card = Card(132, 228 << 10, 227 << 10)
    monkeypatch.setattr(launch_triton, "card_of", lambda _: card)
    monkeypatch.setattr(launch_triton, "record", lambda *_: Recording([], 0))
    monkeypatch.setattr(launch_triton, "_crowded", crowded)
    monkeypatch.setattr(launch_triton, "load", lambda _: SimpleNamespace(run=run))
    kernel, x = softmax_kernel(9), torch.randn(4, 9)
    for _ in range(2):
        kernel([x], [4])
    nothing = replace(card, of_program=0)
    assert tried == [card, nothing]
    assert launched == ([nothing, nothing] if at_all else [])
    assert triton_library.stages(nothing, 1024, 0, 1) == 1
    assert len(warnings_of(caplog)) == (0 if at_all else 1)


# ---- tensors


def test_other_tensors_than_planned_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"expected x of shape \(4, 9\) and torch.float32, found shape \(4, 8\) and",
    ):
        softmax_kernel(9)([torch.randn(4, 8)], [4])


def test_other_strides_than_planned_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one element was to stand for all along an axis: no copy can be written there."""
    text = """\
region less_mean
axes    r=? c=9
input   x: f32[r c]
input   s: f32[r c] (1, 0)
sum     = sum[c](x)
sub     = sub(x, sum)
add     = add(sub, s)
output  y: f32[r c] = add"""
    kernel = TritonKernel(parse(text))
    given: list[torch.Tensor] = []
    monkeypatch.setattr(kernel, "_prepare", lambda sizes, device: given.extend)
    column = torch.randn(4, 1)
    x, expanded = torch.randn(9, 4).t(), column.repeat(1, 9)
    kernel([x, expanded], [4])
    assert given[0].is_contiguous()
    torch.testing.assert_close(given[0], x)
    assert given[1].stride() == (1, 0)
    torch.testing.assert_close(given[1], expanded)
