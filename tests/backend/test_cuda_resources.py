"""What kernels in CUDA C++ take of a GPU, compiled ahead of time for three generations: registers,
shared memory, and nothing that spills.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import cuda_on_cpu
import pytest
from cuda_ahead import is_recorded, needs_nvrtc, resources
from snapshots import assert_snapshot
from triton_ahead import needs_triton

from normpass.backend.codegen.cuda import generate
from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.run import nvrtc

if TYPE_CHECKING:
    from pathlib import Path


CAPABILITIES = (80, 90, 100)
NORMS = ("layer_norm_forward", "layer_norm_backward", "rms_norm_backward", "softmax_backward")
WIDTHS = ("1024", "4096", "12288", "16384", "65536", "131072")
DTYPES = ({"t": "bf16", "w": "f32"}, {"t": "f16"}, {"t": "f32"}, {"t": "f64"})
# Types and widths, by the folder of their snapshots.
SETS = {"few": (DTYPES[::2], ("4096", "65536")), "all": (DTYPES, WIDTHS)}


@pytest.mark.one_in(4)
@needs_nvrtc
@needs_triton  # whose cuobjdump tells
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("name", [*NORMS, "modulated_backward", "three_levels"])
@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.sweep)])
def test_resources(which: str, name: str, tmp_path: Path) -> None:
    dtypes, widths = SETS[which]
    lines = []
    for types in dtypes:
        for width in widths:
            for capability in CAPABILITIES:
                with suppress(UnsupportedPlanError):  # rows that no team of that GPU holds
                    plan = cuda_on_cpu.plan_of(name, capability, c=width, **types)
                    found = f"{' '.join(types.values()):<8} {width:>6}  sm_{capability}"
                    lines.append(f"{found}  {resources(plan, capability, tmp_path)}")
    if is_recorded():
        assert_snapshot(f"cuda/resources/{which}/{name}.txt", "\n".join(lines) + "\n")


@needs_nvrtc
def test_what_the_compiler_says_is_in_the_error() -> None:
    with pytest.raises(nvrtc.CompileError, match='identifier "nonsense" is undefined'):
        nvrtc.compiled("int x = nonsense;", 90)


@needs_nvrtc
def test_what_was_compiled_is_found_again(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = generate(cuda_on_cpu.plan_of("softmax", c="1024")).text
    code = nvrtc.compiled(text, 90)
    assert [each.suffix for each in (fresh_cache / "normpass" / "cuda").iterdir()] == [".cubin"]
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.compiled(text, 90) == code


@needs_nvrtc
def test_a_damaged_binary_is_compiled_again(fresh_cache: Path) -> None:
    text = generate(cuda_on_cpu.plan_of("softmax", c="1024")).text
    code = nvrtc.compiled(text, 90)
    (file,) = (fresh_cache / "normpass" / "cuda").iterdir()
    for damaged in (b"", file.read_bytes()[:-7]):
        file.write_bytes(damaged)
        assert nvrtc.compiled(text, 90) == code
    assert len(file.read_bytes()) > len(code)


def test_without_the_compiler_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    nvrtc.version.cache_clear()
    try:
        assert nvrtc.version() is None
    finally:
        nvrtc.version.cache_clear()
