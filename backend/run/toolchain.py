"""The C++ compiler behind CPU kernels: torch's own builder, and a cache that survives other
processes.

The one module that touches torch._inductor.cpp_builder (checked on torch 2.11, 2.13 and 2.15:
CppBuilder, CppTorchDeviceOptions, pick_vec_isa and get_cpp_compiler keep their names and
arguments).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import zlib
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from normpass.backend.run import builders

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parents[1] / "codegen"
# Generated kernels include the first, and that the others.
HEADERS = tuple(FOLDER / name for name in ("normpass.h", "functions.h"))
# Contracting a*b+c is one rounding less: never a larger error, and the same bits on every run.
# Warnings are those of torch's own headers by the hundred: off, so that an error can be read.
EXTRA_FLAGS = ("-ffp-contract=fast", "-w")

compiled = 0  # kernels this process has compiled rather than found; tests read it


class CompileError(RuntimeError):
    """Generated C++ that the compiler refuses, with its messages."""


class InterruptedBuild(CompileError):
    """A compiler that Ctrl-C ended, which a terminal sends to all processes. Says nothing about the
    kernel: it is built when it is next asked for.
    """


@cache
def missing_compiler() -> str | None:
    """Why there is no C++ compiler, or None if there is one."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError) as error:  # the latter of a file that is no program
        wanted = os.environ.get("CXX", "g++ or clang++")
        return f"expected a C++ compiler ({wanted}), found none: {str(error).splitlines()[0]}"
    return None


def compiler() -> str | None:
    """The command of the C++ compiler, or None if there is none."""
    from torch._inductor import cpp_builder

    return None if missing_compiler() else str(cpp_builder.get_cpp_compiler())


def vectors() -> str:
    """The vector instructions that are compiled for, as Inductor calls them; empty for none."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    found = pick_vec_isa()
    return str(found) if found else ""


def cannot_build() -> str | None:
    """Why nothing can be compiled here now, by us or by Inductor, or None if it can."""
    if missing := missing_compiler():
        return missing
    try:
        with tempfile.TemporaryFile(dir=cache_dir()) as file:
            file.write(bytes(4096))  # a full disk has folders and empty files left
    except OSError as error:
        return f"expected a cache folder that can be written to, found {error}"
    return None


def cache_dir() -> Path:
    """Where kernels lie: beside Inductor's own cache, so that one setting moves both."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

    path = Path(inductor_cache_dir()) / "normpass"
    path.mkdir(parents=True, exist_ok=True)
    return path


@cache
def _header_digest() -> bytes:
    return hashlib.sha256(b"".join(header.read_bytes() for header in HEADERS)).digest()


def _builder(
    source: Path, name: str, directory: Path, include: Path, *, precompiling: bool = False
) -> Any:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(),
        device_type="cpu",
        extra_flags=[*EXTRA_FLAGS, f"-I{include}"],
        precompiling=precompiling,
    )
    return CppBuilder(
        name=name, sources=str(source), BuildOption=options, output_dir=str(directory)
    )


@cache
def _command() -> bytes:
    """The compiler's command line."""
    root = Path("/")
    return str(_builder(root / "in", "out", root, root).get_command_line()).encode()


@cache
def _processor() -> bytes:
    """What this processor can do, for which kernels are compiled (-march=native)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    (flags, *_) = [line for line in lines if line.startswith(("flags", "Features"))] or [""]
    return " ".join(sorted(flags.split())).encode()


def _identity() -> bytes:
    """What a library depends on beside its source: torch, the compiler's flags, without the places
    of files, which are others on another machine, and the processor. Each flag once: Inductor
    repeats some of them the second time it is asked.
    """
    compiler, *words = _command().split()
    flags = [x for x in dict.fromkeys(words) if not x.startswith((b"-I", b"-L", b"/"))]
    name = compiler.rpartition(b"/")[2]
    return b" ".join((torch.__version__.encode(), name, *flags, _processor()))


def header_dir() -> Path:
    """Where precompiled headers lie: where Inductor keeps its own, which outlive a cache."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir()) / "precompiled_headers"


@cache
def _include() -> Path:
    """The folder of normpass.h, precompiled where the compiler is GCC: that takes four seconds once
    on a machine and makes each kernel compile in a third of the time.
    """
    from torch._inductor import config, cpp_builder, exc

    if not (config.cpp_cache_precompile_headers and cpp_builder.is_gcc()):
        return FOLDER
    key = hashlib.sha256(_header_digest() + torch.__version__.encode() + _command()).hexdigest()
    home = header_dir() / f"normpass_{key[:16]}"
    precompiled = home / "normpass.h.gch"
    try:
        if not precompiled.exists():
            _precompile(home)
    except (OSError, exc.CppCompileError) as error:
        if _was_interrupted(error):
            raise
        log.info("kernels are compiled without a precompiled header: %s", error)
    return home if precompiled.exists() else FOLDER


