"""Kernels that several processes and threads build and load at once, or fork away from: nothing
hangs, nothing is half there, no number is wrong.
"""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import normpass
from normpass.backend.program import in_place
from normpass.backend.run import toolchain
from normpass.backend.run.runtime import Kernel


def fused() -> int:
    """How many regions were fused."""
    return sum(n for key, n in counters["normpass"].items() if key.startswith("fused"))


# ---- processes


@pytest.mark.sweep
def test_processes_train_one_model_on_an_empty_cache(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else each process has Inductor try the compiler first, which is not what is tested.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with processes.spawned(processes.train_at_once, 8, 40, str(fresh_cache / "empty")) as answer:
        assert answer() == [[]] * 8
    fresh_cache = fresh_cache / "empty"
    assert processes.has_whole_libraries_only(fresh_cache)
    folder = fresh_cache / "normpass"
    libraries = {json.loads(facts.read_text())["library"] for facts in folder.glob("*.json")}
    assert libraries == {library.stem for library in folder.glob("*.so")}
    sources = [source.read_bytes() for source in folder.glob("*.cpp")]
    assert len(sources) == len({*sources}) == len(libraries) >= 2


@pytest.mark.parametrize("last", ["library", "checksum"])
def test_processes_that_finish_one_kernel_at_once(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their libraries differ, in names that the compiler made up; one of them stays, whole."""
    library, checksum = tmp_path / "kernel.so", tmp_path / "kernel.sum"
    replace = Path.replace

    def built(name: str) -> Path:
        (tmp_path / name).mkdir()
        path = tmp_path / name / "kernel.so"
        path.write_text(name)
        return path

    def interrupted(path: Path, target: Path) -> Path:
        if target == (library if last == "library" else checksum):
            monkeypatch.setattr(Path, "replace", replace)
            toolchain._put(built("theirs"), library, checksum)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    toolchain._put(built("ours"), library, checksum)
    assert library.read_text() == ("ours" if last == "library" else "theirs")
    assert toolchain._is_whole(library, checksum)


# ---- forks


def test_a_fork_goes_on_with_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread, as a DataLoader's workers have. With more even eager mode hangs there, once
    the parent has used several: GCC's OpenMP does not outlive a fork.
    """
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    with processes.spawned(processes.fork_after_training, "inductor") as answer:
        assert answer() == []
        found = answer()
        if "refused" in found:  # where it was built for GPUs
            pytest.skip(f"torch differentiates in no fork here: {found['refused']}")
        assert found == {"wrong": [], "wrong in another": [], "compiled": True}


def is_right_and_built(kernel: Kernel) -> tuple[bool, bool]:
    return processes.is_right(kernel), kernel._function is not None


def test_a_fork_while_a_kernel_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a thread of the parent was doing or had locked, the child does by itself."""
    compile_, parent, go_on = toolchain._compile, os.getpid(), threading.Event()
    building = threading.Event()

    def gated(text: Path) -> Path:
        if os.getpid() == parent:
            building.set()
            assert go_on.wait(processes.PATIENCE)
        return compile_(text)

    monkeypatch.setattr(toolchain, "_compile", gated)
    kernel = Kernel(processes.small(211))
    assert building.wait(processes.PATIENCE)
    try:
        with toolchain._lock, toolchain._header_lock:
            found = processes.answer_of_fork(is_right_and_built, kernel, patience=90)
    finally:
        go_on.set()
    assert found == (True, True)
    assert is_right_and_built(kernel) == (True, True)


def test_a_fork_while_a_kernel_is_planned(
    monkeypatch: pytest.MonkeyPatch, fresh_cache: Path
) -> None:
    """Before Python 3.12 a cached property has one lock for all objects."""
    overwritable, parent, go_on = in_place.overwritable, os.getpid(), threading.Event()
    planning = threading.Event()

    def gated(plan: Any) -> Any:
        if os.getpid() == parent:
            planning.set()
            assert go_on.wait(processes.PATIENCE)
        return overwritable(plan)

    monkeypatch.setattr(in_place, "overwritable", gated)
    kernel, other = Kernel(processes.small(212)), Kernel(processes.small(213))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(kernel.over, [(0, 0)])
        assert planning.wait(processes.PATIENCE)
        try:
            found = processes.answer_of_fork(other.over, [(0, 0)], patience=30)
        finally:
            go_on.set()
        assert found == asked.result() == {0: 0}


# ---- threads


@pytest.fixture
def backend_is_loaded() -> None:
    """torch fails where two threads are the first to name a backend of another package
    ("duplicate name"), whichever it is: it looks whether it has it, loads it and enters it, without
    a lock.
    """
    torch._dynamo.lookup_backend("normpass")


@pytest.mark.one_in(2)
@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.12",
    reason="torch 2.11 itself fails where a thread runs compiled code while another one traces",
)
@pytest.mark.usefixtures("backend_is_loaded")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_threads_compile_at_once(inner: str) -> None:
    """Two pairs of threads: each pair has the same model, while others ask for reports and take the
    rules in and out.
    """
    widths = [44, 44, 52, 52]
    together, over = threading.Barrier(len(widths) + 2), threading.Event()

    def train(width: int) -> list[str]:
        net = processes.model(width)
        function = processes.compiled(net, inner)
        together.wait()
        return [
            wrong
            for rows in (9, 9, 9)
            for wrong in processes.differences(function, net, processes.example(width, rows))
        ]

    def explain() -> set[tuple[int, int]]:
        net, x, found = nn.LayerNorm(60), torch.randn(5, 60, requires_grad=True), set()
        together.wait()
        while not over.is_set():
            report = normpass.explain(net, x, options={"least_bytes": 0, "inner": "eager"})
            found.add((len(report.regions), len(report.refused)))
        return found

    def register() -> int:
        count = 0
        together.wait()
        while not over.is_set():
            with normpass.registered():
                time.sleep(0.01)
            time.sleep(0.01)
            count += 1
        return count

    with ThreadPoolExecutor(len(widths) + 2) as pool:
        reports, registered = pool.submit(explain), pool.submit(register)
        try:
            # One at a time: it is torch's global generator that makes their weights.
            trained = [pool.submit(train, width) for width in widths]
            assert [future.result(processes.PATIENCE) for future in trained] == [[]] * 4
        finally:
            over.set()
        assert registered.result() > 0
        assert all(count >= 1 for count, _ in reports.result())
    assert fused() >= 4


THREAD_OUTLIVES_MAIN = """
import logging, threading
import processes
from normpass.backend.run import toolchain
logging.basicConfig()
def train(width):
    net = processes.model(width)
    print(processes.differences(processes.compiled(net), net, processes.example(width)))
    print(toolchain.compiled)
def wait_and_train():
    threading.main_thread().join()
    train(68)
train(60)  # torch cannot be imported later
threading.Thread(target=wait_and_train).start()
"""


def test_a_thread_outlives_the_main_one(fresh_cache: Path) -> None:
    """Python allows no pool another thread then: kernels are built where they are needed."""
    out, errors = processes.program(THREAD_OUTLIVES_MAIN, fresh_cache).communicate(timeout=200)
    lines = out.splitlines()
    assert lines[::2] == ["[]", "[]"], errors
    assert int(lines[3]) >= int(lines[1]) + 2
    assert "unfused" not in errors
