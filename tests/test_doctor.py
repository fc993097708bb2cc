"""`normpass doctor`: what it tells of a machine, and the mistakes that it finds."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass import doctor
from normpass.__main__ import main
from normpass.backend.run import toolchain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECTIONS = ["versions", "compiler", "machine", "caches", "settings", "trial", "findings"]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own variables are none of a user's."""
    for name in [name for name in os.environ if name.startswith("NORMPASS_")]:
        monkeypatch.delenv(name)


def test_a_machine_on_which_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    capsys.readouterr()
    assert main(["doctor", "--json"]) == 0  # and once more, with what is in the caches now
    found = json.loads(capsys.readouterr().out)
    assert [*found] == SECTIONS
    assert found["versions"]["torch"].startswith(torch.__version__)
    assert found["trial"]["cpu"].startswith("right, 2 kernels in ")
    assert found["findings"] == []
    assert found["caches"]["folder"] == str(toolchain.cache_dir())


def test_as_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMPASS_VERIFY", "1")
    assert main(["doctor", "--no-trial"]) == 0
    text = capsys.readouterr().out
    assert "\n  NORMPASS_VERIFY          1\n" in text
    assert text.endswith("\nnothing wrong was found\n")
    monkeypatch.setenv("NORMPASS_VERFIY", "1")
    assert main(["doctor", "--no-trial"]) == 1
    text = capsys.readouterr().out
    assert "WRONG  NORMPASS_VERFIY is no variable of normpass's\n       expected one of " in text


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cannot_build", lambda: "expected a C++ compiler, found none")


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))


def without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "vectors", lambda: "")


def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def refused_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMPASS_GPU", "cobol")


def gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "installed", lambda _: "not installed")


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        (without_compiler, r"CPU code cannot be compiled: expected a C\+\+ compiler, found none"),
        (full_disk, "nearly full"),
        (without_vectors, "finds no vector instructions"),
        (switched_off, "TORCHDYNAMO_DISABLE=1: torch.compile compiles nothing"),
        (refused_option, "option that is refused: .*cobol"),
        (gpu_without_triton, "there is a GPU and no Triton"),
    ],
)
def test_mistakes_are_found(
    mistake: Callable[[pytest.MonkeyPatch], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [*doctor.findings()]
    mistake(monkeypatch)
    (found,) = doctor.findings()
    assert re.search(problem, found.problem)
    assert found.advice


def test_a_compiler_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing_compiler", lambda: "expected one, found none")
    assert doctor.compiler_version() == "none found"


# ---- the trial


def failing(device: str) -> int:
    raise ValueError("no kernel image is available\nCUDA error: ...")


def warning(device: str) -> int:
    logging.getLogger("normpass.backend").warning("it runs unfused")
    return 2


@pytest.mark.parametrize(
    ("trial", "said", "problem"),
    [
        (failing, "failed", "a layer norm fails on cpu: ValueError: no kernel image is available"),
        (warning, "warned", "a layer norm on cpu: it runs unfused"),
        (lambda _: 0, "nothing fused", "a layer norm is not fused on cpu"),
    ],
)
def test_a_trial_that_goes_wrong(
    trial: Callable[[str], int], said: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "trial", trial)
    found, wrong = doctor.tried("cpu")
    assert found == said
    assert [each.problem for each in wrong] == [problem]


def test_a_wrong_number_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    before = doctor.gradients

    def wrong(function: Any, norm: Any, inputs: Any) -> list[torch.Tensor]:
        y, *rest = before(function, norm, inputs)
        return [y * (1 + 1e-3 * (function is norm)), *rest]

    monkeypatch.setattr(doctor, "gradients", wrong)
    found, (finding,) = doctor.tried("cpu")
    assert found == "failed"
    assert finding.problem.startswith("a layer norm fails on cpu: AssertionError")


def test_where_nothing_is_compiled_nothing_is_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    assert main(["doctor", "--json"]) == 1
    assert "trial" not in json.loads(capsys.readouterr().out)


# ---- GPUs


@pytest.mark.parametrize(("known", "languages"), [(90, "Triton, CUDA C++"), (0, "Triton")])
def test_a_gpu_and_the_languages_of_its_kernels(
    known: int, languages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "capability", lambda _: known)
    assert doctor.gpu(0) == f"NVIDIA H200 (9.0): {languages}"