def _precompile(home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        header, *_ = [shutil.copy(header, folder) for header in HEADERS]
        _builder(Path(header), header, Path(folder), FOLDER, precompiling=True).build()
        with suppress(OSError):  # another process was first
            Path(folder).rename(home)
        Path(folder).mkdir(exist_ok=True)


def key_of(source: str) -> str:
    """What a kernel's file is called: source, header, torch, compiler, its flags, processor."""
    digest = hashlib.sha256(source.encode())
    digest.update(_header_digest())
    digest.update(_identity())
    return digest.hexdigest()[:32]


def load(source: str) -> ctypes.CDLL:
    """The compiled library of a kernel, from the cache or freshly built.

    A file that is not whole (a crash, a full disk) fails its checksum and is built again.

    Raises:
        CompileError: with the compiler's messages.
    """
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        key = key_of(source)
    except InvalidCxxCompiler as error:  # it may have been there when the graph was compiled
        raise CompileError(f"no C++ compiler: {error}") from error
    if library := found(key):
        return library
    place, checksum = _places(key)
    if place.exists() and checksum.exists():  # else another process is about to finish
        log.warning(
            "kernel %s in the cache is damaged: building it again (normpass why damaged-cache)",
            place,
        )
    _build(source, place, checksum)
    return ctypes.CDLL(str(place))


def found(key: str) -> ctypes.CDLL | None:
    """A library that is in the cache, whole and made for a machine like this one."""
    place, checksum = _places(key)
    if _is_whole(place, checksum):
        with suppress(OSError):  # it may want newer libraries than this machine has
            return ctypes.CDLL(str(place))
    return None


def _is_whole(library: Path, checksum: Path) -> bool:
    try:
        return _checksum(library) == checksum.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _build(source: str, library: Path, checksum: Path) -> None:
    """Builds in a folder of its own and moves the result into place: other processes see all or
    nothing.
    """
    global compiled
    from torch._inductor.exc import CppCompileError

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        text = Path(folder) / "kernel.cpp"
        text.write_text(source)
        try:
            built = _compile(text)
        except CppCompileError as error:
            kind = InterruptedBuild if _was_interrupted(error) else CompileError
            raise kind(str(error)) from error
        text.replace(library.with_suffix(".cpp"))
        _put(built, library, checksum)
    compiled += 1


def _compile(text: Path) -> Path:
    """The library of a source, beside it."""
    from torch._inductor.exc import CppCompileError

    def compile_with(include: Path) -> Path:
        builder = _builder(text, "kernel", text.parent, include)
        builder.build()
        return Path(builder.get_target_file_path())

    with _header_lock:
        include = _include()
    try:
        return compile_with(include)
    except CppCompileError as error:
        if include == FOLDER or _was_interrupted(error):
            raise
        return compile_with(FOLDER)  # a precompiled header that is damaged is an error to GCC


def _was_interrupted(error: Exception) -> bool:
    """Whether a compiler was ended by Ctrl-C."""
    cause = error.__cause__
    return isinstance(cause, subprocess.CalledProcessError) and cause.returncode == -signal.SIGINT


def _put(built: Path, library: Path, checksum: Path) -> None:
    """Moves a library to where others find it, with its checksum after it.

    Another process may do the same meanwhile with a library of other bytes: no compiler promises
    the same twice. Whoever comes last finds both, and sets the checksum right.
    """
    total = built.with_suffix(".sum")
    total.write_text(_checksum(built))
    built.replace(library)
    total.replace(checksum)
    if not _is_whole(library, checksum):
        write(checksum, _checksum(library).encode())


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def write(place: Path, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all."""
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        written = Path(folder) / place.name
        written.write_bytes(data)
        written.replace(place)


# ---- libraries that travel


def packed(key: str) -> bytes | None:
    """A library of this machine's cache for another one's; None if it is not there, or damaged."""
    library, checksum = _places(key)
    with suppress(OSError):
        if _is_whole(library, checksum):
            return zlib.compress(library.read_bytes(), 1)
    return None


def unpack(key: str, data: bytes) -> None:
    """Puts a library into this machine's cache. Where nothing can be written, nothing is."""
    with suppress(OSError, zlib.error):
        library, checksum = _places(key)
        if _is_whole(library, checksum):
            return
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / "kernel.so"
            built.write_bytes(zlib.decompress(data))
            _put(built, library, checksum)


def _places(key: str) -> tuple[Path, Path]:
    return cache_dir() / f"{key}.so", cache_dir() / f"{key}.sum"


_header_lock = Lock()
_futures: dict[str, Future[ctypes.CDLL]] = {}
_lock = Lock()


def start(source: str) -> Future[ctypes.CDLL]:
    """Begins to build a kernel beside whatever else is compiled; the result is waited for at first
    launch.
    """
    with _lock:
        future = _futures.get(source)
        if future is None or _is_void(future):
            future = _futures[source] = builders.submit(load, source)
        return future


def _is_void(future: Future[ctypes.CDLL]) -> bool:
    """Whether a build came to nothing for reasons that have gone."""
    if future.cancelled():
        return True
    return future.done() and isinstance(future.exception(), InterruptedBuild)


def built(source: str) -> ctypes.CDLL:
    """Waits for what `start` began. Threads may outlive the main one, whose end is that of the
    pool: they build their own.

    Raises:
        CompileError: with the compiler's messages.
    """
    try:
        return start(source).result()
    except CancelledError:
        return load(source)
    except InterruptedBuild:  # who was to be interrupted is not who goes on here
        return start(source).result()


def _after_fork() -> None:
    """A forked child has none of its parent's threads: what they were building is begun again."""
    global _lock, _header_lock
    _lock, _header_lock = Lock(), Lock()
    for source in [s for s, future in _futures.items() if not future.done()]:
        del _futures[source]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
