"""What goes wrong costs a warning at most: never a run, and never a wrong number."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from compiled import compile_fused, count_fused, run_in_child
from torch import nn

from normpass.backend import entry
from normpass.backend.codegen import cpp
from normpass.backend.options import Options
from normpass.backend.run import runtime, toolchain
from normpass.backend.run.calibration import SHIPPED, conditions_of
from normpass.passes.cost import Caches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = """\
region small
axes    r=? c=37
input   x: f32[r c]
sum     = sum[c](x)
sub     = sub(x, sum)
output  y: f32[r c] = sub"""


def small(x: torch.Tensor) -> torch.Tensor:
    return x - x.sum(1, keepdim=True)


def variant(k: int) -> str:
    """SMALL under another name: a kernel that no other test has compiled."""
    return SMALL.replace("region small", f"region small_{k}")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("normpass")]


# ---- options


def test_an_unknown_option_lists_all() -> None:
    function = torch.compile(small, backend="normpass", options={"least_byte": 0})
    with pytest.raises(
        Exception, match=r"unknown normpass option 'least_byte' \(did you mean"
    ) as e:
        function(torch.randn(3, 4))
    for name in Options.__dataclass_fields__:
        assert f"  {name} = " in str(e.value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("inner", "outer", "option inner: expected one of inductor, eager, found 'outer'"),
        ("least_bytes", "many", "option least_bytes: expected a number of bytes or None"),
        ("fuse", "no", "option fuse: expected True or False, found 'no'"),
        ("fuse", None, "option fuse: expected True or False, found None"),
        ("recompute", 1, "option recompute: expected True, False or None, found 1"),
    ],
)
def test_a_bad_value_says_what_is_expected(option: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse({option: value})


# ---- compilers and caches

NO_COMPILER = """
import logging, torch
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
for width in (64, 96):
    norm = torch.nn.LayerNorm(width)
    x = torch.randn(8, width, requires_grad=True)
    y = torch.compile(norm, backend="normpass", options={"least_bytes": 0})(x)
    y.sin().sum().backward()
    grad, x.grad = x.grad, None
    norm(x).sin().sum().backward()
    torch.testing.assert_close(grad, x.grad)
