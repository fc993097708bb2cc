"""`normpass doctor`: what a report of a bug should tell of a machine, and the usual mistakes.

    versions   of normpass and what it stands on
    compiler   the C++ compiler, and the vector instructions that Inductor finds
    machine    processor, threads, GPUs and the languages of their kernels
    caches     where kernels are kept, and how much room there is
    settings   whether rules are registered; variables that change what is compiled
    trial      a layer norm compiled and compared with eager mode, on every device

and then what is wrong, with what to do about it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from normpass.backend.options import Options
from normpass.backend.program import verify
from normpass.backend.run import calibration, nvrtc, toolchain
from normpass.backend.run.caches import capability
from normpass.decomps.activation import is_registered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Variables whose names begin so change what is compiled, or where.
PREFIXES = (
    "NORMPASS_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TORCH_COMPILE_",
    "TORCH_LOGS",
    "TRITON_",
)
ALSO = ("CXX", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
VARIABLES = sorted(
    (
        *(variable for each in fields(Options) if (variable := each.metadata.get("env"))),
        *(calibration.VARIABLE, verify.VARIABLE),
    )
)
LEAST_ROOM = 256 << 20  # bytes: what a model's kernels take, many times


class Finding(NamedTuple):
    """What is wrong, and what to do about it."""

    problem: str
    advice: str


Facts = dict[str, dict[str, str]]


def doctor(argv: Sequence[str]) -> int:
    """`normpass doctor`: 0 if nothing is wrong, else 1."""
    parser = argparse.ArgumentParser("normpass doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--no-trial", action="store_true", help="compile nothing")
    args = parser.parse_args(argv)
    facts, found = examined(), [*findings()]
    if not args.no_trial and not any(os.environ.get(name) == "1" for name in OFF):
        facts["trial"] = {}
        for device in devices():
            facts["trial"][device], wrong = tried(device)
            found += wrong
    print(as_json(facts, found) if args.json else as_text(facts, found))
    return 1 if found else 0


def as_json(facts: Facts, found: Sequence[Finding]) -> str:
    return json.dumps({**facts, "findings": [each._asdict() for each in found]}, indent=2)


def as_text(facts: Facts, found: Sequence[Finding]) -> str:
    lines = []
    for section, entries in facts.items():
        lines += [section, *(f"  {name:<24} {value}" for name, value in entries.items()), ""]
    for each in found:
        lines += [f"WRONG  {each.problem}", f"       {each.advice}"]
    return "\n".join([*lines, *([] if found else ["nothing wrong was found"])])


def devices() -> list[str]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(gpus))]


# --- what there is ------------------------------------------------------------------------------


def examined() -> Facts:
    """What is known of this machine, by section."""
    given = {name: os.environ[name] for name in sorted(os.environ) if is_setting(name)}
    return {
        "versions": versions(),
        "compiler": {
            "command": os.environ.get("CXX", "") or "of Inductor's choice",
            "version": compiler_version(),
            "vectors": toolchain.vectors() or "none",
        },
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
            **{device: gpu(int(device[5:])) for device in devices()[1:]},
        },
        "caches": caches(),
        "settings": {
            "rules registered": "yes" if is_registered() else "no",
            **given,  # torch adds its own as it is asked for things
        },
    }


def versions() -> dict[str, str]:
    build = torch.version.cuda or torch.version.hip
    found = {
        "normpass": installed("normpass"),
        "python": platform.python_version(),
        "torch": f"{torch.__version__} ({f'GPUs by {build}' if build else 'CPUs alone'})",
        "sympy": installed("sympy"),
        "triton": installed("triton"),
    }
    if nvrtc.version() is not None:
        found["NVRTC"] = ".".join(map(str, nvrtc.version() or ()))
    return found


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def compiler_version() -> str:
    """The first line of what the compiler says of itself."""
    command = toolchain.compiler()
    if command is None:
        return "none found"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).partition("\n")[0].strip() or command


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpu(index: int) -> str:
    """Its name, and the languages of its kernels."""
    name = torch.cuda.get_device_name(index)
    if torch.version.hip:
        return f"{name}: Triton"
    major, minor = torch.cuda.get_device_capability(index)
    languages = "Triton, CUDA C++" if capability(index) >= 80 else "Triton"
    return f"{name} ({major}.{minor}): {languages}"


def caches() -> dict[str, str]:
    try:
        folder = toolchain.cache_dir()
    except OSError as error:
        return {"folder": f"cannot be made: {error}"}
    files = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return {
        "folder": str(folder),
        "kernels": f"{len(files)} files, {sum(files) / 1e6:.0f} MB",
        "room": f"{shutil.disk_usage(folder).free / 1e9:.1f} GB",
    }


def is_setting(name: str) -> bool:
    return name.startswith(PREFIXES) or name in ALSO


# --- what is wrong ------------------------------------------------------------------------------


def findings() -> Iterator[Finding]:
    """The usual mistakes that were made here."""
    if reason := toolchain.cannot_build():
        yield Finding(
            f"CPU code cannot be compiled: {reason}", "models run uncompiled until it can"
        )
    elif shutil.disk_usage(toolchain.cache_dir()).free < LEAST_ROOM:
        yield Finding(
            f"the disk of {toolchain.cache_dir()} is nearly full",
            "make room, or set TORCHINDUCTOR_CACHE_DIR to another folder",
        )
    if not toolchain.vectors() and platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64"):
        yield Finding(
            "Inductor finds no vector instructions: all code runs several times slower",
            f"look for files that hide modules of Python's own (such as nt.py) in {sys.path[0]!r}, "
            "and for a compiler that is older than the processor",
        )
    for name in OFF:
        if os.environ.get(name) == "1":
            yield Finding(f"{name}=1: torch.compile compiles nothing", f"unset {name}")
    for name in os.environ:
        if name.startswith("NORMPASS_") and name not in VARIABLES:
            known = ", ".join(VARIABLES)
            yield Finding(f"{name} is no variable of normpass's", f"expected one of {known}")
    try:
        Options.parse(None)
    except ValueError as error:
        yield Finding(f"the environment has an option that is refused: {error}", "unset it")
    if torch.cuda.is_available() and installed("triton") == "not installed":
        yield Finding("there is a GPU and no Triton", "pip install triton")


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """What normpass warns of in a block."""
    handler, log = _Warnings(), logging.getLogger("normpass")
    log.addHandler(handler)
    try:
        yield handler.seen
    finally:
        log.removeHandler(handler)


def tried(device: str) -> tuple[str, list[Finding]]:
    """A layer norm, forward and backward: how it went, and what went wrong."""
    report = "please report it, with all of this"
    begin = time.perf_counter()
    try:
        with listening() as warnings:
            fused = trial(device)
    except Exception as error:
        problem = f"a layer norm fails on {device}: {type(error).__name__}: {error}"
        return "failed", [Finding(problem.partition("\n")[0], report)]
    if warnings:
        return "warned", [Finding(f"a layer norm on {device}: {text}", report) for text in warnings]
    if not fused:
        return "nothing fused", [Finding(f"a layer norm is not fused on {device}", report)]
    return f"right, {fused} kernels in {time.perf_counter() - begin:.1f} s", []


def trial(device: str) -> int:
    """Regions of a layer norm's forward and backward.

    Raises:
        AssertionError: if a result is another than eager mode's.
    """
    from torch._dynamo.utils import counters
    from torch._functorch import config

    torch.manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": torch.float64}
    norm, inputs = torch.nn.LayerNorm(96, **like), torch.randn(2, 64, 96, **like)
    counters["normpass"].clear()
    # What a cache has, or this process, would not be fused again.
    torch._dynamo.reset()
    uncached = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    options: dict[str, Any] = {"least_bytes": 0, "inductor": uncached}
    compiled = torch.compile(norm, backend="normpass", options=options)
    with config.patch(enable_autograd_cache=False):
        found, expected = gradients(compiled, norm, inputs), gradients(norm, norm, inputs)
    torch.testing.assert_close(found, expected)
    return sum(n for what, n in counters["normpass"].items() if what.startswith("fused "))


def gradients(
    function: Callable[[torch.Tensor], torch.Tensor], norm: torch.nn.Module, inputs: torch.Tensor
) -> list[torch.Tensor]:
    """What a norm returns, and the gradients of a function of that."""
    x = inputs.clone().requires_grad_()
    y = function(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *norm.parameters()])]
