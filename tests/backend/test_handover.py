"""Forwards that hand over to their derivatives what is expensive, from the second call on."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from higher_order_cases import IGNORED, W, X, assert_same, compiled, derivatives, numbers
from higher_order_programs import PROGRAMS
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from normpass.backend.higher_order import handover

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

pytestmark = IGNORED
# The others by `make sweep`.
SAMPLED = ("views of one result", "graph breaks and a shared weight", "a Function in a checkpoint")


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of tests are small: all of them are handed over."""
    monkeypatch.setattr(handover, "LEAST_OPERATIONS", 1)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each graph hands over that has been asked for more."""
    found: list[int] = []
    original = handover.handing_over

    def noted(*args: Any) -> Any:
        graph = original(*args)
        found.append(len(graph.meta[handover.HANDED]) if graph else 0)
        return graph

    monkeypatch.setattr("normpass.backend.higher_order.forward.handing_over", noted)
    return found


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_views_of_what_is_itself_a_view(inner: str) -> None:
    """Group norm's result is a view of its kernel's, where Inductor does not compile it."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.group_norm(x @ w.t(), 2, w[:, 0])
        return y[0], y.t()

    ours = compiled(function, inner=inner)
    right = derivatives(function, X, W)
    for _ in range(3):
        assert_same(derivatives(ours, X, W), right)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SAMPLED else pytest.mark.sweep) for n in PROGRAMS]
)
def test_derivatives(name: str, order: int) -> None:
    """The first call runs once more; later ones hand over."""
    function = PROGRAMS[name]
    ours = compiled(function)
    right = derivatives(function, X, W, order=order)
    for _ in range(3):
        assert_same(derivatives(ours, X, W, order=order), right)


