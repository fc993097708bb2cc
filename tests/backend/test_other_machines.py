"""What is compiled on one machine and loaded on another: torch's own caches and files hold the
kernels. A machine is a process with an empty cache folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass.backend.inductor.bundled import Kernels, unpacked
from normpass.backend.program.machine import CPU
from normpass.backend.program.sizes import SizeClass
from normpass.backend.run import known, runtime, toolchain
from normpass.backend.run.runtime import Kernel

if TYPE_CHECKING:
    from pathlib import Path

    from normpass.backend.run.known import Facts

MODEL = """
import json, sys, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
path = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.LayerNorm(24), torch.nn.RMSNorm(24))
options = {"least_bytes": 0}
def step(compiled, n=16):
    compiled(torch.randn(n, 24)).sin().sum().backward()
def tell():
    from normpass.backend.run import toolchain
    found = float(model[1].weight.grad.double().sum())
    hits = counters["inductor"]["fxgraph_cache_hit"]
    print(json.dumps([toolchain.compiled, hits, found]))
"""
SAVE = """
step(torch.compile(model, backend="normpass", options=options))
tell()
artifacts, _ = torch.compiler.save_cache_artifacts()
open(path, "wb").write(artifacts)
"""
LOAD = """
torch.compiler.load_cache_artifacts(open(path, "rb").read())
step(torch.compile(model, backend="normpass", options=options))
tell()
"""
# Redis and its like hold bytes by name, as a folder does.
REMOTE = """
import hashlib, pathlib
from torch._inductor import config, remote_cache
class Folder(remote_cache.RemoteCacheBackend):
    def file(self, key):
        return pathlib.Path(path, hashlib.sha256(key.encode()).hexdigest())
    def _get(self, key):
        return self.file(key).read_bytes() if self.file(key).exists() else None
    def _put(self, key, data):
        pathlib.Path(path).mkdir(exist_ok=True)
        self.file(key).write_bytes(data)
remote_cache.RemoteFxGraphCache.backend_override_cls = Folder
config.fx_graph_remote_cache = True
step(torch.compile(model, backend="normpass", options=options))
tell()
"""
SAVE_FUNCTION = """
def function(x, w):
    return torch.nn.functional.layer_norm(x.sin(), (24,), w)
x, w = torch.randn(16, 24), torch.ones(24, requires_grad=True)
compiled = torch.compile(function, backend="normpass", fullgraph=True, options=options)
compiled = compiled.aot_compile(((x, w), {}))
compiled(x, w).sin().sum().backward()
model[1].weight.grad = w.grad
tell()
compiled.save_compiled_function(path)
"""
LOAD_FUNCTION = """
with open(path, "rb") as file:
    compiled = torch.compiler.load_compiled_function(file)
compiled.disable_guard_check()
x, w = torch.randn(16, 24), torch.ones(24, requires_grad=True)
compiled(x, w).sin().sum().backward()
model[1].weight.grad = w.grad
tell()
"""
FIRST = """\
region first_of_its_kind
axes    r=? c=31
input   x: f32[r c]
sum     = sum[c](x)
sub     = sub(x, sum)
output  y: f32[r c] = sub"""


@pytest.fixture(autouse=True)
def _other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this one has loaded so far it asks its cache for again."""
    monkeypatch.setattr(toolchain, "_futures", {})


def run(program: str, path: Path, cache: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", MODEL + program, str(path)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_aot_compile = pytest.mark.skipif(
    not hasattr(torch.compile(torch.sin, backend="eager"), "aot_compile"),
    reason="this torch has aot_compile only where a setting asks for it",
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("save", "load"),
    [
        pytest.param(SAVE, LOAD, id="cache artifacts"),
        pytest.param(REMOTE, REMOTE, id="a remote cache"),
        pytest.param(SAVE_FUNCTION, LOAD_FUNCTION, id="a function", marks=needs_aot_compile),
    ],
)
def test_kernels_come_with_the_graph(save: str, load: str, tmp_path: Path) -> None:
    path = tmp_path / "compiled"
    compiled, hits, found = run(save, path, tmp_path / "one")
    assert compiled > 0
    assert hits == 0
    *counts, again = run(load, path, tmp_path / "other")
    assert counts[0] == 0  # kernels that were compiled
    assert again == found
    if load in (LOAD, REMOTE):
        assert counts[1] > 0


# ---- libraries


def pickled(kernels: Kernels) -> tuple[dict[str, Facts], dict[str, bytes]]:
    function, arguments = kernels.__reduce__()
    assert function is unpacked
    return arguments


