"""A fault of ours, at whatever stage, leaves a region or a graph to Inductor: the result is right,
one warning says what happened and how to report it, and the reason is on record.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled import compile_fused
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from tracing import trace

from normpass.backend import entry, fusion
from normpass.backend.codegen import cpp
from normpass.backend.explain import dump, record
from normpass.backend.inductor import inductor_call
from normpass.backend.options import Options
from normpass.backend.program import plan
from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.run import launch_gpu, launch_triton
from normpass.passes import faults, names, pipeline, regions, rewrite, saved
from normpass.passes.pipeline import Fused, Refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("faults_are_meant")


def fail(*args: object, **kwargs: object) -> Any:
    raise KeyError("something we did not think of")


class Changing:
    """Fails at its last call, after it has done what it is there for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        self.function(*args)
        fail()


# Where it fails: what is replaced, and the stage that the warning names.
PER_REGION: dict[str, tuple[object, str, str]] = {
    "growing": (regions.Grower, "grow", "growing"),
    "copies": (pipeline, "copy_inputs", "growing"),
    "names": (names, "module", "naming"),
    "lowering": (pipeline, "lower", "lowering"),
    "sizes": (pipeline, "estimate", "weighing"),
    "profit": (pipeline, "refusal", "weighing"),
    "traffic": (fusion, "traffic", "planning the kernel"),
    "plan": (plan, "make_plan", "planning the kernel"),
    "C++": (cpp, "generate", "planning the kernel"),
    "call": (rewrite, "_read", "rewriting"),
    "order": (rewrite, "sort", "rewriting"),
}
PER_GRAPH: dict[str, tuple[object, str, str]] = {
    "seeds": (pipeline, "seeds", "the search for regions"),
    "reach": (regions.Reach, "of", "the search for regions"),
    "build": (fusion, "_start", "the start of kernels"),
    "record": (record, "decisions", "the record of what was fused"),
    "dump": (dump, "kernels", "the record of what was fused"),
}
IN_LOWERING: dict[str, tuple[object, str, str]] = {
    "saved": (saved, "mark", "choosing what is saved"),
    "foretold": (fusion, "as_expected", "foretelling where tensors lie"),
    "settled": (inductor_call, "settled", "settling where its tensors lie"),
    "start": (inductor_call, "_start", "the start of a kernel"),
}


class Net(nn.Module):
    """Of a width of its own, so that no kernel of it is there yet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.linear(self.first(x)).relu())


def gradients(function: Callable[..., torch.Tensor], net: nn.Module, x: torch.Tensor) -> list[Any]:
    y = function(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith("normpass") and r.levelno >= logging.WARNING
    ]


def survive(
    width: int, caplog: pytest.LogCaptureFixture, stage: str, **options: Any
) -> list[Fused | Refused]:
    """Compiles and runs a model while something is broken. Returns the decisions."""
    net, x = Net(width), torch.randn(3, 7, width, requires_grad=True)
    return survived_by(net, x, caplog, stage, dynamic=True, **options)


def survived_by(
    net: nn.Module, x: torch.Tensor, caplog: pytest.LogCaptureFixture, stage: str, **options: Any
) -> list[Fused | Refused]:
    with record.listen() as heard:
        found = gradients(compile_fused(net, **options), net, x)
    for ours, theirs in zip(found, gradients(net, net, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    (warning,) = warnings_of(caplog)
    assert f"a fault in {stage} of " in warning
    assert "KeyError: 'something we did not think of'" in warning
    assert faults.HOW_TO_REPORT in warning
    return list(heard)


# What Inductor makes of a graph that is left to it does not depend on the stage: two show it.
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("name", "inner"),
    [*((name, "eager") for name in PER_REGION), ("plan", "inductor"), ("order", "inductor")],
)
def test_a_fault_in_a_region_leaves_it_to_inductor(
    name: str, inner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, function, stage = PER_REGION[name]
    monkeypatch.setattr(owner, function, fail)
    width = 41 + 2 * [*PER_REGION].index(name) + (inner == "inductor")
    decisions = survive(width, caplog, stage, inner=inner)
    assert decisions
    assert {type(decision) for decision in decisions} == {Refused}
    for decision in decisions:
        assert f"a fault of normpass in {stage}: KeyError" in decision.reason  # type: ignore[union-attr]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PER_GRAPH)
def test_a_fault_in_a_graph_leaves_it_to_inductor(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    owner, function, stage = PER_GRAPH[name]
    monkeypatch.setattr(owner, function, fail)
    survive(70 + [*PER_GRAPH].index(name), caplog, stage, inner="eager", debug=str(tmp_path))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", IN_LOWERING)
def test_a_fault_in_lowering_costs_no_fusion(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, function, stage = IN_LOWERING[name]
    monkeypatch.setattr(owner, function, fail)
    decisions = survive(80 + [*IN_LOWERING].index(name), caplog, stage, recompute=True)
    assert {type(decision) for decision in decisions} == {Fused}


def test_a_fault_among_images_costs_no_fusion(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which only graphs with convolutions have, of sizes that are known."""
    monkeypatch.setattr(inductor_call, "images", fail)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3))
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    decisions = survived_by(net, x, caplog, "telling images from the rest")
    assert {type(decision) for decision in decisions} == {Fused}