print("right")
"""


@pytest.mark.parametrize("module", ["runtime", "gpu_kernel"])
def test_a_kernel_that_was_not_built_fails_its_test(module: str) -> None:
    """conftest.py listens to the loggers by name, before anything of ours is imported."""
    log = importlib.import_module(f"normpass.backend.run.{module}").log
    assert "Unfused" in [type(handler).__name__ for handler in log.handlers]


def test_no_compiler_is_one_warning(fresh_cache: Path) -> None:
    environment = {**os.environ, "CXX": "/nonexistent/c++"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(fresh_cache)
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"
    warnings = [line for line in done.stderr.splitlines() if line.startswith("normpass")]
    assert len(warnings) == 1, done.stderr
    assert "expected a C++ compiler (/nonexistent/c++), found none" in warnings[0]


@pytest.mark.parametrize("damaged", [".so", ".sum"])
def test_a_broken_cache_file_is_built_again(
    damaged: str, fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(5, 37)
    text = variant(1 if damaged == ".so" else 5)
    runtime.Kernel(text)([x], [5])
    source = runtime.Kernel(text).source
    toolchain._futures.pop(source)
    file = toolchain.cache_dir() / (toolchain.key_of(source) + damaged)
    content = file.read_bytes()
    file.unlink()  # the library of this process stays as it is
    file.write_bytes(content[: len(content) // 2])
    before = toolchain.compiled
    (y,) = runtime.Kernel(text)([x], [5])
    torch.testing.assert_close(y, small(x))
    assert toolchain.compiled == before + 1
    (warning,) = warnings_of(caplog)
    assert "is damaged: building it again" in warning
    toolchain._futures.pop(source)
    runtime.Kernel(text)([x], [5])
    assert toolchain.compiled == before + 1


@pytest.mark.usefixtures("faults_are_meant")
def test_an_unwritable_cache_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file))
    check_unfused(variant(2), caplog, "could not be built")


@pytest.mark.usefixtures("faults_are_meant")
def test_code_that_does_not_compile_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpp, "generate", lambda plan: "this is not C++")
    check_unfused(variant(3), caplog, "could not be built")


@pytest.mark.usefixtures("faults_are_meant")
def test_a_compiler_that_has_gone_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cached graph may meet a machine where nothing can be compiled."""
    from torch._inductor.exc import InvalidCxxCompiler

    def gone(*arguments: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(toolchain, "_builder", gone)
    toolchain._command.cache_clear()
    check_unfused(variant(4), caplog, "could not be built")


def check_unfused(text: str, caplog: pytest.LogCaptureFixture, message: str) -> None:
    """The right result, with one warning over several calls."""
    kernel = runtime.Kernel(text)
    x = torch.randn(5, 37)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (y,) = kernel([x], [5])
            torch.testing.assert_close(y, small(x))
    (warning,) = warnings_of(caplog)
    assert message in warning


# ---- the user's model


def test_an_unsupported_op_in_the_middle() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, (37,))
        return F.layer_norm(torch.cumsum(torch.sort(y, -1).values, 0), (37,))

    x = torch.randn(9, 37, requires_grad=True)
    (ours,) = torch.autograd.grad(compile_fused(model)(x).sin().sum(), x)
    (theirs,) = torch.autograd.grad(model(x).sin().sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert count_fused() >= 3


def test_a_shape_error_is_eagers_own() -> None:
    """Wrapped by Dynamo exactly as under the stock backend; nothing of ours is in the way."""
    norm = nn.LayerNorm(37)

    def message(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
        with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[37\].*3, 36") as error:
            function(torch.randn(3, 36))
        return str(error.value)

    message(norm)
    ours = message(torch.compile(norm, backend="normpass"))
    assert ours == message(torch.compile(norm, backend="inductor"))


# ---- threads and processes


def test_threads_compile_and_run_at_once() -> None:
    inputs = [torch.randn(n, 37) for n in range(2, 18)]

    def run(k: int) -> bool:
        (y,) = runtime.launch([inputs[k]], [len(inputs[k])], variant(10 + k % 2))
        return torch.allclose(y, small(inputs[k]), atol=1e-5)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(16)))


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("new", [False, True])
def test_workers_run_kernels(start: str, new: bool) -> None:
    """Kernels that the parent has used and kernels it has not, in forked and spawned children."""
    x = torch.randn(600, 37)
    runtime.launch([x], [600], SMALL)
    text = variant(20 + (start == "fork")) if new else SMALL
    with multiprocessing.get_context(start).Pool(1) as pool:
        y = pool.apply_async(run_in_child, (text, x)).get(timeout=120)
    torch.testing.assert_close(y, small(x), rtol=1e-4, atol=1e-4)


def test_eager_inside_needs_no_inductor() -> None:
    norm = nn.LayerNorm(37)
    x = torch.randn(6, 37)
    torch.testing.assert_close(compile_fused(norm, inner="eager")(x), norm(x))
    assert count_fused("forward") == 1


def test_a_pass_without_identity_switches_caching_off() -> None:
    assert entry.FusionPass(before=(lambda graph: None,)).uuid() is None
    assert entry.FusionPass().uuid() == entry.FusionPass().uuid()
    other = entry.FusionPass(Options(least_bytes=1))
    assert entry.FusionPass().uuid() != other.uuid()


@pytest.mark.parametrize(
    "other",
    [
        {"caches": Caches(worker=1, shared=2)},
        {"private": 1},
        {"threads": 1000},
        {"calibration": replace(SHIPPED, ours=replace(SHIPPED.ours, launch=1.0))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_decisions_depend_on_is_part_of_the_identity(
    other: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of caches may serve machines with other processors."""
    here = entry.FusionPass().uuid()
    there = replace(conditions_of("cpu"), **other)  # type: ignore[arg-type]
    monkeypatch.setattr(entry, "conditions_of", lambda device: there)
    assert entry.FusionPass().uuid() != here
