"""Processors and systems that are not this one: what is x86's stays there, and a Mac is asked for
nothing that it lacks.
"""

from __future__ import annotations

import ast
import builtins
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cross_compiled import NEON, SVE128, SVE256, Processor
from torch._inductor import config, cpp_builder, cpu_vec_isa

from normpass.backend.inductor import gemm, random_numbers
from normpass.backend.program.machine import CPU
from normpass.backend.run import caches, calibration, toolchain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STAGES = ("decomps", "passes", "backend")

# ---- what is x86's stays there

HEADERS = [*toolchain.HEADERS]
GUARD = r"(?<!!)defined\(CPU_CAPABILITY_(?:{})\)"
# Words that need a processor, and what says that it is one.
WORDS = {
    r"\b_mm\d*_|\b__m(128|256)|\b_MM_|\b_CMP_|(imm|x86)intrin|cpuid|rdtsc|\basm\b": "AVX2|AVX512",
    r"\b_mm512_|\b__m512|\b__mmask|_maskz?_": "AVX512",
}


def unguarded(text: str) -> list[str]:
    """Lines with words of x86 that other processors would compile, or those without AVX-512."""
    found: list[str] = []
    for words, guard in WORDS.items():
        inside: list[bool] = []  # whether each condition that is open asks for such a processor
        for line in re.sub(r"//.*", "", text).splitlines():
            asked = [re.search(GUARD.format(guard), each) for each in line.split("||")]
            if re.match(r"\s*#\s*if", line):
                inside.append(all(asked))
            elif re.match(r"\s*#\s*el(se|if)\b", line):
                inside[-1] = all(asked)
            elif re.match(r"\s*#\s*endif", line):
                inside.pop()
            elif re.search(words, line) and not any(inside):
                found.append(line)
    return found


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_instructions_of_x86_are_guarded(header: Path) -> None:
    text = header.read_text()
    assert any(re.search(words, text) for words in WORDS)
    assert not unguarded(text)


@pytest.mark.parametrize(
    "text",
    [
        "_mm_sfence();",
        "#include <immintrin.h>",
        "#if defined(CPU_CAPABILITY_AVX2)\n#else\n__m256 x;\n#endif",
        "#if !defined(CPU_CAPABILITY_AVX512)\n__m256 x;\n#endif",
        "#if defined(CPU_CAPABILITY_AVX2) || defined(__linux__)\n__m256 x;\n#endif",
        "#if defined(CPU_CAPABILITY_AVX2)\n_mm256_maskz_loadu_ps(mask, p);\n#endif",
        "#if defined(CPU_CAPABILITY_AVX2)\n#endif\n__m256 x;",
    ],
)
def test_an_instruction_without_a_guard_is_found(text: str) -> None:
    assert unguarded(text)


def test_nothing_that_is_printed_is_of_one_processor() -> None:
    """The headers choose: a kernel's text for CPUs has no word of any."""
    gpus = ("cuda", "triton")
    files = [file for file in toolchain.FOLDER.glob("*.py") if not file.name.startswith(gpus)]
    assert len(files) > 5
    for file in files:
        assert not unguarded(file.read_text()), file


