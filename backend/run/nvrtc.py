"""Compiling CUDA C++ for a GPU that need not be there, by NVIDIA's run-time compiler.

It comes with torch's CUDA builds, as do its Python bindings (`cuda.bindings`, checked on 13.0).
What it makes is kept in the cache by what it was made from.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from normpass.backend.run.toolchain import cache_dir

HEADERS = ("normpass.cuh", "cuda_device.cuh")
OPTIONS = ("--std=c++17",)
DIGEST = hashlib.sha256().digest_size


class CompileError(RuntimeError):
    """CUDA C++ that could not be compiled: what the compiler says."""


def compiled(text: str, capability: int) -> bytes:
    """The machine code of a module's text, as a cubin.

    capability: of the GPU, 90 for 9.0. Where its instructions may be of that GPU alone, they are.

    Raises:
        ImportError: without the compiler.
        CompileError: if it does not take the text.
    """
    path = _path(text, capability)
    if (code := _found(path)) is not None:
        return code
    code = _compile(text, capability)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
        file.write(hashlib.sha256(code).digest() + code)
    os.replace(file.name, path)  # in one step: processes that write the same one agree
    return code


def _found(path: Path) -> bytes | None:
    """What the cache has; None where that is nothing, or not what was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST], content[DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _path(text: str, capability: int) -> Path:
    """Where the cache has it."""
    parts = [text, *headers().values(), str(capability), *OPTIONS, str(version())]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache_dir() / "cuda" / f"{name}.cubin"


@cache
def headers() -> dict[str, str]:
    """Those that generated text includes, by name."""
    folder = Path(__file__).parents[1] / "codegen"
    return {name: (folder / name).read_text(encoding="utf-8") for name in HEADERS}


@cache
def version() -> tuple[int, int] | None:
    """The compiler's, such as (13, 0); None where there is none."""
    try:
        major, minor = _checked(_nvrtc().nvrtcVersion())
    except (ImportError, RuntimeError):  # no bindings, or no library that they could call
        return None
    return int(major), int(minor)


@cache
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _compile(text: str, capability: int) -> bytes:
    nvrtc, files = _nvrtc(), headers()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text.encode(),
            b"normpass.cu",
            len(files),
            [content.encode() for content in files.values()],
            [name.encode() for name in files],
        )
    )
    try:
        options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture=sm_{capability}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_told(program))
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _told(program: Any) -> str:
    """What the compiler says of a program."""
    nvrtc = _nvrtc()
    log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode(errors="replace")


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call returns besides its status: nothing, a value, or several.

    Raises:
        CompileError: if that is not success.
    """
    status, *values = answer
    if status.value:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values
