"""The command that runs PyTorch's test files: its verdict, and one run of a small file."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from upstream_tests import FAILED, PASSED, SKIPPED, broken, main, outcome, repaired

if TYPE_CHECKING:
    from pathlib import Path

SMALL = """
import unittest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

class TestSmall(unittest.TestCase):
    def test_norm(self):
        assert torch.nn.functional.layer_norm(torch.ones(4, 5), (5,)).shape == (4, 5)

    def test_composed_norm(self):
        x = torch.randn(4, 5, requires_grad=True)  # reverse over forward mode
        with dual_level(), torch.profiler.profile(acc_events=True) as profile:
            torch.nn.functional.layer_norm(make_dual(x, x), (5,))
        assert "aten::var_mean" in {event.key for event in profile.key_averages()}

    @unittest.expectedFailure
    def test_norm_that_fails(self):
        assert False

    def test_something_else(self):
        assert False
"""


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        ("<testcase/>", (PASSED, 0)),
        ("<testcase><failure message='AssertionError'>trace</failure></testcase>", (FAILED, 1)),
        ("<testcase><error message='in setUp'/></testcase>", (FAILED, 1)),
        ("<testcase><skipped type='pytest.skip'/></testcase>", (SKIPPED, 0)),
        ("<testcase><skipped type='pytest.xfail'/></testcase>", (FAILED, 0)),
        ("<testcase><failure message='Unexpected success'/></testcase>", (PASSED, 0)),
    ],
)
def test_the_outcome_of_a_test(report: str, kind: str) -> None:
    assert outcome(ElementTree.fromstring(report)) == kind


def test_what_passed_and_does_not_is_broken() -> None:
    before = {"a": (PASSED, 0), "b": (PASSED, 0), "c": (FAILED, 1), "d": (FAILED, 2)}
    before |= {"e": (PASSED, 0), "f": (FAILED, 0), "g": (SKIPPED, 0)}
    after = {"a": (PASSED, 0), "b": (FAILED, 0), "c": (PASSED, 0), "d": (FAILED, 3)}
    after |= {"f": (FAILED, 0), "g": (PASSED, 0)}
    assert broken(before, after) == ["b", "d", "e"]
    assert repaired(before, after) == ["c"]


@pytest.mark.sweep
def test_a_file_runs_without_the_rules_and_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_small.py").write_text(SMALL)
    out = tmp_path / "out"
    arguments = [str(tmp_path), "--files=test_small.py", "--jobs=0", f"--out={out}"]
    assert main(arguments) == 0, (out / "test_small.rules.log").read_text()
    printed = capsys.readouterr().out
    assert "test_small.py, stock: 1 passed, 2 failed, 0 skipped" in printed
    assert "test_small.py, with the rules: 2 passed, 1 failed, 0 skipped" in printed
    assert "repaired: test_small.TestSmall.test_composed_norm" in printed
    with pytest.raises(SystemExit, match=r"no such file.*test_ops\.py"):
        main([str(tmp_path), "--files=test_ops.py"])