def test_a_library_is_unpacked_once(fresh_cache: Path) -> None:
    kernel = Kernel(FIRST)
    facts, libraries = pickled(Kernels([kernel]))
    ((key, data),) = libraries.items()
    assert key == toolchain.key_of(kernel.source)
    assert facts == {kernel.name: kernel.facts}
    for file in (fresh_cache / "normpass").iterdir():
        file.unlink()
    again = unpacked(facts, libraries)
    assert pickled(again) == (facts, {key: data})
    before = toolchain.compiled
    assert right(Kernel(FIRST))
    assert toolchain.compiled == before
    library = fresh_cache / "normpass" / f"{key}.so"
    written = library.stat().st_mtime_ns
    unpacked(facts, libraries)
    assert library.stat().st_mtime_ns == written


def right(kernel: Kernel) -> bool:
    x = torch.randn(5, 31)
    (y,) = kernel([x], [5])
    return torch.allclose(y, x - x.sum(1, keepdim=True), atol=1e-5) and bool(kernel._function)


def test_what_is_known_is_neither_planned_nor_printed(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(FIRST)
    assert right(kernel)
    over = kernel.over([(0, 0)])

    def fail(*arguments: Any) -> Any:
        raise AssertionError("it is known")

    monkeypatch.setattr(runtime, "print_kernel", fail)
    monkeypatch.setattr("normpass.backend.program.plan.make_plan", fail)
    assert right(Kernel(FIRST))
    assert Kernel(FIRST).over([(0, 0)]) == over == {0: 0}


@pytest.mark.parametrize("damage", ["facts", "library", "no library", "another form"])
def test_what_is_damaged_is_built_again(damage: str, fresh_cache: Path) -> None:
    assert right(Kernel(FIRST))
    (facts,) = (fresh_cache / "normpass").glob("*.json")
    (library,) = (fresh_cache / "normpass").glob("*.so")
    match damage:
        case "facts":
            facts.write_text(facts.read_text()[:20])
        case "library":
            content = library.read_bytes()
            library.unlink()  # the library of this process stays as it is
            library.write_bytes(content[:-40])
        case "no library":
            library.unlink()
        case "another form":
            facts.write_text('{"library": "1", "of another": "version"}')
    toolchain._futures.clear()
    assert right(Kernel(FIRST))


def test_it_is_known_by_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {Kernel(FIRST).name, Kernel(FIRST, (SizeClass(64),)).name}
    names.add(Kernel(FIRST.replace("c=31", "c=32")).name)
    monkeypatch.setattr(runtime, "machine_of", lambda _: replace(CPU, workers=3))
    names.add(Kernel(FIRST).name)
    monkeypatch.undo()
    monkeypatch.setattr(known, "_sources", lambda: "of another version")
    names.add(Kernel(FIRST).name)
    assert len(names) == 5


@pytest.mark.usefixtures("faults_are_meant")
def test_what_cannot_be_built_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str) -> Any:
        raise toolchain.CompileError("for the test")

    monkeypatch.setattr(toolchain, "start", fail)
    other = FIRST.replace("first_of_its_kind", "never_built")
    assert pickled(Kernels([Kernel(other)])) == ({}, {})
    assert pickled(Kernels()) == ({}, {})


def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    # It is built where it is needed, or runs unfused.
    for owner, name in ((toolchain.tempfile, "TemporaryDirectory"), (toolchain, "cache_dir")):
        monkeypatch.setattr(owner, name, full)
        unpacked({"2" * 32: known.Facts("1" * 32, {})}, {"1" * 32: b""})


def test_a_library_is_known_by_what_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever torch, Python and the headers lie; not by a processor that can do something else."""
    before = toolchain.key_of("source")
    words = toolchain._command().split()
    moved = [b"-I/elsewhere" if word.startswith(b"-I") else word for word in words]
    monkeypatch.setattr(toolchain, "_command", lambda: b" ".join(moved))
    assert toolchain.key_of("source") == before
    monkeypatch.setattr(toolchain, "_command", lambda: b" ".join((b"/bin/" + moved[0], *moved[1:])))
    assert toolchain.key_of("source") == before
    monkeypatch.setattr(toolchain, "_command", lambda: b" ".join((b"/bin/clang++", *moved[1:])))
    assert toolchain.key_of("source") != before
    monkeypatch.setattr(toolchain, "_command", lambda: b" ".join((*moved, b"-O1")))
    assert toolchain.key_of("source") != before
    monkeypatch.undo()
    monkeypatch.setattr(toolchain, "_processor", lambda: b"one more instruction")
    assert toolchain.key_of("source") != before
