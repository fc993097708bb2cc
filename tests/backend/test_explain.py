"""`normpass.explain`: every norm, where it is and why it is not fused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable

# Dynamo looks at the gradients of what a graph break or a closure hands it, leaf or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# What is refused as too small compiles no kernel: enough where names and reasons are at stake.
LOOK: dict[str, Any] = {"inner": "eager"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class HandWrittenRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Net(nn.Module):
    """Norms in a ModuleList, a Sequential and a ModuleDict."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(width, width), HandWrittenRMSNorm(width), nn.Tanh())
        self.named = nn.ModuleDict({"group": nn.GroupNorm(2, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.named["group"](self.first(self.head(x)))


NORMS_OF_NET = {"layers.0.norm", "layers.1.norm", "head.1", "named.group"}


def places(report: normpass.Report, phase: str) -> set[str]:
    norms = [(norm.phase, norm.module) for norm in report.regions]
    norms += [(norm.phase, norm.module) for norm in report.refused]
    return {path for where, module in norms if where == phase for path in module.split(", ")}


def reason(report: normpass.Report, module: str, phase: str = "forward") -> str:
    found = [r.reason for r in report.refused if (r.module, r.phase) == (module, phase)]
    assert len(found) == 1, report
    return found[0]


# ---- every norm, by its path


def test_every_norm_forward_and_backward_by_its_path() -> None:
    net = Net()
    report = normpass.explain(net, torch.randn(4, 16), options=LOOK)
    # Exactly these: no wrapping module, and no neighbouring Linear whose bias gradient is a sum.
    assert places(report, "forward") == NORMS_OF_NET
    assert places(report, "backward") == NORMS_OF_NET
    assert dict(net.named_modules()).keys() >= NORMS_OF_NET
    reasons = {refused.reason.partition(":")[0] for refused in report.refused}
    assert reasons == {"too small"}
    names = {re.sub("_backward$", "", refused.name) for refused in report.refused}
    assert names == {"layer_norm", "group_norm", "hand_written_rms_norm"}


def test_a_function_that_calls_a_model() -> None:
    net, twin = Net(), Block(16)
    report = normpass.explain(lambda x: net(x).sum(), torch.randn(4, 16), options=LOOK)
    assert places(report, "backward") == NORMS_OF_NET
    both = normpass.explain(lambda x: twin(net(x)), torch.randn(4, 16), options=LOOK)
    assert places(both, "forward") == {"twin.norm", *(f"net.{path}" for path in NORMS_OF_NET)}


def test_a_norm_without_a_module_is_a_line_of_the_users() -> None:
    def f(x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,))

    report = normpass.explain(f, torch.randn(4, 16, requires_grad=True), options=LOOK)
    line = f"{__file__}:{f.__code__.co_firstlineno + 1}"
    assert places(report, "forward") == places(report, "backward") == {line}


def test_the_model_itself() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    report = normpass.explain(nn.LayerNorm(16), x, options=LOOK)
    assert [(r.name, r.module) for r in report.refused] == [
        ("layer_norm", ""),
        ("layer_norm_backward", ""),
    ]
    assert "(the model itself)" in str(report)


# ---- why not


def test_batch_norm_in_eval_mode_has_nothing_to_fuse() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
    report = normpass.explain(net, torch.randn(4, 8), options=LOOK)
    assert "eval mode, which uses the running statistics" in reason(report, "1")
    assert "only plain sums" in reason(report, "1", "backward")
    assert {refused.name for refused in report.refused} == {"batch_norm", "batch_norm_backward"}


def test_an_input_that_needs_no_gradient() -> None:
    report = normpass.explain(Block(8), torch.randn(4, 8), options=LOOK)
    assert "only plain sums" in reason(report, "norm", "backward")


class Broken(nn.Module):
    """A graph break behind a norm, one norm that Dynamo may not see, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BreaksAfterNorm()
        self.unseen = Unseen(8)
        self.unused = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.unseen(self.inner(x))


class BreaksAfterNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        torch._dynamo.graph_break()
        return x + 1


class Unseen(nn.LayerNorm):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_norms_behind_a_graph_break_keep_their_paths_and_reasons() -> None:
    report = normpass.explain(Broken(), torch.randn(4, 8, requires_grad=True), options=LOOK)
    assert "too small" in reason(report, "inner.norm")
    assert "too small" in reason(report, "inner.norm", "backward")
    assert f"graph break at {__file__}" in reason(report, "unseen")
    assert "not called" in reason(report, "unused")


def test_a_norm_that_is_not_called() -> None:
    net = Block(8)
    net.spare = nn.LayerNorm(8)
    report = normpass.explain(net, torch.randn(4, 8), options=LOOK)
    assert reason(report, "spare").startswith("in no compiled graph: not called")


class ComplexNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


def test_a_dtype_that_regions_do_not_hold() -> None:
    net = nn.Sequential(ComplexNorm())
    report = normpass.explain(net, torch.randn(4, 8, dtype=torch.complex64), options=LOOK)
    assert reason(report, "0").startswith("reduces complex64; regions hold float64, float32")


def test_fusion_turned_off() -> None:
    report = normpass.explain(Block(8), torch.randn(4, 8), options={**LOOK, "fuse": False})
    assert reason(report, "norm") == "fusion is off (options: fuse=False)"


def test_nothing_to_report() -> None:
    report = normpass.explain(torch.sin, torch.randn(4), options=LOOK)
    assert str(report) == "sin: no norms found."


# ---- how it is called


@dataclass
class Output:
    loss: Tensor
    extra: dict[str, Any]


class Box:
    def __init__(self, held: Tensor) -> None:
        self.held = held


STRUCTURES: list[Callable[[Tensor], Any]] = [
    lambda y: (1, [y], None),
    lambda y: {"a": {"b": y}, "n": 3},
    lambda y: Output(y.sum(), {"ids": torch.arange(3)}),
    lambda y: Box(y),
    lambda y: (y.detach(), y.argmax(), y),
]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_outputs_of_any_structure_have_a_backward(structure: Callable[[Tensor], Any]) -> None:
    def f(x: Tensor, *, scale: float) -> Any:
        return structure(F.layer_norm(x, (8,)) * scale)

    report = normpass.explain(f, torch.randn(4, 8, requires_grad=True), options=LOOK, scale=2.0)
    assert [r.phase for r in report.refused] == ["forward", "backward"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_backward_without_gradients(mode: Callable[[], Any]) -> None:
    with mode():
        report = normpass.explain(Block(8), torch.randn(4, 8), options=LOOK)
    assert {refused.phase for refused in report.refused} == {"forward"}


def test_autocast_of_the_caller_holds() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = normpass.explain(Block(8), torch.randn(4, 8), options=LOOK)
    assert any("bf16[4 8]" in line.text for line in report.graphs[0].before)


def test_errors_are_those_of_the_caller() -> None:
    with pytest.raises(ValueError, match=r"unknown normpass option 'least_byte'"):
        normpass.explain(Block(8), torch.randn(4, 8), options={"least_byte": 3})
    with pytest.raises(Exception, match=r"size|shape"):
        normpass.explain(Block(8), torch.randn(4, 9), options=LOOK)


def test_a_compiled_model_is_explained_as_itself() -> None:
    compiled = torch.compile(Block(8), backend="eager")
    report = normpass.explain(compiled, torch.randn(4, 8), options=LOOK)
    assert report.title == "Block"
    assert places(report, "forward") == {"norm"}


def test_other_shapes_before_do_not_make_sizes_dynamic() -> None:
    texts = []
    for rows in (3, 5, 7):
        report = normpass.explain(Block(8), torch.randn(rows, 8), options=LOOK)
        texts.append(next(line.text for line in report.graphs[0].before if line.place == "norm"))
    assert [str(rows) in text for rows, text in zip((3, 5, 7), texts, strict=True)] == [True] * 3
