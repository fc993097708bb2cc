"""`normpass doctor`: what it tells of a machine, and the mistakes that it finds."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass import doctor
from normpass.__main__ import main
from normpass.backend.run import toolchain
from normpass.doctor import facts, mistakes, trial

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
    monkeypatch.setattr(mistakes, "installed", lambda _: "not installed")


def cache_of_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "somebody_else", lambda _: "everybody")


def only_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "backend", lambda: None)


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        (without_compiler, r"CPU code cannot be compiled: expected a C\+\+ compiler, found none"),
        (full_disk, "nearly full"),
        (without_vectors, "finds no vector instructions"),
        (switched_off, "TORCHDYNAMO_DISABLE=1: torch.compile compiles nothing"),
        (refused_option, "option that is refused: .*cobol"),
        (gpu_without_triton, "there is a GPU and no Triton"),
        (cache_of_everybody, "can be written to by everybody, and code in it is run"),
        (only_on_the_path, 'torch finds no backend "normpass"'),
    ],
)
def test_mistakes_are_found(
    mistake: Callable[[pytest.MonkeyPatch], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [*mistakes.findings()]
    mistake(monkeypatch)
    (found,) = mistakes.findings()
    assert re.search(problem, found.problem)
    assert found.advice
    assert doctor.name_of(found)


def test_a_compiler_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing_compiler", lambda: "expected one, found none")
    assert facts.compiler_version() == "none found"


# ---- the trial


def failing(device: str) -> int:
    raise ValueError("no kernel image is available\nCUDA error: ...")


def warning(device: str) -> int:
    logging.getLogger("normpass.backend").warning("it runs unfused")
    return 2


@pytest.mark.parametrize(
    ("replaced", "said", "problem"),
    [
        (failing, "failed", "a layer norm fails on cpu: ValueError: no kernel image is available"),
        (warning, "warned", "a layer norm on cpu: it runs unfused"),
        (lambda _: 0, "nothing fused", "a layer norm is not fused on cpu"),
    ],
)
def test_a_trial_that_goes_wrong(
    replaced: Callable[[str], int], said: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "trial", replaced)
    found, wrong = trial.tried("cpu")
    assert found == said
    assert [each.problem for each in wrong] == [problem]


def test_a_wrong_number_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    before = trial.gradients

    def wrong(function: Any, norm: Any, inputs: Any) -> list[torch.Tensor]:
        y, *rest = before(function, norm, inputs)
        return [y * (1 + 1e-3 * (function is norm)), *rest]

    monkeypatch.setattr(trial, "gradients", wrong)
    found, (finding,) = trial.tried("cpu")
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
    monkeypatch.setattr(facts, "capability", lambda _: known)
    assert facts.gpu(0) == f"NVIDIA H200 (9.0): {languages}"


# ---- caches


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="who may write is asked of POSIX systems")
def test_who_may_write_to_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert not mistakes.somebody_else(tmp_path)
    tmp_path.chmod(0o777)
    assert mistakes.somebody_else(tmp_path) == "everybody"
    tmp_path.chmod(0o700)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert mistakes.somebody_else(tmp_path) == ("" if owner == 0 else f"user {owner}")


# ---- a torch that nothing can be imported with


def test_a_torch_that_is_too_old(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", lambda _: "2.9.1+cpu")
    monkeypatch.setitem(sys.modules, "normpass.doctor.examination", None)  # cannot be imported
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "WRONG  expected torch 2.11 or newer, found 2.9.1+cpu" in text
    assert "normpass why no-torch" in text


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(doctor, "version", none)
    (found,) = doctor.torch_is_missing()
    assert found.problem == "expected torch 2.11 or newer, found none"


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", "2.15.0a0+git1234", "3.0.0"])
def test_a_torch_that_will_do(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda _: found)
    assert not doctor.torch_is_missing()


def test_the_oldest_torch_is_the_one_that_is_required() -> None:
    (needed,) = (each for each in requires("normpass") or () if each.startswith("torch>"))
    assert needed == "torch>=" + ".".join(map(str, doctor.OLDEST))


# ---- a model

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def net():
    return Net(nn.Linear(16, 256), nn.LayerNorm(256))


plain = net()
in_place = net()
in_place.layers.compile(backend="normpass")
by_another = torch.compile(net(), backend="eager")
by_normpass = torch.compile(net(), backend="normpass", options={"least_bytes": 0})


def broken(x):
    torch._dynamo.graph_break()
    return plain.layers[1](x)


def example_inputs():
    return torch.randn(64, 16)
"""


@pytest.mark.parametrize(
    ("name", "compiled", "problem", "why"),
    [
        ("plain", "no; by normpass it would be: ", None, None),
        (
            "in_place",
            None,
            "in_place.layers is an nn.Sequential whose method compile() was called, "
            "which compiles nothing",
            "compiles-nothing",
        ),
        (
            "by_another",
            "yes; 0 norms fused, 0 not",
            "by_another is compiled, and normpass took no part in it",
            "another-backend",
        ),
        ("by_normpass", "yes; 2 norms fused, 0 not", None, None),
    ],
)
def test_how_a_model_is_compiled(
    name: str,
    compiled: str | None,
    problem: str | None,
    why: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / f"model_for_doctor_{name}.py"
    file.write_text(MODEL)
    try:
        assert main(["doctor", f"{file}:{name}", "--json"]) == (problem is not None)
    finally:
        sys.modules.pop(file.stem, None)
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["norms"] == "1"
    if compiled is not None:
        assert found["model"]["compiled"].startswith(compiled)
    expected = [] if problem is None else [(f"{file}:{problem}", why)]
    assert [(each["problem"], each["why"]) for each in found["findings"]] == expected


def test_a_module_compiled_in_place_is_in_no_graph() -> None:
    """What the finding says: it would be wrong from the version of torch on that mends this."""
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    model.compile(backend=backend)
    model(torch.randn(2, 8))
    assert not compiled


def test_a_target_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "model.py"])
    assert "expected FILE:NAME, such as model.py:model, got 'model.py'" in capsys.readouterr().err