@pytest.mark.parametrize("processor", [NEON, SVE256], ids=lambda each: each.name)
def test_numbers_are_drawn_by_torchs_own_code(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", processor.isa)
    assert random_numbers._bits_of_a_vector() == 0


def test_what_is_planned_for() -> None:
    """No vector of theirs is a line of memory."""
    for processor in (NEON, SVE128, SVE256):
        assert processor.machine == replace(CPU, whole_lines=False)


# ---- Macs


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python on one, as far as it tells: its name, no files of Linux's, Apple's compiler, whose
    name is all that is asked of it, and OpenMP in a folder of its own.
    """
    compiler, header = tmp_path / "clang++", tmp_path / "omp" / "include" / "omp.h"
    compiler.write_text("#!/bin/sh\necho Apple clang version 17.0.0\n")
    compiler.chmod(0o755)
    header.parent.mkdir(parents=True)
    header.touch()
    stock = Path.read_text, builtins.open

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(("/proc", "/sys")):
                raise FileNotFoundError(path)
            return real(path, *args, **kwargs)

        return read

    monkeypatch.setenv("OMP_PREFIX", str(tmp_path / "omp"))
    monkeypatch.setattr(Path, "read_text", refusing(stock[0]))
    monkeypatch.setattr(builtins, "open", refusing(stock[1]))
    monkeypatch.setattr(sys, "platform", "darwin")
    for name, value in {"system": "Darwin", "machine": "arm64", "processor": "arm"}.items():
        monkeypatch.setattr(platform, name, lambda value=value: value)
    monkeypatch.setattr(cpp_builder, "_IS_MACOS", True)
    monkeypatch.setattr(cpp_builder, "_IS_LINUX", False)
    asked = (cpu_vec_isa.valid_vec_isa_list, cpp_builder.is_gcc, cpp_builder.is_clang)
    for each in asked:
        each.cache_clear()
    with config.patch({"cpp.cxx": (None, str(compiler))}):
        yield
    for each in asked:
        each.cache_clear()


@pytest.mark.usefixtures("mac")
def test_flags_on_a_mac(tmp_path: Path) -> None:
    """Those that Apple's clang takes, and nothing precompiled."""
    words = toolchain._command.__wrapped__().decode().split()
    assert words[0] == str(tmp_path / "clang++")
    assert words[words.index("-fopenmp") - 1] == "-Xclang"
    assert words[words.index("-undefined") + 1] == "dynamic_lookup"
    assert {"CPU_CAPABILITY_NEON", f"-I{tmp_path}/omp/include"} <= {*words}
    assert {*toolchain.EXTRA_FLAGS} <= {*words}
    assert words.index("-ffp-contract=fast") > words.index("-ffp-contract=off")
    not_there = ("-march=", "-mavx", "-lgomp", "-fexcess-precision", "-fno-tree-loop-vectorize")
    assert not [word for word in words if word.startswith(not_there)]
    assert toolchain._include.__wrapped__() == toolchain.FOLDER
    assert toolchain.missing_compiler.__wrapped__() is None


@pytest.mark.usefixtures("mac")
def test_what_a_mac_does_not_tell() -> None:
    """Has a usual value."""
    assert toolchain._processor.__wrapped__() == b"arm"
    assert caches.private_cache.__wrapped__() == caches.USUAL_PRIVATE
    assert caches.caches_of.__wrapped__("cpu").shared == caches.USUAL_LAST
    assert calibration.processor() == "arm"
    assert gemm._vendor() == ""
    assert not gemm.is_faster.__wrapped__()
    assert random_numbers._bits_of_a_vector() == 0


def test_files_of_linux_may_be_missing() -> None:
    """Wherever one is named, that is survived."""
    root, named = Path(toolchain.__file__).parents[2], 0
    for file in (
        each for stage in ("decomps", "passes", "backend") for each in (root / stage).rglob("*.py")
    ):
        tree = ast.parse(file.read_text())
        survived = [
            range(node.lineno, node.body[-1].end_lineno + 1)
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            and any("OSError" in ast.unparse(each.type or each) for each in node.handlers)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and str(node.value).startswith(("/proc/", "/sys/")):
                assert any(node.lineno in lines for lines in survived), f"{file}:{node.lineno}"
                named += 1
    assert named >= 4


EVERY_MODULE = """
import importlib, pkgutil, platform, sys
import torch, torch._dynamo, torch._inductor.compile_fx
sys.platform, sys.modules["triton"] = "darwin", None
platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"
import normpass
names = []
for stage in "decomps", "passes", "backend":
    folder = importlib.import_module(f"normpass.{stage}").__path__
    names += [each.name for each in pkgutil.walk_packages(folder, f"normpass.{stage}.")]
for name in names:
    if not name.rpartition(".")[2].startswith("triton"):
        importlib.import_module(name)
print(len(names))
"""


def test_every_module_is_imported_on_a_mac() -> None:
    """Where there is no Triton either."""
    done = subprocess.run(
        [sys.executable, "-c", EVERY_MODULE], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200
