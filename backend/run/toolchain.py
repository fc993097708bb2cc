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
import tempfile
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

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


@cache
def missing_compiler() -> str | None:
    """Why there is no C++ compiler, or None if there is one."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        wanted = os.environ.get("CXX", "g++ or clang++")
        return f"expected a C++ compiler ({wanted}), found none: {str(error).splitlines()[0]}"
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


@cache
def _include() -> Path:
    """The folder of normpass.h, precompiled where the compiler is GCC: that takes four seconds once
    on a machine and makes each kernel compile in a third of the time. Lies where Inductor keeps its
    own precompiled headers, which outlive a cache.
    """
    from torch._inductor import config, cpp_builder
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if not (config.cpp_cache_precompile_headers and cpp_builder.is_gcc()):
        return FOLDER
    key = hashlib.sha256(_header_digest() + torch.__version__.encode() + _command()).hexdigest()
    home = Path(default_cache_dir()) / "precompiled_headers" / f"normpass_{key[:16]}"
    if not (home / "normpass.h.gch").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            header, *_ = [shutil.copy(header, folder) for header in HEADERS]
            _builder(Path(header), header, Path(folder), FOLDER, precompiling=True).build()
            with suppress(OSError):  # another process was first
                Path(folder).rename(home)
            Path(folder).mkdir(exist_ok=True)
    return home


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
    library, checksum = _places(key)
    if not _is_whole(library, checksum):
        if library.exists() and checksum.exists():  # else another process is about to finish
            log.warning("kernel %s in the cache is damaged: building it again", library)
        _build(source, library, checksum)
    return ctypes.CDLL(str(library))


def found(key: str) -> ctypes.CDLL | None:
    """A library that is in the cache and whole."""
    library, checksum = _places(key)
    return ctypes.CDLL(str(library)) if _is_whole(library, checksum) else None


def _is_whole(library: Path, checksum: Path) -> bool:
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == checksum.read_text()
    except OSError:
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
            with _header_lock:
                include = _include()
            builder = _builder(text, "kernel", Path(folder), include)
            builder.build()
        except CppCompileError as error:
            raise CompileError(str(error)) from error
        text.replace(library.with_suffix(".cpp"))
        _put(Path(builder.get_target_file_path()), library, checksum)
    compiled += 1


def _put(built: Path, library: Path, checksum: Path) -> None:
    """Moves a library to where others find it, with its checksum after it."""
    total = built.with_suffix(".sum")
    total.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
    built.replace(library)
    total.replace(checksum)


def write(place: Path, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all."""
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        written = Path(folder) / place.name
        written.write_bytes(data)
        written.replace(place)


# ---- libraries that travel


def packed(key: str) -> bytes | None:
    """A library of this machine's cache for another one's; None if it is not there."""
    with suppress(OSError):
        return zlib.compress(_places(key)[0].read_bytes(), 1)
    return None


def unpack(key: str, data: bytes) -> None:
    """Puts a library into this machine's cache. Where nothing can be written, nothing is."""
    with suppress(OSError, zlib.error):
        library, checksum = _places(key)
        if library.exists() and checksum.exists():
            return
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / "kernel.so"
            built.write_bytes(zlib.decompress(data))
            _put(built, library, checksum)


def _places(key: str) -> tuple[Path, Path]:
    return cache_dir() / f"{key}.so", cache_dir() / f"{key}.sum"


_header_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_futures: dict[str, Future[ctypes.CDLL]] = {}
_lock = Lock()


def start(source: str) -> Future[ctypes.CDLL]:
    """Begins to build a kernel beside whatever else is compiled; the result is waited for at first
    launch.
    """
    global _pool
    with _lock:
        if source not in _futures:
            if _pool is None:
                _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="normpass-compile")
            # With the caller's settings: torch keeps its own for each context.
            _futures[source] = _pool.submit(copy_context().run, load, source)
        return _futures[source]


def _after_fork() -> None:
    """A forked child has none of its parent's threads: it builds with its own."""
    global _pool, _lock, _header_lock
    _pool, _lock, _header_lock = None, Lock(), Lock()
    for source in [s for s, future in _futures.items() if not future.done()]:
        del _futures[source]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
