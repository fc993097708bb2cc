"""Ctrl-C and worse in the middle of a compilation: it ends at once, and what comes next is as if
nothing had been.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import processes
import pytest
from torch._dynamo.utils import counters
from torch._inductor.scheduler import Scheduler

from normpass.backend import fusion
from normpass.backend.codegen import cpp
from normpass.backend.inductor import inductor_call
from normpass.backend.run import known, toolchain
from normpass.backend.run.runtime import Kernel
from normpass.passes import rewrite

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _it_is_heard() -> Iterator[None]:
    """Ctrl-C is not, in what a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fused() -> int:
    """How many regions were fused."""
    return sum(n for key, n in counters["normpass"].items() if key.startswith("fused"))


def die_before(suffix: str, text: str) -> None:
    """Builds a kernel, and is killed when it is about to move a file into place."""
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.suffix == suffix:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    Path.replace = killed  # type: ignore[method-assign, assignment]
    Kernel(text).library()


@pytest.mark.parametrize("suffix", [".so", ".sum"])
def test_a_process_that_is_killed_leaves_the_cache_usable(
    suffix: str, fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = processes.small(201 + len(suffix))
    found = processes.answer_of_fork(die_before, suffix, text)
    assert found == f"it died: {-signal.SIGKILL}"
    before = toolchain.compiled
    assert processes.is_right(Kernel(text))
    assert toolchain.compiled == before + 1
    assert not [record for record in caplog.records if record.name.startswith("normpass")]
    toolchain._futures.clear()
    assert processes.is_right(Kernel(text))
    assert toolchain.compiled == before + 1


def interrupt() -> None:
    """What Ctrl-C does to this process."""
    signal.raise_signal(signal.SIGINT)


# When it comes: what is replaced, what compiles the rest, and of which call.
STAGES: dict[str, tuple[object, str, str, str]] = {
    "fusing": (fusion, "fuse_graph", "eager", "forward"),
    "printing": (cpp, "generate", "eager", "backward"),
    "rewriting": (rewrite, "_insert", "eager", "backward"),
    "starting": (toolchain, "start", "eager", "forward"),
    "waiting": (toolchain, "built", "eager", "forward"),
    "waiting again": (toolchain, "built", "eager", "backward"),
    "keeping": (known, "remember", "eager", "forward"),
    "settling": (inductor_call, "settled", "inductor", "backward"),
    "Inductor": (Scheduler, "codegen", "inductor", "forward"),
    "packing": (toolchain, "packed", "inductor", "backward"),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_call_can_be_repeated(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name, inner, phase = STAGES[stage]
    original: Callable[..., Any] = getattr(owner, name)
    waits = False

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal waits
        if waits and threading.current_thread() is threading.main_thread():
            waits = False
            interrupt()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    width = 86 + [*STAGES].index(stage)
    net, x = processes.model(width), processes.example(width)
    function = processes.compiled(net, inner)
    waits = phase == "forward"
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        y = function(x)
        waits = True
        y.sin().sum().backward()
    assert not waits
    assert processes.differences(function, net, x) == []
    assert fused() >= 2
    assert not [record for record in caplog.records if record.name.startswith("normpass")]


# Sleeps where the gate stands, and leaves word; compiles otherwise. A shell that waits for another
# program goes on after Ctrl-C: this one becomes it.
COMPILER = """\
#!/bin/sh
case "$*" in {whose}) [ -e "{gate}" ] && : > "{gate}.reached" && exec sleep 300;; esac
exec {compiler} "$@"
"""
INTERRUPTED = """
import json, logging, os, sys
import processes, torch
from normpass.backend.run import toolchain
logging.basicConfig()
# Padding is Inductor's own.
net = torch.nn.Sequential(processes.model(72), torch.nn.ReflectionPad1d(1))
x = processes.example(72)
function = processes.compiled(net, sys.argv[2])
built = toolchain.built
def waits(source):
    open(sys.argv[1] + ".waits", "w").close()
    return built(source)
toolchain.built = waits
try:
    processes.step(function, net, x)
except KeyboardInterrupt:
    os.unlink(sys.argv[1])
    wrong = processes.differences(function, net, x)
    print(json.dumps([wrong, toolchain.compiled]))
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("inner", "whose"),
    [("eager", "*/normpass/*/kernel.cpp*"), ("inductor", "*/cache/??/*.cpp*")],
    ids=["ours", "Inductor's"],
)
def test_an_interrupted_compiler_is_run_again(
    inner: str, whose: str, fresh_cache: Path, tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to the compiler too."""
    compiler, gate = tmp_path / "bin" / "g++", tmp_path / "gate"
    compiler.parent.mkdir()
    here = toolchain._command().split()[0].decode()
    if Path(here).name != compiler.name:
        pytest.skip(f"the compiler is {here}, and the one that waits is called g++")
    compiler.write_text(COMPILER.format(whose=whose, gate=gate, compiler=shutil.which(here)))
    compiler.chmod(0o755)
    gate.touch()
    path = os.pathsep.join((str(compiler.parent), os.environ["PATH"]))
    process = processes.program(
        INTERRUPTED,
        fresh_cache,
        str(gate),
        inner,
        PATH=path,
        CXX="g++",
    )
    try:
        wait_for(gate.with_suffix(".reached"), process)
        if inner == "eager":
            # What comes while Dynamo traces can come in a callback of Python's, and is lost.
            wait_for(gate.with_suffix(".waits"), process)
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=processes.PATIENCE)
    finally:
        with_all_it_started(process)
    assert process.returncode == 0, errors
    wrong, built = json.loads(out)
    assert wrong == []
    assert built >= 2
    assert "unfused" not in errors
    assert processes.has_whole_libraries_only(fresh_cache)


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + processes.PATIENCE
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def with_all_it_started(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a program; there is nothing if all went well."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


LEAVES = """
import os, sys, time
from normpass.backend.run import toolchain
def load(source):
    with open(sys.argv[1], "a") as file:
        file.write("x")
    time.sleep(0.3)
toolchain.load = load
for k in range(400):
    toolchain.start(str(k))
"""


def test_a_program_that_ends_builds_nothing_more(tmp_path: Path) -> None:
    """What was asked for and not begun: a second each, after Ctrl-C as well."""
    begun = tmp_path / "begun"
    _, errors = processes.program(LEAVES, tmp_path, str(begun)).communicate(timeout=100)
    assert not errors
    assert len(begun.read_text()) < 200
