"""The benchmarks measure what they say: formulas, oracles, the gate, the files they write."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console

from normpass.benchmarks import bench, compile_time, demo, measure
from normpass.benchmarks.cases import (
    PHASES,
    Case,
    backward_bytes,
    forward_bytes,
    geometric_mean,
    parse_shape,
    select,
    spell,
)
from normpass.benchmarks.models import MODELS, build, digits
from normpass.benchmarks.norms import NORMS, ROWS, Extents
from normpass.decomps.activation import is_registered

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "layer_norm": (6, 16),
    "rms_norm": (6, 16),
    "rms_norm_by_hand": (6, 16),
    "layer_norm_small": (6, 16),
    "group_norm": (2, 64, 3, 3),
    "group_norm_channels_last": (2, 64, 3, 3),
    "batch_norm": (4, 5, 3, 3),
    "batch_norm_channels_last": (4, 5, 3, 3),
    "instance_norm": (4, 5, 3, 3),
    "instance_norm_channels_last": (4, 5, 3, 3),
    "layer_norm_of_images": (4, 5, 3, 3),
    "layer_norm_of_pixels": (4, 16, 3, 3),
    "modulated_norm": (3, 6, 16),
    "rms_norm_rotary": (2, 5, 3, 16),
    "rms_norm_rotary_pairs": (2, 5, 3, 16),
    "softmax": (6, 16),
}


def test_least_traffic_is_the_formula() -> None:
    # 3*M*N*s + M*4*statistics + 2*N*w at M = 4096, N = 1024, float32
    layer = Case(NORMS["layer_norm"], (4096, 1024), "float32", "backward")
    assert layer.bytes_least() == 3 * 4096 * 1024 * 4 + 4096 * 4 * 2 + 2 * 1024 * 4
    rms = Case(NORMS["rms_norm"], (32, 197, 768), "bfloat16", "backward")
    assert rms.bytes_least() == 3 * 32 * 197 * 768 * 2 + 32 * 197 * 4 + 2 * 768 * 2
    assert backward_bytes(Extents(10, 5, 0, 0), 4) == 120
    assert forward_bytes(Extents(10, 5, 1, 2), 4) == 80 + 20 + 8
    both = Case(NORMS["layer_norm"], (4096, 1024), "float32", "forward+backward")
    assert both.bytes_least() > layer.bytes_least() + 2 * 4096 * 1024 * 4


def test_rows_of_group_and_batch_norm_are_their_statistics() -> None:
    assert NORMS["group_norm"].extents((8, 256, 32, 32)) == (8 * 256 * 1024, 8 * 32, 2, 256)
    assert NORMS["batch_norm"].extents((16, 64, 56, 56)) == (16 * 64 * 56 * 56, 64, 2, 64)


def test_rows_of_other_norms_are_their_statistics() -> None:
    elements = 8 * 16 * 28 * 28
    shape = (8, 16, 28, 28)
    assert NORMS["instance_norm"].extents(shape) == (elements, 8 * 16, 2, 16)
    assert NORMS["layer_norm_of_images"].extents(shape) == (elements, 8, 2, 16 * 28 * 28)
    assert NORMS["layer_norm_of_pixels"].extents(shape) == (elements, 8 * 28 * 28, 2, 16)
    assert NORMS["modulated_norm"].extents((4, 7, 9)) == (4 * 7 * 9, 4 * 7, 2, 4 * 9)


def test_gradients_come_as_results_lie() -> None:
    for name, last in (("batch_norm_channels_last", True), ("instance_norm_channels_last", False)):
        module, x, dy = Case(NORMS[name], (4, 5, 3, 3), "float32", "backward").build("cpu")
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert dy.is_contiguous(memory_format=torch.channels_last) is last
        assert dy.stride() == module(x).stride()


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([3.0]) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="no values"):
        geometric_mean([])


def test_shapes_are_spelled_and_parsed() -> None:
    assert parse_shape("4096x1024") == (4096, 1024)
    assert spell((32, 197, 768)) == "32x197x768"
    for wrong in ("", "4x", "4x-1", "0x3", "ax3"):
        with pytest.raises(ValueError, match="expected sizes joined by x"):
            parse_shape(wrong)


def test_the_issue_shapes_are_all_there() -> None:
    cases = select(["layer_norm", "rms_norm"])
    assert len(cases) == 2 * len(ROWS) * len(PHASES) * 2
    assert {"4096x1024", "512x8192", "16384x256", "128x32768", "32x197x768"} == {
        spell(shape) for shape in ROWS
    }


@pytest.mark.parametrize("name", NORMS)
def test_references_agree_with_pytorch_in_float64(name: str) -> None:
    module, x, dy = Case(NORMS[name], TINY[name], "float32", "backward").build("cpu")
    module, x, dy = module.double(), x.detach().double().requires_grad_(), dy.double()
    inputs = [x, *module.parameters()]
    want = torch.autograd.grad(module(x), inputs, dy)
    y = NORMS[name].reference(*inputs)
    # The hand-written one computes in float32, whatever it is given.
    close = {"rtol": 1e-4, "atol": 1e-5} if name == "rms_norm_by_hand" else {}
    torch.testing.assert_close(module(x), y, check_dtype=False, **close)
    got = torch.autograd.grad(y, inputs, dy)
    for have, right in zip(got, want, strict=True):
        torch.testing.assert_close(have, right, check_dtype=False, **close)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", NORMS)
def test_every_norm_is_measured(name: str, phase: str) -> None:
    result = measure.measure(
        Case(NORMS[name], TINY[name], "float32", phase), "cpu", 2, ("eager", "aot_eager")
    )
    assert result.wrong == {}
    assert set(result.timings) == {"eager", "aot_eager"}
    assert result.add is not None
    assert 0 < result.timings["eager"].low <= result.timings["eager"].median
    bandwidth = result.bandwidth("eager")
    assert bandwidth == pytest.approx(result.bytes_least / result.timings["eager"].median)


def scaled_backend(factor: float) -> object:
    """A backend whose results are off by a factor."""

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *args: tuple(out * factor for out in graph(*args))

    return backend


@pytest.mark.parametrize("phase", PHASES)
def test_a_wrong_result_is_not_timed(phase: str) -> None:
    case = Case(NORMS["layer_norm"], (64, 32), "float32", phase)
    wrong = scaled_backend(1.0001)
    result = measure.measure(case, "cpu", 2, ("eager", wrong))  # type: ignore[arg-type]
    assert list(result.timings) == ["eager"]
    assert "away from float64" in result.wrong[wrong]  # type: ignore[index]
    assert result.ratio(wrong, "eager") is None  # type: ignore[arg-type]


def test_the_verdict() -> None:
    right = {"y": torch.ones(64, 16), "dweight": torch.ones(16)}
    eager = {"y": 1e-7, "dweight": 1e-7}
    judge = measure.verdict
    assert judge({"y": 2e-7, "dweight": 2e-7}, eager, right, torch.float32) is None
    assert "y is 1.0e-05" in str(judge({"y": 1e-5, "dweight": 0}, eager, right, torch.float32))
    assert "dweight" in str(judge({"y": 0, "dweight": 1e-5}, eager, right, torch.float32))
    assert "dweight" in str(judge({"y": 0, "dweight": math.inf}, eager, right, torch.float32))
    assert "dweight" in str(judge({"y": 0, "dweight": math.nan}, eager, right, torch.float32))
    broken = {"y": 1e-2, "dweight": 1e-7}
    assert "eager's own y" in str(judge({"y": 1e-2}, broken, right, torch.float32))


def test_relative_errors_see_shapes_and_what_is_not_a_number() -> None:
    right = {"y": torch.tensor([1.0, -4.0], dtype=torch.float64)}
    errors = measure.relative_errors({"y": torch.tensor([1.0, -5.0])}, right)
    assert errors["y"] == pytest.approx(0.25)
    for bad in (torch.tensor([1.0, math.nan]), torch.ones(2, 1), torch.tensor([math.inf, 1])):
        assert measure.relative_errors({"y": bad}, right)["y"] == math.inf


def test_variants_start_with_eager() -> None:
    case = Case(NORMS["softmax"], (4, 8), "float32", "backward")
    with pytest.raises(ValueError, match="start with 'eager'"):
        measure.measure(case, "cpu", 2, ("inductor",))


def test_steps_are_timed_in_alternation() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = measure.interleave(steps, 4, "cpu")
    assert set(timings) == {"a", "b", "c"}
    # After the warm-up, whole runs of one name: each round starts one further.
    runs = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert "".join(runs[3:]) in ("abcbcacababc", "abcbcacab" + "abc")


def test_bench_writes_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--norm", "layer_norm", "--shape", "32x16", "--shape", "8x64", "--dtype", "float32"]
    argv += ["--repeats", "3", "--out", str(tmp_path), "--system-allocator", "--device", "cpu"]
    assert bench.main(argv, ("eager", "aot_eager")) == 0
    text = capsys.readouterr().out
    assert "layer_norm 32x16 float32 backward" in text
    (file,) = tmp_path.glob("*.json")
    document = json.loads(file.read_text())
    assert document["machine"]["versions"]["torch"] == torch.__version__
    assert document["machine"]["threads"] == torch.get_num_threads()
    assert len(document["results"]) == 4
    first = document["results"][0]
    expected = first["timings"]["eager"]["median"] / first["timings"]["aot_eager"]["median"]
    assert first["derived"]["aot_eager"]["speedup_over_eager"] == pytest.approx(expected)
    mean = document["geometric_means"][0]
    assert mean["shapes"] == ["32x16", "8x64"]
    ratios = [
        result["derived"]["aot_eager"]["speedup_over_eager"]
        for result in document["results"]
        if result["phase"] == mean["phase"]
    ]
    assert mean["speedup_over_eager"] == pytest.approx(math.sqrt(ratios[0] * ratios[1]))


def test_bench_fails_when_a_variant_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "verdict", lambda errors, eager, right, dtype: "dx is wrong")
    argv = ["--norm", "softmax", "--shape", "4x8", "--phase", "backward", "--dtype", "float32"]
    argv += ["--repeats", "2", "--out", str(tmp_path), "--system-allocator", "--device", "cpu"]
    assert bench.main(argv, ("eager", "aot_eager")) == 1
    assert "is wrong and not timed: dx is wrong" in capsys.readouterr().out


def test_without_matplotlib_the_plot_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench.plot([], ["eager"], tmp_path / "x.png") is False


def test_bench_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["--shape", "4x8"], "exactly one --norm"),
        (["--norm", "softmax", "--shape", "4y8"], "such as 4096x1024"),
        (["--repeats", "1"], "at least 2"),
        (["--registered"], "--registered needs --compile-time"),
        (["--registered", "--vmap"], "--registered needs --compile-time"),
        (["--vmap", "--compile-time"], "not allowed with"),
        (["--vmap", "--norm", "softmax", "--phase", "backward"], "by --norm, --phase"),
        (["--compile-time", "--dtype", "float32"], "by --dtype"),
        (["--compile-time", "--shape", "4x8"], "takes no --shape"),
        (["--vmap", "--shape", "2x3x4"], "five sizes, such as 8x16x64x28x28, got 2x3x4"),
        (["--vmap", *["--shape", "2x3x4x5x5"] * 2], "one --shape"),
    ):
        with pytest.raises(SystemExit):
            bench.parse(argv)
        assert message in capsys.readouterr().err


def test_the_digits_are_split_once_and_for_all() -> None:
    data = digits()
    assert data.images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert data.images.min() == -1
    assert data.images.max() == 1
    assert sorted(data.test_labels.unique().tolist()) == list(range(10))
    assert torch.equal(data.test_labels, digits().test_labels)


@pytest.mark.parametrize("name", MODELS)
def test_models_start_the_same(name: str) -> None:
    first, second = build(name), build(name)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first(torch.rand(3, 1, 8, 8)).shape == (3, 10)


def test_the_decoder_is_causal() -> None:
    trunk = build("decoder").layers[0]
    x = torch.randn(2, 16, 192)
    changed = x.clone()
    changed[:, 9:] += 1
    torch.testing.assert_close(trunk(x)[:, :9], trunk(changed)[:, :9])


def finished(**changes: object) -> demo.Run:
    fields = {"model": "vit", "backend": "eager", "step": lambda: None, "loss": 0.5}
    fields |= {"accuracy": 0.9, "compile_seconds": 1.0, "step_seconds": 0.1}
    return demo.Run(**{**fields, **changes})  # type: ignore[arg-type]


def test_backends_have_to_agree() -> None:
    first = finished()
    agree = finished(backend="normpass", loss=0.5001, accuracy=0.9 + 1 / 360)
    assert demo.disagreement([first, agree]) is None
    for change in ({"loss": 0.51}, {"loss": math.nan}, {"accuracy": 0.9 - 2 / 360}):
        text = demo.disagreement([first, agree, finished(backend="normpass", **change)])
        assert text is not None
        assert "vit" in text
        assert "normpass" in text


def test_what_fused_is_told_in_words() -> None:
    counters = {"fused layer_norm backward": 5, "refused softmax backward: too small": 2}
    assert demo.what_fused(counters) == "5x layer_norm backward, 2 left to Inductor"
    assert demo.what_fused({}) == "-"


def test_demo_trains_and_compares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "warm_up_compiler", lambda device: None)
    argv = ["--model", "resnet", "--epochs", "1", "--device", "cpu"]
    assert demo.main(argv, ("eager", "aot_eager")) == 0
    text = capsys.readouterr().out
    assert "resnet (nn.BatchNorm2d)" in text
    assert "The 2 backends agree" in text


def test_demo_fails_when_backends_disagree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = [finished(), finished(backend="normpass", loss=0.7)]
    monkeypatch.setattr(demo, "run", lambda *args: [group])
    assert demo.main(["--model", "vit", "--device", "cpu"]) == 1
    assert "do NOT agree: vit: final loss 0.700000 under normpass" in capsys.readouterr().out


def test_the_private_cache_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for before in ("somewhere", None):
        if before is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        with demo.private_cache():
            inside = os.environ["TORCHINDUCTOR_CACHE_DIR"]
            assert os.path.isdir(inside)
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
        assert not os.path.exists(inside)


def test_compile_time_alternates_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(name: str, backend: str, device: str) -> float:
        asked.append(backend)
        return {"inductor": 2.0, "normpass": 3.0}[backend]

    monkeypatch.setattr(compile_time, "in_fresh_process", fake)
    assert compile_time.run(Console(quiet=True), "cpu", 2, tmp_path) == 0
    assert asked[:4] == ["inductor", "normpass", "normpass", "inductor"]
    document = json.loads((tmp_path / "cpu-compile-time.json").read_text())
    assert document["ratio"] == pytest.approx(1.5)


def test_a_failed_compilation_is_told() -> None:
    with pytest.raises(
        RuntimeError, match="compiling no_such_model with inductor failed"
    ) as failure:
        compile_time.in_fresh_process("no_such_model", "inductor", "cpu")
    assert "KeyError" in str(failure.value)


def test_compile_time_with_the_rules_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(name: str, variant: str, device: str) -> float:
        asked.append((name, variant))
        return {"normpass": 4.0, "normpass+registered": 5.0}[variant]

    monkeypatch.setattr(compile_time, "in_fresh_process", fake)
    argv = ["--compile-time", "--registered", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main(argv) == 0
    assert len(asked) == 2 * 3 * len(MODELS)
    assert {name for name, _ in asked} == set(MODELS)
    assert [variant for _, variant in asked[:6]] == [
        *("normpass", "normpass+registered"),
        *("normpass+registered", "normpass"),
        *("normpass", "normpass+registered"),
    ]
    document = json.loads((tmp_path / "cpu-compile-time-registered.json").read_text())
    assert document["ratio"] == pytest.approx(1.25)
    assert document["machine"]["versions"]["torch"] == torch.__version__
    assert not (tmp_path / "cpu-compile-time.json").exists()


@pytest.mark.parametrize(
    ("variant", "registered"),
    [("inductor", False), ("normpass", False), ("normpass+registered", True)],
)
def test_rules_are_registered_while_one_variant_compiles(
    variant: str, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def compiled(model: torch.nn.Module, backend: str) -> torch.nn.Module:
        seen.append((backend, is_registered()))
        return model

    def step(*args: object) -> None:
        seen.append((variant, is_registered()))

    monkeypatch.setattr(compile_time, "warm_up_compiler", lambda device: None)
    monkeypatch.setattr(compile_time, "compiled", compiled)
    monkeypatch.setattr(compile_time, "train_step", step)
    compile_time.compile_seconds("resnet", variant, "cpu")
    assert seen == [(variant.partition("+")[0], registered), *[(variant, registered)] * 4]
    assert not is_registered()
