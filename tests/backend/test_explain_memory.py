"""The memory of a step: what is saved, by what autograd is given; what is alive, by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normpass
from normpass.backend.explain import stock
from normpass.backend.explain.memory import Memory

# Dynamo looks at the gradients of what a graph break hands it, leaf or not.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH, ROWS = 64, 256
WHOLE = 4 * ROWS * WIDTH
OPTIONS: dict[str, Any] = {"least_bytes": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def measured(fn: Any, *inputs: Tensor, **options: Any) -> Memory:
    found = normpass.explain(fn, *inputs, measure="memory", options={**OPTIONS, **options}).memory
    assert isinstance(found, Memory), found
    return found


def given_to_autograd(model: nn.Module, x: Tensor, backend: str) -> int:
    """The bytes of all storages that a compiled forward saves, without parameters and inputs."""
    options = OPTIONS if backend == "normpass" else None
    compiled = torch.compile(model, backend=backend, options=options)
    compiled(x)
    there = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(x)
    assert result.requires_grad
    return sum(kept.values())


def test_what_is_saved_is_what_autograd_is_given() -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(ROWS, WIDTH)
    found = measured(model, x)
    for side, backend in ((found.ours, "normpass"), (found.stock, "inductor")):
        torch._dynamo.reset()
        assert side.saved_bytes == given_to_autograd(model, x, backend) > 2 * WHOLE
        saved = {tensor.name: tensor for tensor in side.saved}
        assert len(saved) == len(side.saved)
        assert {tensor.module for tensor in side.saved} >= {"0.norm", "1.norm", "0.linear"}
        assert all(tensor.is_input == tensor.name.startswith("primals") for tensor in side.saved)


def test_what_is_alive_is_what_is_saved_and_returned() -> None:
    found = measured(nn.Sequential(Block(), Block()), torch.randn(ROWS, WIDTH))
    for side in (found.ours, found.stock):
        assert side.timeline.after_forward == side.saved_bytes + WHOLE
        assert side.timeline.peak >= side.timeline.after_forward
        for phase in (side.timeline.forward, side.timeline.backward):
            assert [when for when, _ in phase] == sorted(when for when, _ in phase)
            assert all(0 <= when <= 1 and alive >= 0 for when, alive in phase)


def test_without_a_backward_nothing_is_saved() -> None:
    with torch.no_grad():
        found = measured(nn.LayerNorm(WIDTH), torch.randn(ROWS, WIDTH), inner="eager")
    for side in (found.ours, found.stock):
        assert side.saved == ()
        assert side.timeline.after_forward == WHOLE
        assert side.timeline.backward == () or side.timeline.backward[-1][1] <= WHOLE


def test_graphs_that_break_are_joined_to_their_backwards() -> None:
    first, second = Block(), Block()

    def broken(x: Tensor) -> Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    found = measured(broken, torch.randn(ROWS, WIDTH, requires_grad=True))
    for side in (found.ours, found.stock):
        of_products = [t.module for t in side.saved if t.nbytes == WHOLE and "linear" in t.module]
        assert of_products == ["second.linear", "first.linear"]


def test_no_trace_is_left() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(16, 8)
    values = {name: t.clone() for name, t in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    report = normpass.explain(model, x, options=OPTIONS, measure=("time", "memory"))
    assert isinstance(report.memory, Memory)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(torch.equal(t, values[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_failure_is_said_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(stock, "compiled", failing)
    report = normpass.explain(
        nn.LayerNorm(8), torch.randn(4, 8), measure="memory", options={"inner": "eager"}
    )
    assert isinstance(report.memory, str)
    assert report.memory == "RuntimeError: no compiler"
    assert "memory not measured: RuntimeError: no compiler" in str(report)


def test_an_unknown_measurement_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="measure: expected time or memory, found 'tiem'"):
        normpass.explain(nn.LayerNorm(8), torch.randn(4, 8), measure=("tiem",))
