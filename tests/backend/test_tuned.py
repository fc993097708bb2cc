"""Kernels in the fastest of several forms: what is timed, kept and found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton_regions as regions
from triton_regions import fill

from normpass.backend.codegen.triton_library import Card
from normpass.backend.run import launch_gpu, tuned
from normpass.backend.run.gpu_kernel import GpuKernel, NotBuiltError
from normpass.backend.run.launch_triton import SETTINGS, Setting, TritonKernel
from normpass.backend.run.tuned import TunedKernel
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from normpass.backend.run.gpu_kernel import Run

pytest.importorskip("triton", reason="Triton is not installed")

CPU = torch.device("cpu")
REGION = parse(fill(regions.SOFTMAX, c="64"))


class Form(GpuKernel):
    """Softmax by torch, taking so many seconds by the tests' clock. error: what building raises."""

    def __init__(self, seconds: float, text: str = "", error: Exception | None = None) -> None:
        super().__init__(REGION)
        self.seconds, self.error = seconds, error
        self.source = SimpleNamespace(text=text)
        self.built = self.runs = 0

    def _prepare(self, sizes: tuple[int, ...], device: torch.device) -> Run:
        if self.error:
            raise self.error
        self.built += 1
        return self.run

    def run(self, tensors: Sequence[Tensor]) -> None:
        self.runs += 1
        x, out = tensors
        out.copy_(torch.softmax(x, 1))


def clock(run: Any, tensors: Sequence[Tensor], device: torch.device) -> float:
    run(tensors)
    return run.__self__.seconds


@pytest.fixture(autouse=True)
def a_gpu(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")


def call(kernel: GpuKernel, rows: int = 5) -> None:
    x = torch.randn(rows, 64)
    torch.testing.assert_close(kernel([x], [rows])[0], torch.softmax(x, 1))


def made(*forms: Form) -> TunedKernel:
    return TunedKernel({str(k): form for k, form in enumerate(forms)}, "key", clock)


def test_the_fastest_form_is_kept() -> None:
    slow, fast, third = forms = Form(3.0), Form(1.0), Form(2.0)
    kernel = made(*forms)
    call(kernel)
    assert [form.runs for form in forms] == [tuned.ROUNDS, tuned.ROUNDS + 1, tuned.ROUNDS]
    call(kernel, 6)  # other sizes of the same classes take the same form
    assert (slow.built, fast.built, third.built) == (1, 2, 1)
    assert fast.runs == tuned.ROUNDS + 2


def test_another_process_finds_the_choice() -> None:
    call(made(Form(3.0), Form(1.0)))
    slow, fast = again = Form(1.0), Form(3.0)
    call(made(*again))
    assert (slow.built, fast.built, fast.runs) == (0, 1, 1)


@pytest.mark.parametrize("what", ["text", "key", "device", "name"])
def test_another_text_device_or_form_is_timed_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(made(Form(3.0), Form(1.0)))
    fast, slow = Form(1.0), Form(3.0, text="other" if what == "text" else "")
    if what == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA B200")
    names = ("0", "other" if what == "name" else "1")
    key = "another key" if what == "key" else "key"
    call(TunedKernel(dict(zip(names, (fast, slow), strict=True)), key, clock))
    assert fast.runs == tuned.ROUNDS + 1
    assert slow.runs == tuned.ROUNDS


@pytest.mark.parametrize("content", ["", "a form of another version", "\udcff"])
def test_a_damaged_choice_is_made_again(content: str, fresh_cache: Path) -> None:
    call(made(Form(3.0), Form(1.0)))
    (file,) = (fresh_cache / "normpass").glob("*.form")
    file.write_text(content, errors="surrogateescape")
    fast, slow = Form(1.0), Form(3.0)
    call(made(fast, slow))
    assert fast.runs == tuned.ROUNDS + 1
    assert file.read_text() == "0"


def test_forms_that_cannot_be_built_are_left_out() -> None:
    broken = Form(0.5, error=NotBuiltError(ValueError("no such architecture")))
    fast, slow = Form(1.0), Form(2.0)
    call(made(broken, slow, fast))
    assert (fast.runs, slow.runs) == (tuned.ROUNDS + 1, tuned.ROUNDS)
    single = Form(1.0)
    call(TunedKernel({"broken": broken, "single": single}, "other key", clock))
    assert single.runs == 1  # nothing to choose from


@pytest.mark.usefixtures("faults_are_meant")
def test_without_any_form_the_region_is_unfused(caplog: pytest.LogCaptureFixture) -> None:
    errors = [NotBuiltError(ValueError(text)) for text in ("the usual form's", "another's")]
    call(made(*(Form(1.0, error=error) for error in errors)))
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("normpass")]
    assert "runs unfused: its GPU kernel could not be built: the usual form's" in message


def test_without_memory_the_usual_form_runs() -> None:
    def no_memory(*given: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    usual, other = Form(3.0), Form(1.0)
    call(TunedKernel({"usual": usual, "other": other}, "key", no_memory))
    assert (usual.runs, other.runs) == (1, 0)


def test_an_error_of_the_device_is_raised() -> None:
    kernel = made(Form(1.0), Form(1.0, error=RuntimeError("CUDA error: unspecified")))
    with pytest.raises(RuntimeError, match="unspecified"):
        call(kernel)


# ---- the forms


def test_regions_are_tuned_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    text = fill(regions.LAYER_NORM_BACKWARD, c="4096", t="bf16")
    tuned_text = text.replace("\ninput", "\ndialect tuned\ninput", 1)
    monkeypatch.setattr(launch_gpu, "capability", lambda _: 90)
    kernel = launch_gpu.kernel(tuned_text, (4096,), 0)
    assert isinstance(kernel, TunedKernel)
    assert [*kernel.forms] == [
        "usual",
        *(f"triton, {each}" for each in SETTINGS),
        "cuda",
        "cuda_bulk",
    ]
    assert type(launch_gpu.kernel(text, (4096,), 0)) is TritonKernel
    assert type(launch_gpu.kernel(tuned_text, (4096,), None)) is TritonKernel  # no GPU to time on


def test_a_setting_is_what_kernels_are_told() -> None:
    """Never more warps than a multiprocessor has."""
    card = Card(132, 228 << 10, 227 << 10)
    kernels = TritonKernel(parse(fill(regions.LAYER_NORM_BACKWARD, c="1024"))).source.kernels
    assert Setting().of(card, kernels) == card
    for setting in SETTINGS:
        told = setting.of(card, kernels)
        assert told.of_program == (card.of_program if setting.ahead else 0)
        for kernel in kernels:
            programs = told.programs(kernel.name, kernel.programs)
            asked = max(1, int(setting.programs * kernel.programs))
            assert programs == min(asked, 64 // kernel.warps)
