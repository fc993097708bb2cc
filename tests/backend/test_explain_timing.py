"""A region beside Inductor: its nodes taken out of the graph, what Inductor would move for them,
and times.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from inductor_counts import LARGE, ROW, WHOLE, C, R
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

import normpass
from normpass.backend.explain import report as reports
from normpass.backend.explain import stock, timing
from normpass.backend.explain.cut_out import CutOut
from normpass.backend.explain.timing import Times, different, random_inputs, timed
from normpass.backend.inductor import conv1d

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.backend.explain.report import FusedNorm

ALL: dict[str, Any] = {"inner": "eager", "least_bytes": 0}
WITH_INDUCTOR: dict[str, Any] = {"least_bytes": 0}


def gradient(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def attention(x: Tensor) -> Tensor:
    """Scaled, so that Inductor's own pass makes two of its scores, one a view of the other."""
    return torch.softmax((x @ x.transpose(-1, -2)) * 0.25, -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.rms_norm(x, (64,))
    first, last = y.chunk(2, -1)
    return y * cos + torch.cat((-last, first), -1) * sin


CASES: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]] = {
    "two norms and what stands between": lambda: (
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)),
        (gradient(32, 64),),
    ),
    "half precision": lambda: (
        nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)).bfloat16(),
        (gradient(32, 64, dtype=torch.bfloat16),),
    ),
    "running statistics": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        (gradient(4, 4, 16, 16),),
    ),
    "groups": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()),
        (gradient(4, 4, 16, 16),),
    ),
    "positions": lambda: (
        lambda x, t: F.cross_entropy(x, t),
        (gradient(64, 100), torch.randint(0, 100, (64,))),
    ),
    "views of one tensor": lambda: (attention, (gradient(2, 4, 32, 16),)),
    "pieces": lambda: (rotated, (gradient(2, 4, 32, 64), torch.randn(32, 64), torch.randn(32, 64))),
}


@pytest.mark.parametrize(
    ("case", "inner"), [*((case, "eager") for case in CASES), ("views of one tensor", "inductor")]
)
def test_the_nodes_of_a_region_compute_what_its_call_does(case: str, inner: str) -> None:
    """By PyTorch's own operators, one by one."""
    fn, inputs = CASES[case]()
    report = normpass.explain(fn, *inputs, options={"inner": inner, "least_bytes": 0})
    assert report.regions
    for region in report.regions:
        cut = region.cut
        assert isinstance(cut, CutOut), cut
        tensors = random_inputs(region.fused, cut)
        ours, theirs = (
            GraphModule(nn.Module(), graph)(*tensors) for graph in (cut.ours, cut.stock)
        )
        assert all(y.isfinite().all() for y in theirs)
        # In eager mode each result in half precision is rounded.
        assert different(ours, theirs, max(x.numel() for x in tensors)) is None
        names = [
            [node.name for node in graph.find_nodes(op="placeholder")]
            for graph in (cut.stock, cut.ours)
        ]
        assert names[0] == names[1]
        assert sum(node.target is timing.region_op for node in cut.ours.nodes) == 1


def test_sizes_are_those_of_the_example() -> None:
    x = gradient(48, 64)
    torch._dynamo.mark_dynamic(x, 0)
    report = normpass.explain(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), x, options=ALL)
    for region in report.regions:
        assert "r=?" in region.text
        assert isinstance(region.cut, CutOut)
        tensors = random_inputs(region.fused, region.cut)
        assert {x.shape[0] for x in tensors if x.dim() == 2} == {48}
        ours, theirs = (
            GraphModule(nn.Module(), graph)(*tensors)
            for graph in (region.cut.ours, region.cut.stock)
        )
        assert different(ours, theirs, 48 * 64) is None


def test_what_another_pass_has_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution in one dimension becomes one of images, which its norm reads instead."""
    monkeypatch.setattr(conv1d, "_has_kernels", lambda: True)
    net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8))
    with torch.no_grad():
        report = normpass.explain(net, torch.randn(4, 4, 64), options=WITH_INDUCTOR)
    (region,) = report.regions
    assert re.fullmatch(r"it reads \w+, which was another before the pass", str(region.cut))


def test_inductors_bytes_are_those_that_were_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by hand: x read and y written once, weight and bias read once."""
    monkeypatch.setattr(stock, "conditions_of", lambda device: LARGE)
    with torch.no_grad():
        report = normpass.explain(nn.LayerNorm(C), torch.randn(R, C), options=ALL)
    (region,) = report.regions
    assert region.bytes_stock == 2 * WHOLE + 2 * ROW


