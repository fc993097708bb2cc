"""Whole models through the GPU's compile path, without a GPU: a training step is traced, fused and
printed by Inductor, and the kernels of its regions are compiled. What they compute is tested
elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_absent
import pytest
from snapshots import assert_snapshot
from triton_ahead import is_recorded, needs_triton

from normpass.backend.run import nvrtc

PROGRAM = Path(gpu_absent.__file__).with_name("gpu_models.py")
pytestmark = [needs_triton, gpu_absent.needs_cpu_build]
# Regions of a step of each model in its tiny size, forward and backward: norms and softmaxes.
TINY = {"gpt2": 10, "vit": 10, "resnet": 15, "unet": 16}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_absent.library(tmp_path_factory.mktemp("gpu"))


def compiled(library: Path, size: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(library), size, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["graphs"] == 2
    assert not found["called"], "regions are called through the dispatcher"
    assert not found["faults"]
    assert not found["warnings"]
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["gpt2", "resnet", "unet", pytest.param("vit", marks=pytest.mark.sweep)]
)
def test_steps_compile(name: str, library: Path) -> None:
    found = compiled(library, "tiny", name)
    assert len(found["regions"]) == TINY[name]
    assert all(" 0 spilled" in kernel for _, _, *kernels in found["regions"] for kernel in kernels)


@pytest.mark.sweep
@pytest.mark.parametrize("name", TINY)
def test_what_their_kernels_take(name: str, library: Path) -> None:
    """At published sizes: registers, and nothing that spills."""
    found = compiled(library, "full", name)
    assert all(" 0 spilled" in kernel for _, _, *kernels in found["regions"] for kernel in kernels)
    if is_recorded() and nvrtc.version() == (13, 5):
        text = "\n".join("\n    ".join(region) for region in found["regions"])
        assert_snapshot(f"gpu/models/{name}.txt", f"{found['begun']} regions\n{text}\n")
