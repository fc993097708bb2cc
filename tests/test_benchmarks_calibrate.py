"""`normpass bench --calibrate`: what its times mean, and that both sides compute the same."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console

from normpass.backend.run import calibration
from normpass.backend.run.reference import evaluate
from normpass.benchmarks import bench, calibrate
from normpass.passes.cost import PRICED, Calibration
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from pathlib import Path

X = torch.rand(3, calibrate.WIDTH) + 0.5
ELEMENTS = calibrate.ROWS * calibrate.WIDTH


@pytest.mark.parametrize("name", calibrate.FUNCTIONS)
def test_both_sides_compute_the_same(name: str) -> None:
    region = parse(calibrate.pointwise(name, calibrate.CALLS[name]))
    (ours,) = evaluate(region, [X], [3])
    torch.testing.assert_close(ours, calibrate.FUNCTIONS[name](X))


def test_both_sides_read_rows_twice() -> None:
    (ours,) = evaluate(parse(calibrate.centred(calibrate.WIDTH)), [X], [3])
    torch.testing.assert_close(ours, calibrate.minus_sum(X))


def test_every_priced_function_is_measured() -> None:
    names = (*calibrate.FUNCTIONS, "welford")
    like = {name for name in PRICED if name not in names}
    some = replace(calibration.SHIPPED.ours, functions=tuple((name, 1.0) for name in names))
    assert like
    assert all(some.of(name) == 1.0 for name in like)


MACHINE = {
    "memory": 16.0 * 1000,
    "elements far": 1000,
    "cache": 12.0 * 64 * 3,
    "half the cache": 12.0 * 64,
    "elements near": 64,
    "numbers": 3.0,
    "truths": 3.0 + 5 * ELEMENTS,
}
TIMES = {
    **dict.fromkeys(calibrate.FUNCTIONS, 100.0),
    "exp": 100.0 + ELEMENTS,
    "log": 99.0,
    "plain": 100.0,
    "wide": 50.0,
    "narrow": 50.0 + 2 * (ELEMENTS // calibrate.NARROW - calibrate.ROWS),
}


def test_constants_are_differences_of_times() -> None:
    found = calibrate.costs(TIMES, MACHINE, threads=2, launch=7.0)
    assert found.launch == 7.0
    # Two workers, so that each takes twice as long for a byte.
    assert found.memory == 2.0
    assert found.cache == 2 * 2.0
    assert found.truth == 2 * 5.0
    assert found.row == 2.0
    assert found.column == found.regroup == 0
    assert dict(found.functions) == {
        **dict.fromkeys(calibrate.FUNCTIONS, 0.0),
        "exp": 2.0,
        "log": 0.0,  # no less than nothing
    }


def test_what_ours_alone_do() -> None:
    found = calibrate.costs(
        {**TIMES, "whole": 9.0, "pieces": 9.0 + calibrate.REGROUPED_NUMBERS}, MACHINE, 2, 7.0
    )
    assert found.regroup == 2.0


def test_what_inductor_alone_does() -> None:
    extra = {
        "sum": 5.0,
        "columns": 5.0 + 4 * calibrate.TALL * calibrate.ACROSS,
        "summed": 3.0,
        "variance": 3.0 + ELEMENTS / 2,
    }
    found = calibrate.costs({**TIMES, **extra}, MACHINE, threads=2, launch=7.0)
    assert found.column == 2.0
    assert found.of("welford") == 1.0


def test_it_is_printed_and_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = replace(calibration.SHIPPED, ours=replace(calibration.SHIPPED.ours, launch=0.123e-6))
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "costs.json"))
    monkeypatch.setattr(calibrate, "measure", lambda: measured)
    out = io.StringIO()
    assert calibrate.run(Console(file=out, width=100)) == 0
    assert calibration.read(tmp_path / "costs.json") == measured
    assert measured != calibration.SHIPPED
    shipped = calibration.SHIPPED.ours.launch * 1e6
    assert f"0.123 ({shipped:.3g}) us" in out.getvalue()
    assert str(tmp_path / "costs.json") in out.getvalue().replace("\n", "")


def test_bench_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Console] = []
    monkeypatch.setattr(calibrate, "run", lambda console: called.append(console) or 7)
    assert bench.main(["--calibrate"]) == 7
    assert len(called) == 1
    with pytest.raises(SystemExit):
        bench.main(["--calibrate", "--norm", "softmax"])


@pytest.mark.sweep
def test_a_machine_is_measured() -> None:
    """What comes out is what costs may be; how much is no test's business."""
    found = calibrate.measure()
    assert isinstance(found, Calibration)
    for costs in (found.ours, found.theirs):
        assert 0 < costs.memory < 1e-7
        assert 0 <= costs.launch < 1e-3