@pytest.mark.usefixtures("everything")
def test_other_sizes(handed: list[int]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm((x @ w).tanh() @ w, (4,)).sin()

    ours = torch.compile(function, backend="normpass", options={"inner": "eager"}, dynamic=True)
    for rows in (3, 5, 9, 2):
        x = numbers(rows, 4)
        assert_same(derivatives(ours, x, W), derivatives(function, x, W))
    assert handed == [2]


class Bounded(nn.Module):
    """With a float that Dynamo takes for an input where sizes are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = 0.5

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (torch.where(x <= self.bound, x, 0.0) @ w).sin()


@pytest.mark.usefixtures("everything")
def test_a_float_that_is_an_input(handed: list[int]) -> None:
    ours = torch.compile(Bounded(), backend="normpass", options={"inner": "eager"}, dynamic=True)
    for _ in range(2):
        assert_same(derivatives(ours, X, W), derivatives(Bounded(), X, W))
    assert handed == [1]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 12, 3, padding=1), nn.GroupNorm(3, 12)
        self.second = nn.Conv2d(12, 16, 3, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(self.norm(self.first(x)))
        return self.second(h).tanh(), h.mean((2, 3))


@pytest.mark.parametrize("inner", [pytest.param("eager", marks=pytest.mark.sweep), "inductor"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.sweep)]
)
def test_images(dtype: torch.dtype, inner: str, handed: list[int]) -> None:
    """Results lie as they do without a handover."""
    torch.manual_seed(0)
    model = Convolutions().to(dtype)
    x = numbers(2, 8, 9, 9).detach().to(dtype).requires_grad_()
    ours = compiled(model, inner=inner)

    def both(f: Function) -> tuple[list[tuple[int, ...]], list[Tensor]]:
        leaves = [x, *model.parameters()]
        values = f(x)
        first = torch.autograd.grad(sum(y.sum() for y in values), leaves, create_graph=True)
        total = sum(g.square().sum() for g in first) + values[1].square().sum()
        second = torch.autograd.grad(total, leaves)
        return [y.stride() for y in values], [*values, *first, *second]

    strides, right = both(model)
    for _ in range(3):
        found, numbers_ = both(ours)
        assert found == strides
        near = (1e-9, 1e-9) if dtype is torch.float64 else (2e-3, 1e-3)
        for y, want in zip(numbers_, right, strict=True):
            torch.testing.assert_close(y, want, rtol=near[0], atol=near[1])
    assert handed == [2]


@fx.wrap
def hooks_of_all_modules(x: Tensor) -> Tensor:
    from torch.nn.modules import module

    assert not module._global_forward_pre_hooks
    assert not module._global_forward_hooks
    return x


def test_operations_are_counted_in_one_thread() -> None:
    """Other threads run their modules meanwhile: they must not see that something is counted."""
    graph = fx.symbolic_trace(lambda x, w: (hooks_of_all_modules(x) @ w,))
    run = handover._Counted(graph)
    run.on_tape([X, W], ())
    assert run.counter.count == 2 * 3 * 4 * 4


@pytest.mark.sweep
def test_no_product_is_computed_twice() -> None:
    """A step of a gradient penalty calls as many as eager mode, whose backwards are as lazy."""
    torch.manual_seed(0)
    hidden = [m for _ in range(2) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU())]
    model = nn.Sequential(*hidden, nn.Linear(64, 1))
    x = torch.randn(16, 64, requires_grad=True)

    def products(f: Function) -> int:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            y = f(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (slope.square().sum() + y.square().sum()).backward()
        counts = {event.key: event.count for event in seen.key_averages()}
        return counts.get("aten::mm", 0) + counts.get("aten::addmm", 0)

    ours = compiled(model, inner="inductor")
    for _ in range(2):
        products(ours)
    assert products(ours) == products(model)


@pytest.mark.usefixtures("everything")
def test_a_first_derivative_alone() -> None:
    """Of a forward that hands over: some calls of a model ask for more, others do not."""
    ours = compiled(lambda x, w: ((x @ w).tanh() @ w, (x * w.sum()).sin()))
    derivatives(ours, X, W)
    for used in ([0], [1], [0, 1]):
        found, right = (
            torch.autograd.grad(sum(f(X, W)[i].sum() for i in used), (X, W))
            for f in (ours, lambda x, w: ((x @ w).tanh() @ w, (x * w.sum()).sin()))
        )
        assert_same(found, right)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("vectorize", [False, True])
def test_hessians(vectorize: bool) -> None:
    """Batched cotangents, some of which are not there."""

    def hessian(f: Function) -> Tensor:
        return torch.autograd.functional.hessian(lambda x: f(x, W), X, vectorize=vectorize)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).tanh() @ w).sin().sum()

    ours = compiled(function)
    for _ in range(3):
        assert_same([hessian(ours)], [hessian(function)])


@pytest.mark.usefixtures("everything")
def test_a_call_is_freed_with_its_result() -> None:
    """What it hands over is its own result: it must not hold itself."""
    ours = compiled(lambda x, w: ((x @ w).tanh() @ w).sin())
    derivatives(ours, X, W)
    gc.collect()
    gc.disable()
    try:
        y = ours(X, W)
        node = weakref.ref(y.grad_fn)
        (g,) = torch.autograd.grad(y.sum(), X, create_graph=True)
        assert node() is not None
        del y, g
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("everything")
def test_what_is_written_to_later_is_not_handed_over(handed: list[int]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        g = (h + 1).sin() @ w
        h.mul_(2)
        return g.tanh() * h

    ours = compiled(function)
    right = derivatives(function, X, W)
    for _ in range(3):
        assert_same(derivatives(ours, X, W), right)
    assert handed == [1]


@pytest.mark.usefixtures("everything")
def test_random_numbers_are_drawn_by_whole_programs(handed: list[int]) -> None:
    derivatives(compiled(lambda x, w: F.dropout(x @ w, 0.5) @ w), X, W)
    assert handed == []


@pytest.mark.usefixtures("everything")
def test_statistics_move_once() -> None:
    def run(make: Callable[[Function], Function]) -> list[Any]:
        norm = nn.BatchNorm1d(4).double()
        f = make(lambda x, w: norm(x @ w).tanh() @ w)
        return [g for _ in range(3) for g in derivatives(f, X, W)] + list(norm.buffers())

    assert_same(run(compiled), run(lambda f: f))


@pytest.mark.usefixtures("everything", "faults_are_meant")
def test_what_cannot_be_compiled_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr("normpass.backend.higher_order.forward.handing_over", broken)
    ours = compiled(lambda x, w: (x @ w).tanh() @ w)
    assert_same(derivatives(ours, X, W), derivatives(lambda x, w: (x @ w).tanh() @ w, X, W))
