"""`normpass bench --processes` and `--warm-start` on a small model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from ranks import needs_gloo

from normpass.benchmarks import bench, processes, warm_start

if TYPE_CHECKING:
    from pathlib import Path

TINY = {"batch": 2, "tokens": 8, "vocabulary": 20, "width": 64, "depth": 1}


@pytest.mark.sweep
@needs_gloo
def test_steps_over_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SIZES", TINY)
    monkeypatch.setattr(processes, "ENGINES", {"FSDP2": processes.sharded})
    assert bench.main(["--processes", "--repeats", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "cpu-processes.json").read_text())
    assert found["sizes"] == TINY
    (one,) = found["engines"].values()
    assert one["timings"].keys() == {"inductor", "normpass"}
    assert one["speedup"] > 0
    assert one["off"] < 1e-4
    assert not one["wrong"]


def test_starts_are_compared_in_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fill the caches and are not counted; the ratio is the median of the pairs'."""
    asked: list[str] = []

    folders: set[str] = set()

    def seconds(backend: str, folder: str) -> float:
        asked.append(backend)
        folders.add(folder)
        return {"inductor": 2.0, "normpass": 3.0}[backend] if len(asked) > 4 else 100.0

    monkeypatch.setattr(warm_start, "seconds", seconds)
    assert bench.main(["--warm-start", "--repeats", "2", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "cpu-warm-start.json").read_text())
    assert found["ratio"] == 1.5
    assert found["seconds"]["normpass"]["median"] == 3
    assert asked[4:] == ["inductor", "normpass", "normpass", "inductor"]
    assert len(folders) == 1  # each backend has its own caches in it


@pytest.mark.sweep
def test_a_start_is_a_process_of_its_own(tmp_path: Path) -> None:
    assert warm_start.seconds("eager", str(tmp_path)) > 0
    assert list((tmp_path / "bytecode").rglob("*.pyc"))
    with pytest.raises(RuntimeError, match=r"(?s)a first step with no_such failed.*no_such"):
        warm_start.seconds("no_such", str(tmp_path))
