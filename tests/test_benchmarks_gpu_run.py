"""The command that measures on a GPU, run on a CPU with tiny tensors, and its training steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass.benchmarks import gpu, gpu_steps
from normpass.benchmarks.gpu_clock import Place
from normpass.benchmarks.gpu_models import MODELS
from normpass.benchmarks.gpu_peers import PEERS
from normpass.benchmarks.gpu_variants import EAGER, OURS, STOCK, Variant, compiled
from normpass.benchmarks.steps import CONTROL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from normpass.benchmarks.gpu_cases import GpuCase

CPU = Place.of("cpu")
TINY = ["--device", "cpu", "--shape", "8x64", "--norm", "rms_norm", "--repeats", "2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of tensors this small others would only stand in its way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stands_for_compiled(case: GpuCase) -> Any:
    return compiled(case)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: eager mode stands for all."""

    def variants(*, fuse_all: bool, without: Sequence[str]) -> list[Variant]:
        assert fuse_all
        names = (EAGER, STOCK, OURS)
        return [Variant(name, stands_for_compiled) for name in names if name not in without]

    monkeypatch.setattr(gpu, "variants", variants)
    monkeypatch.setattr(gpu, "measure_host", lambda place: [])
    monkeypatch.setattr(gpu_steps, "WARM_UP", 1)
    monkeypatch.setattr(
        gpu_steps, "backends", lambda place: {EAGER: None, STOCK: None, OURS: {"backend": "eager"}}
    )


def run(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit status and what was written."""
    status = gpu.main([*TINY, "--out", str(tmp_path), *more])
    (file,) = tmp_path.glob("*.json")
    return status, json.loads(file.read_text())


@pytest.mark.usefixtures("stubs")
def test_every_figure_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, written = run(tmp_path, "--phase", "backward", "--phase", "double backward")
    assert status == 0
    assert written["complete"]
    assert written["gpu"]["name"] == "cpu"
    assert written["machine"]["versions"]["torch"] == torch.__version__
    assert written["peers"].keys() == {peer.name for peer in PEERS}
    assert len(written["targets"]) == 10
    backward, double = written["cases"]
    assert double["case"]["phase"] == "double backward"
    for name in (EAGER, STOCK, OURS):
        assert backward["seconds"][name].keys() == {"median", "low", "high"}
        assert backward["fraction_of_copy"][name] > 0
        assert backward["bytes_per_second"][name] > 0
    assert backward["copy_bytes_per_second"] > 0
    assert backward["errors"][OURS].keys() == {"dx", "dweight"}
    said = capsys.readouterr().out
    assert "1/2 rms_norm 8x64 bfloat16 backward: " in said
    assert "targets" in said
    for peer, about in written["peers"].items():
        if about["missing"]:
            assert f"{peer} is not installed: " in said


@pytest.mark.usefixtures("stubs")
def test_a_run_ends_with_its_time_and_another_goes_on(tmp_path: Path) -> None:
    status, written = run(tmp_path, "--seconds", "0")
    assert status == 0
    assert not written["complete"]
    assert not written["cases"]
    (file,) = tmp_path.glob("*.json")
    status, written = run(tmp_path, "--phase", "forward", "--resume", str(file))
    assert [found["label"] for found in written["cases"]] == ["rms_norm 8x64 bfloat16 forward"]
    first = written["cases"][0]["seconds"]
    status, written = run(tmp_path, "--resume", str(file))
    assert written["complete"]
    assert len(written["cases"]) == 5
    assert written["cases"][0]["seconds"] == first


@pytest.mark.usefixtures("stubs")
def test_what_goes_astray_ends_the_run_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as lost:
        lost.setattr(gpu, "is_lost", lambda device: True)
        _, written = run(tmp_path)
    assert len(written["cases"]) == 1
    assert not written["complete"]
    assert "the GPU does nothing more" in capsys.readouterr().out
    (file,) = tmp_path.glob("*.json")
    _, written = run(tmp_path, "--resume", str(file), "--without", STOCK, "--phase", "backward")
    assert [found["device_lost"] for found in written["cases"]] == [False]
    assert STOCK not in written["cases"][0]["seconds"]


@pytest.mark.usefixtures("stubs")
def test_another_gpus_file_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"gpu": {"name": "another"}, "cases": [], "host": [], "models": []}))
    assert gpu.main([*TINY, "--out", str(tmp_path), "--resume", str(file)]) == 1
    assert "expected results of cpu" in capsys.readouterr().out


@pytest.mark.usefixtures("stubs")
def test_a_case_that_fails_as_a_whole_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*args: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    monkeypatch.setattr(gpu, "measure", too_large)
    status, written = run(tmp_path, "--phase", "forward")
    assert status == 1
    (found,) = written["cases"]
    assert found["failed"]["case"].startswith("OutOfMemoryError: CUDA out of memory")


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("name", MODELS)
def test_models_are_checked_and_timed(name: str) -> None:
    found = gpu_steps.measure_model(MODELS[name], CPU, 2, tiny=True)
    assert not found["failed"]
    assert not found["wrong"]
    assert found["seconds"].keys() == {EAGER, STOCK, OURS, CONTROL}
    assert found["speedup_over_inductor"] > 0
    assert found["memory_ratio"] == pytest.approx(1.0, rel=0.2)
    assert found["errors"][OURS] == pytest.approx(found["errors"][EAGER], rel=0.5)


def test_a_model_whose_gradients_are_off_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *given: tuple(1.5 * value for value in graph(*given))

    both = {EAGER: None, OURS: {"backend": off}}
    monkeypatch.setattr(gpu_steps, "backends", lambda place: both)
    found = gpu_steps.measure_model(MODELS["vit"], CPU, 2, tiny=True)
    assert found["wrong"].keys() == {OURS}
    assert "its gradients are 5" in found["wrong"][OURS]
    assert OURS not in found["seconds"]


@pytest.mark.usefixtures("stubs")
def test_models_stand_in_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "MODELS", {"vit": MODELS["vit"]})
    status, written = run(tmp_path, "--models", "--no-norms")
    assert status == 0
    assert [found["model"] for found in written["models"]] == ["vit"]
    assert not written["cases"]
    steps = written["targets"][-1]
    assert steps["cases"].keys() == {"vit"}
    assert "training steps" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == gpu.NO_GPU
    said = capsys.readouterr().out
    assert "expected an NVIDIA GPU that torch can use, found torch " in said
    assert "normpass.benchmarks.roofline" in said


def test_the_file_itself_is_the_command() -> None:
    command = [sys.executable, str(Path(gpu.__file__).resolve()), "--list", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "layer_norm 16384x4096 bfloat16 backward"
    assert len(done.stdout.splitlines()) == len(gpu.QUICK)


def test_what_the_targets_are_about_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layer_norm 4096x1024 bfloat16 backward"
    assert lines[-1] == "unet training step"
    first = next(k for k, line in enumerate(lines) if line.endswith("forward"))
    assert all("backward" in line for line in lines[:first])


def test_options_that_cannot_be_meant_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--repeats", "1"])
    assert "at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--shape", "4x"])
    assert "--shape" in capsys.readouterr().err
