"""The console script: what it prints, and what it says when it is called wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import normpass
from normpass import commands
from normpass.__main__ import COMMANDS, main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(512)

    def forward(self, x):
        return self.norm(x) + x

class NeedsWidth(nn.Module):
    def __init__(self, width):
        super().__init__()

net = Net()
number = 3

def double(x, y=1):
    return 2 * x + y

def example_inputs():
    return (torch.randn(1024, 512, requires_grad=True),)
"""


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "some_model.py"
    file.write_text(MODEL)
    yield file
    sys.modules.pop(file.stem, None)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert normpass.__version__ in text


def test_no_command_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_an_unknown_command_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exlpain"]) == 2
    text = capsys.readouterr().err
    assert "'exlpain'" in text
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert f"normpass {command}" in capsys.readouterr().out


def test_an_instance_is_loaded_with_its_inputs(model_file: Path) -> None:
    target = commands.load_target(f"{model_file}:net")
    assert isinstance(target.function, torch.nn.Module)
    assert [x.shape for x in target.args] == [(1024, 512)]
    assert target.kwargs == {}


def test_a_class_is_built_and_a_function_is_taken(model_file: Path) -> None:
    assert isinstance(commands.load_target(f"{model_file}:Net").function, torch.nn.Module)
    assert commands.load_target(f"{model_file}:double").function(2) == 5


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        ("(1, 2)", (1, 2), {}),
        ("[1, 2]", (1, 2), {}),
        ("{'x': 1}", (), {"x": 1}),
        ("5", (5,), {}),
        ("lambda: (1,)", (1,), {}),
    ],
)
def test_inputs_in_every_form(
    model_file: Path, inputs: str, args: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    model_file.write_text(f"def f(*args, **kwargs): ...\nexample_inputs = {inputs}\n")
    target = commands.load_target(f"{model_file}:f")
    assert (target.args, target.kwargs) == (args, kwargs)


def test_inputs_of_the_target_come_before_those_of_the_file(model_file: Path) -> None:
    model_file.write_text("def f(x): ...\nf.example_inputs = (1,)\nexample_inputs = (2,)\n")
    assert commands.load_target(f"{model_file}:f").args == (1,)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{file}", "expected FILE:NAME"),
        ("nowhere.py:net", "expected a Python file, found none at nowhere.py"),
        ("{file}:nte", "has no 'nte'; it has .*net"),
        ("{file}:number", "got int"),
        ("{file}:NeedsWidth", "cannot be built without arguments .*width"),
    ],
)
def test_a_wrong_target_says_what_was_expected(
    model_file: Path, target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["explain", target.format(file=model_file)])
    assert done.value.code == 2
    import re

    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_missing_inputs_are_asked_for(model_file: Path) -> None:
    model_file.write_text("def f(x): ...\n")
    with pytest.raises(commands.BadTarget, match=r"expected example_inputs\(\) beside .*:f"):
        commands.load_target(f"{model_file}:f")


def test_an_error_in_the_users_file_is_its_own(model_file: Path) -> None:
    model_file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        commands.load_target(f"{model_file}:f")


def test_explain_prints_and_saves(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["explain", f"{model_file}:net", "--html", str(page), "--source"]) == 0
    text = capsys.readouterr().out
    assert "norm" in text
    assert "backward" in text
    assert page.read_text().lstrip().lower().startswith("<!doctype html")


def test_explain_times_and_measures_memory(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    # So that something is fused, and compiled by both.
    model_file.write_text(MODEL.replace("(1024, 512", "(8192, 512"))
    command = ["explain", f"{model_file}:net", "--time", "--memory", "--html", str(page)]
    assert main(command) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "faster" in line)
    assert [cell.strip() for cell in row.split("|")[-4:-1]] == ["time", "Inductor", "faster"]
    assert "not timed" not in text
    assert "memory of a step with normpass: " in text
    assert "memory of a step with Inductor: " in text
    assert "Saved for the backward" in page.read_text()


def test_kernels_prints_sources(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", f"{model_file}:net"]) == 0
    text = capsys.readouterr().out
    assert "backward of norm" in text
    assert "{" in text


def test_kernels_of_a_model_without_norms(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", f"{model_file}:double"]) == 1
    assert "nothing was fused" in capsys.readouterr().out


def test_coverage_counts_what_is_ported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("ported", "open", "out of scope", "linalg", "total"))
    assert f"303 definitions in PyTorch's files, {len(normpass.rules())} rules" in text


def test_coverage_of_one_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--family", "norm"]) == 0
    text = capsys.readouterr().out
    assert "double-backward" in text
    assert "linalg" not in text


def test_an_unknown_family_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["coverage", "--family", "nrom"])
    assert done.value.code == 2
    assert "linalg, loss" in capsys.readouterr().err.replace("\n", " ")


def test_coverage_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--rules"]) == 0
    text = capsys.readouterr().out
    rules = normpass.rules()
    assert f"{len(rules)} rules" in text
    assert all(rule.name.removeprefix("aten.")[:12] in text for rule in rules)


def test_coverage_lists_the_rules_of_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coverage", "--rules", "--family", "norm"]) == 0
    text = capsys.readouterr().out
    assert "native_layer_norm" in text
    assert "tanh" not in text


def test_coverage_lists_what_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    from normpass.decomps.coverage import rows

    assert main(["coverage", "--open"]) == 0
    text = capsys.readouterr().out
    names = [entry.row.name for entry in rows() if entry.status == "open"]
    assert f"{len(names)} open" in text
    assert all(name[:12] in text for name in names)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aten.renorm", {"decomposition, Inductor", "derivative, normpass.vjp"}),
        ("aten::_weight_norm_interface_backward.default", {"decomposition, normpass"}),
        ("aten.add", {"aten.add.Tensor", "aten.add.Scalar"}),
        ("aten.dropout", set()),  # composite: there is nothing to put in its place
    ],
)
def test_coverage_of_an_operator(
    name: str, said: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coverage", "--op", name]) == 0
    text = capsys.readouterr().out
    assert all(each in text for each in said)
    assert ("normpass" in text) == any("normpass" in each or "add" in each for each in said)


@pytest.mark.parametrize("name", ["aten.renrom", "renorm", "", "aten"])
def test_coverage_of_what_is_no_operator(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["coverage", "--op", name])
    assert "expected an operator, such as aten.renorm; found" in capsys.readouterr().err


def test_coverage_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "docs" / "rules.md"
    assert main(["coverage", "--page", str(file)]) == 0
    assert f"saved {file}" in capsys.readouterr().out
    assert "### `layer_norm_double_backward`" in file.read_text()
