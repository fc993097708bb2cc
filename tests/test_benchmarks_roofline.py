"""What is computed for a GPU without one: cases, their graphs, and the traffic of their plans."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.benchmarks import bench, roofline
from normpass.benchmarks.gpu_cases import DTYPES, PHASES, ROWS, GpuCase, listed
from normpass.benchmarks.gpu_graphs import bytes_of, fused_graphs, graphs_of, least_bytes_of

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = (32, 64, 16, 16)


def test_every_listed_case_is_there() -> None:
    cases = listed(dtypes=list(DTYPES))
    assert len({case.label for case in cases}) == len(cases)
    rows = [case for case in cases if case.suite == "rows"]
    assert len(rows) == 2 * len(PHASES) * len(ROWS) * len(DTYPES)
    assert {case.suite for case in cases} == {"rows", "ConvNeXt", "ResNet-50", "Stable Diffusion"}
    images = [case for case in cases if case.norm in {"batch_norm", "group_norm"}]
    assert {case.channels_last for case in images} == {True, False}
    assert cases[0].dtype == "bfloat16"


def test_shapes_that_are_not_listed_can_be_asked_for() -> None:
    assert {case.label for case in listed(shapes=[(8, 64)], phases=["backward"])} == {
        "layer_norm 8x64 bfloat16 backward",
        "rms_norm 8x64 bfloat16 backward",
    }
    given = listed(["group_norm"], [(2, 64, 4, 4)], phases=["forward"])
    assert [case.channels_last for case in given] == [False, True]
    assert not listed(["group_norm"], [(2, 33, 4, 4)])  # 32 groups


@pytest.mark.parametrize(
    ("norm", "phase"),
    [
        *((norm, phase) for norm in ("layer_norm", "rms_norm") for phase in PHASES),
        *((norm, "both") for norm in ("batch_norm", "group_norm")),
        ("batch_norm", "double backward"),
    ],
)
def test_the_least_traffic_is_that_of_the_graphs(norm: str, phase: str) -> None:
    shape = (256, 512) if norm in {"layer_norm", "rms_norm"} else IMAGES
    case = GpuCase(norm, shape, "bfloat16", phase)
    graphs = fused_graphs(case, roofline.H200)
    found = sum(least_bytes_of(graph) for graph, _ in graphs)
    assert found == pytest.approx(case.least_bytes(), rel=2e-3)


def test_statistics_are_kept_as_on_a_gpu() -> None:
    """In float32, whatever the dtype of x; a CPU keeps them in that of x."""
    (forward,) = graphs_of(GpuCase("layer_norm", (256, 512), "bfloat16", "forward"))
    kept = [node.meta["val"] for node in forward.graph.output_node().all_input_nodes]
    statistics = [value for value in kept if value.numel() == 256]
    assert {value.dtype for value in statistics} == {torch.float32}
    assert len(statistics) == 2


def test_a_row_that_is_held_is_read_once() -> None:
    found = roofline.roofline(GpuCase("layer_norm", (4096, 1024), "bfloat16", "backward"))
    (region,) = found.regions
    assert found.ratio == pytest.approx(1.0, abs=1e-3)
    assert found.seconds == pytest.approx(25.2e6 / 4.8e12, rel=1e-2)
    assert region.main_launch.rows == "held"
    assert 0 < region.main_launch.on_each <= 64
    assert len(region.launches) == 2  # the second adds up what programs have of dweight and dbias
    assert found.beside == 0


def test_a_batch_norm_larger_than_the_cache_is_read_twice() -> None:
    found = roofline.roofline(GpuCase("batch_norm", (256, 64, 112, 112), "bfloat16", "backward"))
    assert found.ratio == pytest.approx(5 / 3, abs=0.01)
    assert any("moves 1.67x the least" in line for line in roofline.remarks([found]))


def test_programs_that_wait_for_the_last_are_told_of() -> None:
    """300 rows for 132 multiprocessors: some have three, most have two."""
    found = roofline.roofline(GpuCase("rms_norm", (300, 12288), "bfloat16", "backward"))
    assert found.regions[0].main_launch.busy == pytest.approx(300 / 132 / 3)
    assert any("are busy 76%" in line for line in roofline.remarks([found]))


def test_runs_shorter_than_a_sector_are_told_of() -> None:
    """Ten bfloat16 channels of a group lie beside one another: 20 bytes of a sector's 32."""
    case = GpuCase("group_norm", (8, 320, 64, 64), "bfloat16", "forward", channels_last=True)
    found = roofline.roofline(case)
    assert found.regions[0].partial > 0.9 * found.moved
    assert any("parts of sectors" in line for line in roofline.remarks([found]))


def test_what_stays_with_inductor_has_no_ratio() -> None:
    found = roofline.roofline(GpuCase("rms_norm", (64, 256), "bfloat16", "forward"))
    assert not found.regions
    assert found.ratio is None
    assert "too small" in found.refused[0]
    assert "Inductor's" in [*roofline.figures_of(found)]
    assert len([*roofline.figures_of(found)]) == len(roofline.COLUMNS)


def test_what_stays_beside_regions_is_counted_as_one_kernel() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.view(64).sin().cos() * 2).view(8, 8)

    graph = make_fx(function, tracing_mode="fake")(torch.empty(8, 8)).graph
    (x,) = graph.find_nodes(op="placeholder")
    assert bytes_of(x) == 256
    assert roofline.bytes_beside(graph) == 2 * 256


def test_the_command_prints_and_writes_what_it_has_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--norm", "rms_norm", "--shape", "4096x1024", "--phase", "backward"]
    file = tmp_path / "new" / "roofline.json"
    assert roofline.main([*asked, "--json", str(file)]) == 0
    assert roofline.COMPUTED in capsys.readouterr().out
    document = json.loads(file.read_text())
    (case,) = document["cases"]
    assert document["what"] == case["what"] == roofline.COMPUTED
    assert case["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert case["regions"][0]["launches"]
    assert roofline.main([*asked, "--markdown"]) == 0
    table = capsys.readouterr().out
    assert roofline.COMPUTED in table
    assert "| rms_norm 4096x1024, bfloat16 | 1.00 (5) |" in table


def test_the_benchmark_has_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = listed(["rms_norm"], [(4096, 1024)], phases=["forward"])
    monkeypatch.setattr(bench, "listed", lambda: few)
    assert bench.main(["--roofline", "--out", str(tmp_path)]) == 0
    assert roofline.COMPUTED in capsys.readouterr().out
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["cases"][0]["label"] == few[0].label


def test_the_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--list", "--norm", "group_norm", "--phase", "forward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "group_norm 8x320x64x64 channels_last bfloat16 forward" in lines
