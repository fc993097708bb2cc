"""`normpass bench --vmap`: the rules reach one of its two functions; their peaks and the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd

import normpass
from normpass.benchmarks import bench, vmap
from normpass.benchmarks.measure import peak_bytes
from normpass.decomps.activation import is_registered

if TYPE_CHECKING:
    from pathlib import Path


def test_rules_reach_one_of_the_vmapped_functions() -> None:
    """Stock's batching rule copies x with its examples inside of the channels; ours copies
    nothing.
    """
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    args = vmap.inputs((3, 4, 5, 6, 6), "cpu")
    backend = aot_autograd(fw_compiler=keep, decompositions=core_aten_decompositions())
    made = vmap.compile_both(args, backend)
    assert not is_registered()
    for function in made.values():  # from the code that is there: nothing is compiled again
        function(*args)
    stock, rules = graphs
    assert has_clone_of_everything(stock, args[0].numel())
    assert not has_clone_of_everything(rules, args[0].numel())


def has_clone_of_everything(graph: torch.fx.GraphModule, numel: int) -> bool:
    return any(
        node.target is torch.ops.aten.clone.default and node.meta["val"].numel() == numel
        for node in graph.graph.nodes
    )


def test_stock_is_not_measured_where_the_rules_are() -> None:
    with normpass.registered(), pytest.raises(RuntimeError, match="while normpass is registered"):
        vmap.compile_both(vmap.inputs((2, 3, 4, 5, 5), "cpu"))


def test_the_vmapped_reference_agrees_with_pytorch_in_float64() -> None:
    args = tuple(v.double() for v in vmap.inputs((3, 4, 5, 6, 6), "cpu"))
    right = vmap.reference(*args)
    for name, found in zip(vmap.NAMES, vmap.stock(*args), strict=True):
        torch.testing.assert_close(found, right[name])


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_what_is_alive_at_once() -> None:
    x = torch.randn(1 << 20, device="cuda")
    assert peak_bytes(lambda: x.sin().cos(), "cuda") == 2 * 4 << 20


def test_the_peak_is_what_is_alive_at_once() -> None:
    x = torch.randn(1 << 16)
    size = x.nbytes

    def three_one_after_another() -> None:
        for _ in range(3):
            x.sin()

    def two_then_three() -> torch.Tensor:
        one = x.sin()
        two = one.cos()
        return torch.cat([one, two])

    assert peak_bytes(lambda: None, "cpu") == 0
    assert peak_bytes(lambda: x.sin_(), "cpu") == 0
    assert peak_bytes(lambda: x.sin(), "cpu") == size
    assert peak_bytes(lambda: x.sin().cos(), "cpu") == 2 * size
    assert peak_bytes(three_one_after_another, "cpu") == size
    assert peak_bytes(two_then_three, "cpu") == 4 * size


def test_bench_vmap_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--vmap", "--shape", "3x4x5x6x6", "--repeats", "2", "--system-allocator"]
    assert bench.main([*argv, "--device", "cpu", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "vmap(grad(batch_norm)) 3x4x5x6x6 float32" in text
    document = json.loads((tmp_path / "cpu-vmap.json").read_text())
    assert document["machine"]["versions"]["torch"] == torch.__version__
    assert document["machine"]["freed_memory_kept"] is False
    assert document["shape"] == [3, 4, 5, 6, 6]
    assert document["repeats"] == 2
    stock, rules = (document["seconds"][name] for name in ("stock", "rules"))
    assert 0 < stock["low"] <= stock["median"] <= stock["high"]
    assert document["speedup"] == pytest.approx(stock["median"] / rules["median"])
    peaks = document["peak_bytes"]
    assert document["memory_ratio"] == pytest.approx(peaks["rules"] / peaks["stock"])
    # dx, dweight and dbias are allocated by both.
    outputs = 4 * (3 * 4 * 5 * 6 * 6 + 2 * 3 * 5)
    assert all(peak >= outputs for peak in peaks.values())


def test_bench_vmap_fails_when_a_variant_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_a_thousandth(args: tuple[torch.Tensor, ...], backend: object) -> dict[str, object]:
        def rules(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(1.001 * v for v in vmap.stock(*args))

        return {"stock": vmap.stock, "rules": rules}

    monkeypatch.setattr(vmap, "compile_both", off_by_a_thousandth)
    argv = ["--vmap", "--shape", "2x3x4x5x5", "--repeats", "2", "--system-allocator"]
    assert bench.main([*argv, "--device", "cpu", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "rules is wrong and not timed: dx is" in text
    assert "stock is wrong" not in text
    assert not list(tmp_path.iterdir())