def test_inductors_bytes_are_not_known_on_gpus() -> None:
    assert stock.bytes_moved("anything", "cuda") is None


# ---- times


def one_region(**keywords: Any) -> FusedNorm:
    with torch.no_grad():
        report = normpass.explain(nn.RMSNorm(256), torch.randn(512, 256), options=ALL, **keywords)
    (region,) = report.regions
    return region


def test_both_are_timed() -> None:
    found = one_region(measure="time").times
    assert isinstance(found, Times)
    # A call of 512 rows takes microseconds, whatever else this machine does.
    assert 1e-7 < found.ours < 1
    assert 1e-7 < found.stock < 1


def test_nothing_is_timed_without_being_asked() -> None:
    assert one_region().times is None


def test_equal_regions_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(fused: Any, *_: Any) -> Times:
        asked.append(fused.text)
        return Times(1.0, 2.0)

    monkeypatch.setattr(reports, "timed", counting)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(3)))
    report = normpass.explain(net, gradient(32, 64), options=ALL, measure=["time"])
    assert len(report.regions) == 6
    assert len(asked) == len(set(asked)) < 6
    assert all(region.times == Times(1.0, 2.0) for region in report.regions)


def test_other_numbers_are_not_timed() -> None:
    region = one_region()
    assert isinstance(region.cut, CutOut)
    wrong = Graph()
    wrong.output(wrong.graph_copy(region.cut.stock, {}))
    scale = next(node for node in wrong.nodes if "mul" in str(node.target))
    scale.target = torch.ops.aten.add.Tensor
    found = timed(region.fused, replace(region.cut, stock=wrong), {})
    assert isinstance(found, str)
    assert "of its largest value away from Inductor's, where at most" in found


def test_a_kernel_that_is_not_built_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unbuilt:
        def launch(self, sizes: object) -> None: ...

    region = one_region()
    monkeypatch.setattr(timing, "cpu_kernel", lambda text, sizes: Unbuilt())
    assert timed(region.fused, region.cut, {}) == "its kernel could not be built"


def test_why_nothing_was_cut_out_is_why_nothing_is_timed() -> None:
    assert timed(one_region().fused, "it reads y", {}) == "it reads y"


def test_a_failure_of_inductors_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    region = one_region()
    monkeypatch.setattr(stock, "compiled", failing)
    assert timed(region.fused, region.cut, {}) == "RuntimeError: no compiler"


# ---- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_roundings_are_no_difference(dtype: torch.dtype) -> None:
    x = torch.randn(100, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    assert different([x.to(dtype)], [(x * (1 + eps)).to(dtype)], 100) is None
    apart = (x * (1 + 100 * eps)).to(dtype)
    assert str(different([x.to(dtype)], [apart], 100)).startswith("result 0 is ")


def test_infinities_are_where_they_are() -> None:
    x = torch.tensor([1.0, math.inf, math.nan])
    assert different([x], [x.clone()], 3) is None
    assert different([x], [torch.tensor([1.0, 2.0, math.nan])], 3) is not None


def test_truth_values_may_differ_where_numbers_are_rounded() -> None:
    truth = torch.zeros(10_000, dtype=torch.bool)
    one, many = truth.clone(), truth.clone()
    one[0], many[:100] = True, True
    assert different([one], [truth], 10_000) is None
    assert different([many], [truth], 10_000) is not None


def test_another_shape_is_named() -> None:
    found = different([torch.ones(3)], [torch.ones(1, 3)], 3)
    assert found == (
        "result 0: expected torch.float32 of shape (1, 3) as Inductor has it, found torch.float32 "
        "of shape (3,)"
    )


def test_the_median_of_rounds_in_turn() -> None:
    taken: list[str] = []

    def step(name: str) -> Callable[[], object]:
        return lambda: taken.append(name)

    def clock(step: Callable[[], object], calls: int) -> float:
        step()
        return calls * (1.0 if taken[-1] == "ours" else 3.0)

    assert timing.alternately((step("ours"), step("stock")), clock) == [1.0, 3.0]
    rounds = taken[4:]  # after warming up
    assert len(rounds) == 2 * timing.ROUNDS
    assert rounds[:4] == ["ours", "stock", "stock", "ours"]
