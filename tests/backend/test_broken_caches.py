"""Cache folders that cannot be written to, that are full, damaged, or of another machine, with a
compiler or without: the model runs, its numbers are right, and nothing half-written is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import processes
import pytest
from torch._dynamo.utils import counters
from torch._inductor import config, cpp_builder

from normpass.backend import entry
from normpass.backend.inductor.bundled import Kernels
from normpass.backend.run import known, toolchain
from normpass.backend.run.runtime import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("normpass")]


def is_uncompiled(net: nn.Module, width: int, caplog: pytest.LogCaptureFixture) -> str:
    """Checks that a model runs, right and with nothing fused; the one warning that says why."""
    function = processes.compiled(net, "inductor")
    for rows in (9, 5):
        assert processes.differences(function, net, processes.example(width, rows)) == []
    assert not [key for key in counters["normpass"] if key.startswith("fused")]
    (warning,) = warnings_of(caplog)
    assert "the model runs uncompiled: " in warning
    return warning


# ---- folders that cannot be written to


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_a_folder_where_nobody_can_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even root. Of a folder that cannot be made torch itself says so, in torch.compile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/self/fd")
    assert "a cache folder that can be written to" in is_uncompiled(processes.model(81), 81, caplog)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=os.strerror)
def test_a_folder_that_cannot_be_written_to(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    entry._warn_once.cache_clear()
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert os.strerror(number) in is_uncompiled(processes.model(82), 82, caplog)


@pytest.mark.usefixtures("faults_are_meant")
@pytest.mark.parametrize(
    ("method", "suffix"),
    [
        ("write_text", ".cpp"),
        ("write_text", ".sum"),
        ("replace", ".cpp"),
        ("replace", ".so"),
        ("replace", ".sum"),
    ],
)
def test_a_disk_that_is_full_in_the_middle(
    method: str,
    suffix: str,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = getattr(Path, method)

    def full(path: Path, other: Any) -> Any:
        """Writes half of a text."""
        if method == "write_text" and path.suffix == suffix:
            original(path, other[: len(other) // 2])
        if suffix in (path.suffix, getattr(other, "suffix", None)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, other)

    text = processes.small(221 + len(method) * len(suffix) + ord(suffix[-1]))
    with monkeypatch.context() as patched:
        patched.setattr(Path, method, full)
        kernel = Kernel(text)
        assert processes.is_right(kernel)
        assert processes.is_right(kernel)
    (warning,) = warnings_of(caplog)
    assert "runs unfused" in warning
    assert "No space left" in warning
    assert not [file for file in (fresh_cache / "normpass").iterdir() if file.is_dir()]
    # What the next process finds there.
    toolchain._futures.clear()
    kernel = Kernel(text)
    assert processes.is_right(kernel)
    assert kernel._function
    assert processes.has_whole_libraries_only(fresh_cache)


# ---- machines without a compiler


@pytest.fixture
def another_machine() -> Iterator[None]:
    """What is known of the compiler is forgotten."""

    def forget() -> None:
        toolchain.missing_compiler.cache_clear()
        cpp_builder.cpp_compiler_search.cache_clear()
        entry._warn_once.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("another_machine")
@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "/dev/null", "c++ outside of PATH"])
def test_a_machine_without_a_compiler(
    compiler: str,
    fresh_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither one that is not there nor a file that is no program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with config.patch({"cpp.cxx": (None, compiler.split()[0])}):
        warning = is_uncompiled(processes.model(83), 83, caplog)
    assert "expected a C++ compiler" in warning


SERVE = """
import logging, sys
import processes
from torch._dynamo.utils import counters
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
net = processes.model(84)
print(processes.differences(processes.compiled(net, "inductor"), net, processes.example(84)))
"""


def test_a_filled_cache_and_no_compiler(fresh_cache: Path) -> None:
    """Inductor asks for its version before it looks into its cache."""
    net, x = processes.model(84), processes.example(84)
    assert processes.differences(processes.compiled(net, "inductor"), net, x) == []
    filled = {file.name for file in (fresh_cache / "normpass").iterdir()}
    assert filled
    process = processes.program(SERVE, fresh_cache, CXX="/dev/null")
    out, errors = process.communicate(timeout=processes.PATIENCE)
    assert out.strip() == "[]", errors
    (warning,) = [line for line in errors.splitlines() if line.startswith("normpass")]
    assert "the model runs uncompiled: expected a C++ compiler (/dev/null), found none" in warning
    assert {file.name for file in (fresh_cache / "normpass").iterdir()} == filled


# ---- files that are not what they should be


def written(fresh_cache: Path, suffix: str) -> Path:
    (file,) = (fresh_cache / "normpass").glob(f"*{suffix}")
    return file


def replace(file: Path, content: bytes) -> None:
    """As another process does: what this one has loaded stays as it is."""
    file.unlink()
    file.write_bytes(content)


def _is_right(text: str) -> bool:
    return processes.is_right(Kernel(text))


@pytest.mark.parametrize("content", [b"", b"not an ELF file" * 1000], ids=["empty", "garbage"])
def test_a_library_that_cannot_be_loaded_is_built_again(content: bytes, fresh_cache: Path) -> None:
    """Whole it may be: one of a machine with newer libraries than this one has."""
    text = processes.small(241 + (not content))
    # In another process: a library that this one has loaded would not be looked at again.
    assert processes.answer_of_fork(_is_right, text) is True
    replace(written(fresh_cache, ".so"), content)
    replace(written(fresh_cache, ".sum"), hashlib.sha256(content).hexdigest().encode())
    before, kernel = toolchain.compiled, Kernel(text)
    assert processes.is_right(kernel)
    assert kernel._function
    assert toolchain.compiled == before + 1
    assert processes.has_whole_libraries_only(fresh_cache)


def test_a_damaged_library_does_not_travel(fresh_cache: Path) -> None:
    """What comes out of a pickle gets a checksum of its own: it would be taken for whole."""
    kernel = Kernel(processes.small(243))
    assert processes.is_right(kernel)
    whole = toolchain.packed(kernel.facts.library)
    assert whole
    library = written(fresh_cache, ".so")
    replace(library, library.read_bytes()[:-40])
    assert toolchain.packed(kernel.facts.library) is None
    _, (facts, libraries) = Kernels(read={kernel.name: kernel.facts}).__reduce__()
    assert facts
    assert not libraries
    # But one that comes from elsewhere takes its place.
    toolchain.unpack(kernel.facts.library, whole)
    assert processes.has_whole_libraries_only(fresh_cache)
    assert toolchain.packed(kernel.facts.library) == whole


@pytest.mark.parametrize("content", ["", "[]", '{"library": "1"', '{"more": 1}', "\0\xff"])
def test_damaged_facts_are_written_again(content: str, fresh_cache: Path) -> None:
    """Else each process would plan and print the kernel."""
    text = processes.small(244)
    kernel = Kernel(text)
    assert processes.is_right(kernel)
    right = written(fresh_cache, ".json").read_text()
    written(fresh_cache, ".json").write_text(content)
    before = toolchain.compiled
    again = Kernel(text)
    assert again._recalled is None
    assert processes.is_right(again)
    assert toolchain.compiled == before
    assert json.loads(written(fresh_cache, ".json").read_text()) == json.loads(right)
    assert known.recall(kernel.name) == kernel.facts


@pytest.fixture
def other_headers() -> Iterator[None]:
    """Where the precompiled header lies is asked for again."""
    toolchain._include.cache_clear()
    yield
    toolchain._include.cache_clear()


@pytest.mark.usefixtures("other_headers")
@pytest.mark.parametrize("damage", ["none can be written", "it is cut short", "it is gone"])
def test_kernels_are_built_without_a_precompiled_header(
    damage: str, tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies outside of the cache, where files of /tmp are cleared away one by one."""
    if not cpp_builder.is_gcc():
        pytest.skip("only GCC has one")
    home = tmp_path / "normpass"
    home.mkdir()
    (home / "normpass.h.gch").write_bytes(b"gpch" * 1000)
    if damage == "it is cut short":
        monkeypatch.setattr(toolchain, "_include", lambda: home)
    else:
        monkeypatch.setattr(toolchain, "_precompile", fail if damage[0] == "n" else lambda _: None)
        monkeypatch.setattr(
            "torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path)
        )
        assert toolchain._include() == toolchain.FOLDER
    kernel = Kernel(processes.small(245 + len(damage)))
    assert processes.is_right(kernel)
    assert kernel._function


def fail(home: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
