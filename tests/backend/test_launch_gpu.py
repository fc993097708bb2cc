"""How code that Inductor prints for a GPU calls a region, without one."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from typing import TYPE_CHECKING

import gpu_absent
import pytest
import torch
import triton_regions as regions
from triton_regions import fill

from normpass.backend.run import launch_gpu, op
from normpass.backend.run.gpu_kernel import GpuKernel, NotBuiltError
from normpass.backend.run.launch_gpu import CallSite
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.backend.run.gpu_kernel import Run
    from normpass.passes.region import Region

pytest.importorskip("triton", reason="Triton is not installed")

TEXT = fill(regions.SOFTMAX_BACKWARD, c="64").strip()
CPU = torch.device("cpu")


PRINTING = """
import json, sys
import gpu_absent
from normpass.backend.inductor import inductor_call
from normpass.backend.run import builders, launch_gpu
from normpass.backend.run.op import region_op
from normpass.passes import faults

text, started = sys.argv[1], []

def step(g, y):
    (grad,) = region_op([g.sin(), y], [8], text)
    return (grad,)

def start(text, *where):
    started.append([text, *map(str, where)])

def refuse(*given):
    raise RuntimeError("no more threads")

if sys.argv[2] == "started":
    launch_gpu.start = start
else:
    builders.submit = refuse
inductor_call.install()
code = gpu_absent.printed(step, (8, 64), (8, 64))
print(json.dumps([code, started, faults.reported()]))
"""


def printed(how: str) -> tuple[str, list[list[str]], list[list[str]]]:
    """Inductor's code of a graph with a region, which kernels were begun with, and our faults."""
    code, started, found = gpu_absent.answer_of(PRINTING, TEXT, how)
    return code, started, found


@gpu_absent.needs_cpu_build
def test_code_calls_the_kernel_and_it_is_built_meanwhile() -> None:
    code, started, found = printed("started")
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in lines if "torch.ops.normpass" in line]
    (name,) = re.findall(r"(\w+) = normpass_gpu_call_site\(\)", code)
    assert re.search(rf"= {name}\(\[buf0, y_1\], \[8\], 'region softmax_backward", code)
    ((text, *where),) = started
    assert text.startswith("region softmax_backward")
    assert where == ["(8,)", "cuda:0"]
    assert not found


@gpu_absent.needs_cpu_build
def test_what_cannot_be_started_is_built_when_it_is_called() -> None:
    code, _, found = printed("refused")
    assert "normpass_gpu_call_site()" in code
    assert [stage for stage, *_ in found] == ["the start of a kernel"]


class Kernel(GpuKernel):
    """Softmax's gradient by torch. error: what building raises."""

    error: Exception | None = None

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.built: list[tuple[int, ...]] = []

    def _prepare(self, sizes: tuple[int, ...], device: torch.device) -> Run:
        self.built.append(sizes)
        if self.error:
            raise self.error
        return self.run

    def run(self, tensors: Sequence[Tensor]) -> None:
        g, y, out = tensors
        out.copy_(expected(g, y))


def expected(g: Tensor, y: Tensor) -> Tensor:
    return y * (g - (g * y).sum(1, keepdim=True))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel(parse(TEXT))
    assert op.region_op  # what calls go through that nothing was found for
    monkeypatch.setattr(launch_gpu, "kernel", lambda *_: found)
    return found


def call(site: CallSite, rows: int = 5) -> None:
    g, y = torch.randn(2, rows, 64)
    (grad,) = site([g, y], [rows], TEXT)
    torch.testing.assert_close(grad, expected(g, y))


def test_a_call_keeps_what_it_found(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    site = CallSite()
    call(site)
    call(site, 6)
    monkeypatch.setattr(launch_gpu, "kernel", None)  # it is not looked for again
    call(site, 6)
    assert kernel.built == [(5,), (6,)]


def test_a_profiler_sees_the_operator(kernel: Kernel) -> None:
    site = CallSite()
    call(site)
    with torch.profiler.profile(acc_events=True) as profile:
        call(site)
    assert "normpass::region" in {event.key for event in profile.key_averages()}


def test_what_was_begun_is_waited_for(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = Event(), Event()

    def prepare(sizes: tuple[int, ...], device: torch.device) -> Run:
        began.set()
        assert goes_on.wait(60)
        return Kernel._prepare(kernel, sizes, device)

    monkeypatch.setattr(kernel, "_prepare", prepare)
    future = launch_gpu.start(TEXT, (5,), CPU)
    assert began.wait(60)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call, CallSite())
        assert not wait([called], 0.2).done
        goes_on.set()
        called.result()
    future.result()
    assert kernel.built == [(5,)]


def test_what_goes_wrong_ahead_is_raised_by_the_call(kernel: Kernel) -> None:
    kernel.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    launch_gpu.start(TEXT, (5,), CPU).result()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        call(CallSite())
    assert kernel.built == [(5,), (5,)]


@pytest.mark.usefixtures("faults_are_meant")
def test_what_cannot_be_built_is_one_warning(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.error = NotBuiltError(ValueError("PassManager::run failed"))
    launch_gpu.start(TEXT, (5,), CPU).result()
    site = CallSite()
    for rows in (5, 5, 6):
        call(site, rows)
    assert kernel.built == [(5,)]
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("normpass")]
    assert messages == [
        "region softmax_backward runs unfused: its  kernel could not be built: "
        "PassManager::run failed (normpass why kernel-not-built)"
    ]
