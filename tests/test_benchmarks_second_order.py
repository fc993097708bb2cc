"""`normpass bench --second-order` on programs of the test's own."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass.benchmarks import bench, second_order
from normpass.benchmarks.second_order import Program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def penalty(compile: Callable[[Any], Any], off_by: float = 0.0) -> Callable[[], torch.Tensor]:
    f = compile(lambda x: (x @ x).tanh().sum())
    is_eager = f.__name__ == "<lambda>" and not hasattr(f, "_torchdynamo_orig_callable")
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()

    def step() -> torch.Tensor:
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x)
        return h + (0.0 if is_eager else off_by)

    return step


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("normpass.examples.mine")
    module.penalty = penalty  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "normpass.examples.mine", module)
    mine = {
        "right": Program("mine", "penalty"),
        "wrong": Program("mine", "penalty", {"off_by": 1.0}),
        "missing": Program("no_such_module"),
    }
    monkeypatch.setattr(second_order, "PROGRAMS", mine)


def test_what_is_right_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--second-order", "right", "missing", "--repeats", "2", "--out", str(tmp_path)]
    assert bench.main([*options, "--system-allocator"]) == 0
    out = capsys.readouterr().out
    assert "missing is left out" in out
    assert "right: inductor cannot: " in out
    found = json.loads((tmp_path / "cpu-second-order.json").read_text())
    assert list(found["programs"]) == ["right"]
    assert found["programs"]["right"]["seconds"].keys() == {"eager", "normpass"}
    assert found["programs"]["right"]["speedup_over_eager"] > 0


def test_what_is_wrong_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--second-order", "wrong", "--repeats", "2", "--out", str(tmp_path)]
    assert bench.main([*options, "--system-allocator"]) == 1
    assert "away from eager's" in capsys.readouterr().out