def test_one_region_at_fault_takes_nothing_else_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lower = pipeline.lower

    def fails_for_rms_norm(name: str, *args: Any, **kwargs: Any) -> Any:
        return fail() if name.startswith("rms_norm") else lower(name, *args, **kwargs)

    monkeypatch.setattr(pipeline, "lower", fails_for_rms_norm)
    decisions = survive(80, caplog, "lowering", inner="eager")
    assert {type(d) for d in decisions if d.name.startswith("layer_norm")} == {Fused}
    assert {type(d) for d in decisions if d.name.startswith("rms_norm")} == {Refused}


# ---- a graph is as it was before


def traced(width: int) -> torch.fx.GraphModule:
    """A norm's forward and backward as a functional graph."""

    def function(x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y = nn.functional.layer_norm(x, (width,)).relu()
        return [y, *torch.autograd.grad(y, x, g)]

    return trace(function, torch.empty(6, width), torch.empty(6, width))


@pytest.mark.parametrize("function", ["_provenance", "_results", "_insert", "sort"])
def test_a_region_half_put_is_taken_out_again(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = traced(33).graph
    before = str(graph)
    monkeypatch.setattr(rewrite, function, Changing(getattr(rewrite, function)))
    decisions = pipeline.fuse_graph(graph, print, least_bytes=0)
    assert decisions
    assert all("rewriting" in d.reason for d in decisions if isinstance(d, Refused))
    assert str(graph) == before
    graph.lint()


# ---- GPUs, without one: graphs of tensors that claim to lie there


def fuse_for_gpu(width: int) -> list[Fused | Refused]:
    plan.make_plan.cache_clear()  # what an earlier test planned is planned again
    graph = traced(width).graph
    with FakeTensorMode() as mode:
        for node in graph.nodes:
            if isinstance(like := node.meta.get("val"), torch.Tensor):
                empty = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device="meta"
                )
                node.meta["val"] = FakeTensor(mode, empty, torch.device("cuda:0"))
    with record.listen() as heard:
        entry.FusionPass(Options(least_bytes=0))(graph)
    graph.lint()
    return list(heard)


def test_a_region_for_a_gpu_is_printed_when_it_is_planned() -> None:
    (decision,) = fuse_for_gpu(90)
    assert isinstance(decision, Fused)
    assert decision.device == "cuda"
    assert launch_gpu.kernel.cache_info().currsize


@pytest.mark.parametrize(
    ("owner", "function"), [(launch_triton, "make_plan"), (plan, "with_launches")]
)
def test_a_fault_in_a_kernel_for_a_gpu_leaves_the_region_to_inductor(
    owner: object,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(owner, function, fail)
    (decision,) = fuse_for_gpu(91)
    assert isinstance(decision, Refused)
    assert "a fault of normpass in planning the kernel: KeyError" in decision.reason
    (warning,) = warnings_of(caplog)
    assert "a fault in planning the kernel of norm of the graph" in warning


def test_a_plan_without_a_triton_form_is_refused_when_it_is_planned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*args: object) -> None:
        raise UnsupportedPlanError("no Triton form for this test")

    monkeypatch.setattr(plan, "with_launches", unsupported)
    (decision,) = fuse_for_gpu(92)
    assert isinstance(decision, Refused)
    assert decision.reason == "no Triton form for this test"
    assert not warnings_of(caplog)


# ---- what is said


def test_a_kind_of_fault_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for subject in ("layer_norm of a", "layer_norm of b"):
            with faults.survived("lowering", subject, "Inductor compiles it instead"):
                fail()
        with faults.survived("rewriting", "layer_norm of a", "Inductor compiles it instead"):
            fail()
    levels = [r.levelname for r in caplog.records if "a fault in" in r.getMessage()]
    assert levels == ["WARNING", "INFO", "WARNING"]
    assert any(r.exc_info for r in caplog.records)  # the traceback, for whoever reports it
    assert len(faults.reported()) == 2


def test_a_debug_folder_that_cannot_be_written_is_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    net, x = nn.LayerNorm(93), torch.randn(4, 93)
    compiled = compile_fused(net, inner="eager", debug=str(file))
    torch.testing.assert_close(compiled(x), net(x))
    (warning,) = warnings_of(caplog)
    assert "nothing is written to the debug folder" in warning
    assert not faults.reported()
