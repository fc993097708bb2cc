"""The command that runs PyTorch's operator database: on a few operators, and its verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from operator_cases import is_nearer
from operator_database import Comparison, main, read, write

if TYPE_CHECKING:
    Outcomes = dict[tuple[str, str], str]

SCRIPT = Path(__file__).parent / "operator_database.py"
BEFORE: Outcomes = {
    ("add", "grad"): "right",
    ("add", "vmap"): "right",
    ("nn.functional.layer_norm", "jvp-in-one"): "fails: RuntimeError: _fw_primal",
    ("sinc", "grad"): "fails: Unsupported",
    ("sinc", "jvp"): "wrong: 1 of 5 elements",
    ("unique", "vmap"): "not counted: RuntimeError",
}


def test_what_is_worse_is_broken_and_what_is_right_now_is_repaired() -> None:
    after = {
        **BEFORE,
        ("add", "grad"): "wrong: 5 of 5 elements",
        ("nn.functional.layer_norm", "jvp-in-one"): "right",
        ("sinc", "grad"): "wrong: 1 of 5 elements",
        ("sinc", "jvp"): "fails: Unsupported",
    }
    del after["add", "vmap"]
    compared = Comparison.of(BEFORE, after)
    assert compared.broken == [("add", "grad"), ("add", "vmap"), ("sinc", "grad")]
    assert compared.repaired == [("nn.functional.layer_norm", "jvp-in-one")]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "exact", "nearer"),
    [
        ([1.0, 2.0], [1.1, 2.0], [1.0, 2.0], True),
        ([1.0, 2.1], [1.1, 2.0], [1.0, 2.0], True),
        ([1.0, 2.2], [1.1, 2.0], [1.0, 2.0], False),
        ([NAN, 2.0], [1.1, 2.0], [1.0, 2.0], False),
        ([1.0, NAN], [1.1, NAN], [1.0, NAN], True),
        ([1.0, 2.0], [1.1, NAN], [1.0, NAN], False),
        ([1.0, INF], [1.1, INF], [1.0, INF], True),
        ([1.0, -INF], [1.1, INF], [1.0, INF], False),
        ([1.0, INF], [1.1, 2.0], [1.0, 2.0], False),
        ([1.0], [1.1, 2.0], [1.0, 2.0], False),
    ],
)
def test_what_is_nearer_to_float64(
    found: list[float], expected: list[float], exact: list[float], nearer: bool
) -> None:
    singles = ([[torch.tensor(values)], []] for values in (found, expected))
    right = [[torch.tensor(exact, dtype=torch.float64)], []]
    assert is_nearer(*singles, right) is nearer


def test_no_change_is_no_news() -> None:
    assert Comparison.of(BEFORE, BEFORE) == Comparison([], [])


def test_a_run_is_stored_sorted_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    write(file, dict(reversed(BEFORE.items())))
    assert read(file) == BEFORE
    assert file.read_text().splitlines()[0] == "add\tgrad\tright"


def test_a_regression_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    write(before, {("tanh", "grad"): "right", ("tanh", "vmap"): "fails: Unsupported"})
    write(after, {("tanh", "grad"): "fails: made up", ("tanh", "vmap"): "right"})
    arguments = ["--only", "^tanh$", "--before", str(before), "--after", str(after)]
    assert main([*arguments, "--transforms", "grad,vmap"]) == 1
    printed = capsys.readouterr().out
    assert "broken: 1\n  tanh  grad\n    before  right\n    after   fails: made up\n" in printed
    assert "repaired: 1\n  tanh  vmap\n" in printed
    assert main([*arguments, "--transforms", "vmap"]) == 0


def test_a_stored_run_must_have_every_case(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    write(empty, {})
    arguments = ["--only", "^tanh$", "--before", str(empty), "--after", str(empty)]
    with pytest.raises(SystemExit, match="lacks 7 cases"):
        main(arguments)


@pytest.mark.sweep
def test_a_layer_norm_is_repaired_and_nothing_else_changes(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, "--out", tmp_path),
            *("--only", r"^(nn\.functional\.layer_norm|eq|empty_like)$"),
            *("--transforms", "vmap,jvp-in-one"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stock, registered = read(tmp_path / "stock.txt"), read(tmp_path / "registered.txt")
    repaired = ("nn.functional.layer_norm", "jvp-in-one")
    assert stock.pop(repaired).startswith("fails: ")
    assert registered.pop(repaired) == "right"
    assert stock == registered
    assert stock["nn.functional.layer_norm", "vmap"] == "right"
    assert stock["eq", "vmap"] == "right"
    assert stock["eq", "jvp-in-one"].startswith("not counted: ")
    assert stock["empty_like", "vmap"].startswith("not counted: ")
    assert "repaired: 1\n" in done.stdout
