"""`normpass bench --models`: what is asked of a run, what it tells and keeps."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from normpass.backend.table import source_digest
from normpass.benchmarks import bench, model_steps, zoo
from normpass.benchmarks.zoo import Case

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from normpass.benchmarks.steps import Job

MLP = Case("mlp", "float32", "contiguous")


def result(case: Case, ours: float = 1.0, **changes: Any) -> dict[str, Any]:
    """As if Inductor took 2 s, eager 3 s; ours half of its memory, a quarter of its compiling."""
    medians = {"eager": 3.0, "inductor": 2.0, "normpass": ours, "inductor again": 2.2}
    return {
        "model": case.model,
        "dtype": case.dtype,
        "format": case.format,
        "seconds": {n: {"median": s, "low": s, "high": s} for n, s in medians.items()},
        "peak_bytes": {"eager": 5e6, "inductor": 4e6, "normpass": 2e6},
        "compile_seconds": {"inductor": 40.0, "normpass": 10.0},
        "failed": {},
        "wrong": {},
        "faults": [],
        "fused": [{}] * 7,
        "refused": [],
        **changes,
    }


def options(folder: Path, *models: str) -> Namespace:
    argv = ["--models", *models, "--device", "cpu", "--out", str(folder), "--dtype", "float32"]
    return bench.parse(argv)


def test_the_means() -> None:
    bf16 = Case("mlp", "bfloat16", "contiguous")
    results = [result(MLP), result(MLP, 4.0), result(bf16), result(bf16, wrong={"normpass": "x"})]
    del results[-1]["seconds"]["normpass"]
    rows = model_steps.means(results)
    assert list(rows) == ["float32", "bfloat16", "all"]
    assert [row["cases"] for row in rows.values()] == [2, 1, 3]
    assert rows["float32"]["speedup_over_inductor"] == pytest.approx(1.0)
    assert rows["float32"]["speedup_over_eager"] == pytest.approx(1.5)
    assert rows["bfloat16"]["speedup_over_better"] == pytest.approx(2.0)
    assert rows["all"]["speedup_over_inductor"] == pytest.approx(2 ** (1 / 3))
    assert rows["all"]["inductor_over_itself"] == pytest.approx(1.1)
    assert rows["all"]["memory_ratio"] == pytest.approx(0.5)
    assert rows["all"]["compile_ratio"] == pytest.approx(0.25)
    assert model_steps.means([]) == {}


def test_the_file_holds_what_was_measured_after_every_case(tmp_path: Path) -> None:
    path = tmp_path / "cpu-models.json"
    seen = []

    def measure(given: Job) -> dict[str, Any]:
        seen.append(len(json.loads(path.read_text())["cases"]) if path.exists() else 0)
        if given.case.model == "vit":
            raise KeyboardInterrupt
        return result(given.case)

    args = options(tmp_path, "mlp", "llama", "vit")
    with pytest.raises(KeyboardInterrupt):
        model_steps.run(args, Console(quiet=True), measure)
    assert seen == [0, 1, 2]
    document = json.loads(path.read_text())
    assert [found["model"] for found in document["cases"]] == ["mlp", "llama"]
    assert document["cases"][0] == {**result(MLP), "sources": source_digest()}
    assert document["geometric_means"]["all"]["cases"] == 2
    assert document["machine"]["versions"]["torch"] == torch.__version__
    assert document["repeats"] == model_steps.REPEATS
    assert set(document["packages"]) == {"transformers", "diffusers"}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_table_and_what_went_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"seconds": {}, "peak_bytes": {}}
    found = {
        "mlp": result(MLP),
        "vit": {**result(Case("vit", "float32", "contiguous")), "wrong": {"normpass": "dx"}},
        "gpt": {"failed": {"case": "killed by SIGSEGV"}},
        "waves": result(MLP, faults=[["stage", "KeyError", "file.py:1"]]),
    }
    found["vit"]["seconds"] = {"eager": found["vit"]["seconds"]["eager"]}
    found["waves"] |= gone

    def measure(given: Job) -> dict[str, Any]:
        case = given.case
        names = {"model": case.model, "dtype": case.dtype, "format": case.format}
        return {**found[case.model], **names}

    console = Console(width=200)
    assert model_steps.run(options(tmp_path, *found), console, measure) == 1
    text = capsys.readouterr().out
    assert "3.00x" in text
    assert "4.0 -> 2.0" in text
    assert "40.0 -> 10.0" in text
    assert "vit float32: normpass is wrong and not timed: dx" in text
    assert "gpt float32: case failed: killed by SIGSEGV" in text
    assert "waves float32: a fault of normpass's was survived: stage KeyError file.py:1" in text
    assert model_steps.run(options(tmp_path, "mlp"), Console(quiet=True), measure) == 0


def test_a_missing_package_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "find_spec", lambda name: None)
    asked = []

    def measure(given: Job) -> dict[str, Any]:
        asked.append(given.case.label)
        return result(given.case)

    args = options(tmp_path, "mlp", "bert", "mobilenetv2", "unet")
    assert model_steps.run(args, Console(width=200), measure) == 0
    text = capsys.readouterr().out
    left_out = "is not installed, left out:"
    assert f"transformers {left_out} bert, mobilenetv2 (pip install 'normpass[models]')" in text
    assert f"diffusers {left_out} unet (pip install 'normpass[models]')" in text
    assert asked == ["mlp float32"]
    assert model_steps.run(options(tmp_path, "bert"), Console(quiet=True), measure) == 0


def test_bfloat16_is_left_out_where_processors_lack_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_steps, "known_dtypes", lambda device: ["float32"])
    args = bench.parse(["--models", "mlp", "--device", "cpu", "--out", str(tmp_path)])
    assert [case.label for case in model_steps.cases_of(args)] == ["mlp float32"]
    model_steps.run(args, Console(width=200), lambda given: result(given.case))
    assert "--dtype bfloat16 measures it all the same" in capsys.readouterr().out
    args.dtype = ["bfloat16"]
    assert [case.label for case in model_steps.cases_of(args)] == ["mlp bfloat16"]


def test_each_backend_is_compiled_first_as_often_as_the_other(tmp_path: Path) -> None:
    jobs = [model_steps.job_of(options(tmp_path), MLP, place) for place in range(16)]
    first = [given.stock_first for given in jobs]
    assert sum(first) == sum(first[::2]) * 2 == sum(first[::4]) * 4 == 8
    assert {given.repeats for given in jobs} == {model_steps.REPEATS}


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["--models", "resnet", "no_such"], "invalid choice: 'no_such'"),
        (["--models", "--vmap"], "not allowed with"),
        (["--models", "--norm", "softmax", "--phase", "backward"], "by --norm, --phase"),
        (["--models", "--shape", "4x8"], "--models takes no --shape"),
        (["--models", "mlp", "--format", "channels_last"], "of mlp none has the format"),
        (["--format", "contiguous"], "--format needs --models"),
        (["--tiny"], "--tiny needs --models"),
        (["--vmap", "--format", "contiguous"], "--vmap has nothing to choose by --format"),
        (["--models", "--registered"], "--registered needs --compile-time"),
    ):
        with pytest.raises(SystemExit):
            bench.parse(argv)
        assert message in capsys.readouterr().err


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--models", "resnet", "mlp", "--list", "--dtype", "float32", "--device", "cpu"]
    assert bench.main(argv) == 0
    expected = ["resnet float32", "resnet float32 channels_last", "mlp float32"]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_steps.plot([], tmp_path / "x.png") is False
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert model_steps.plot([result(MLP)], tmp_path / "x.png") is False


def test_other_cases_stay_in_the_file_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu-models.json"

    def run(*names: str, ours: float) -> list[tuple[str, float]]:
        args = bench.parse(
            [
                "--models",
                *names,
                "--device=cpu",
                "--out",
                str(tmp_path),
                "--dtype=float32",
                "--keep",
            ]
        )
        model_steps.run(args, Console(width=200), lambda given: result(given.case, ours))
        cases = json.loads(path.read_text())["cases"]
        return [(found["model"], found["seconds"]["normpass"]["median"]) for found in cases]

    assert run("vit", "llama", ours=1.0) == [("vit", 1.0), ("llama", 1.0)]
    assert run("mlp", "llama", ours=4.0) == [("mlp", 4.0), ("vit", 1.0), ("llama", 4.0)]
    assert "vit float32" in capsys.readouterr().out.rpartition("training steps")[2]
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "tiny": True}))
    assert run("vit", ours=1.0) == [("vit", 1.0)]  # the others were of other sizes
    monkeypatch.setattr(model_steps, "machine", lambda device: {"cpu": "another"})
    assert run("gpt", ours=1.0) == [("gpt", 1.0)]
    assert "of another machine" in capsys.readouterr().out
