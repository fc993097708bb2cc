"""What is compiled on one machine and loaded on another: torch's own caches and files hold the
kernels. A machine is a process with an empty cache folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass.backend.inductor.bundled import Kernels
from normpass.backend.run import toolchain
from normpass.backend.run.runtime import print_kernel

if TYPE_CHECKING:
    from pathlib import Path

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
    not hasattr(torch.compiler, "load_compiled_function"), reason="not in this torch"
)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        pytest.param(SAVE, LOAD, id="cache artifacts"),
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
    if load is LOAD:
        assert counts[1] > 0


# ---- libraries


def test_a_library_is_unpacked_once(fresh_cache: Path) -> None:
    source = print_kernel(FIRST, ())
    unpacked, (libraries,) = Kernels((source,)).__reduce__()
    ((key, data),) = libraries.items()
    assert key == toolchain.key_of(source)
    for file in (fresh_cache / "normpass").iterdir():
        file.unlink()
    again = unpacked(libraries)
    assert again.__reduce__()[1] == ({key: data},)
    before = toolchain.compiled
    toolchain.load(source)
    assert toolchain.compiled == before
    library = fresh_cache / "normpass" / f"{key}.so"
    written = library.stat().st_mtime_ns
    unpacked(libraries)
    assert library.stat().st_mtime_ns == written


def test_what_is_not_there_is_left_out(fresh_cache: Path) -> None:
    _, (libraries,) = Kernels(("no kernel",), ("0" * 32,)).__reduce__()
    assert libraries == {}
    assert Kernels().__reduce__()[1] == ({},)


def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(toolchain.tempfile, "TemporaryDirectory", full)
    toolchain.unpack("1" * 32, b"")  # it is built where it is needed, or runs unfused


def test_a_library_is_known_by_what_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever torch, Python and the headers lie; not by a processor that can do something else."""
    before = toolchain.key_of("source")
    words = toolchain._command().split()
    moved = [b"-I/elsewhere" if word.startswith(b"-I") else word for word in words]
    monkeypatch.setattr(toolchain, "_command", lambda: b" ".join(moved))
    assert toolchain.key_of("source") == before
    monkeypatch.setattr(toolchain, "_command", lambda: b" ".join((*moved, b"-O1")))
    assert toolchain.key_of("source") != before
    monkeypatch.undo()
    monkeypatch.setattr(toolchain, "_processor", lambda: b"one more instruction")
    assert toolchain.key_of("source") != before
