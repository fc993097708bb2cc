"""What there is on this machine to compile with, by section."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import normpass
from normpass.backend.run import nvrtc, toolchain
from normpass.backend.run.caches import capability
from normpass.decomps.activation import is_registered

if TYPE_CHECKING:
    from collections.abc import Iterator

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

Facts = dict[str, dict[str, str]]


def devices() -> list[str]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(gpus))]


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
            "backend": f"{backend() or 'not found by its name'}, from {place()}",
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


def backend() -> str | None:
    """What torch finds under the name of the backend, or None."""
    points = entry_points(group="torch_dynamo_backends", name="normpass")
    return next((point.value for point in points), None)


def place() -> str:
    """The folder that normpass is imported from."""
    return str(Path(normpass.__file__).parent)


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


def sizes(folder: Path) -> Iterator[int]:
    """Bytes of each file below a folder; without those that go while others build kernels."""
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.stat(os.path.join(where, name)).st_size


def caches() -> dict[str, str]:
    try:
        folder = toolchain.cache_dir()
    except OSError as error:
        return {"folder": f"cannot be made: {error}"}
    files = [*sizes(folder)]
    return {
        "folder": str(folder),
        "kernels": f"{len(files)} files, {sum(files) / 1e6:.0f} MB",
        "room": f"{shutil.disk_usage(folder).free / 1e9:.1f} GB",
    }


def is_setting(name: str) -> bool:
    return name.startswith(PREFIXES) or name in ALSO
