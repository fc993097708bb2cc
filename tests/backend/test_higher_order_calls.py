"""What a call of compiled code keeps for further derivatives, and when it lets it go; threads."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from higher_order_cases import IGNORED, W, X, assert_same, compiled, derivatives, model, numbers
from higher_order_programs import NORMS, breaks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from normpass.backend import higher_order
from normpass.backend.entry import normpass
from normpass.backend.explain import record
from normpass.backend.higher_order import handover, kept
from normpass.passes import faults

pytestmark = IGNORED


def test_an_input_that_was_written_to_since() -> None:
    bias = numbers(4)
    ours = compiled(lambda x, w, b: (x @ w + b).tanh())
    y = ours(X, W, bias)
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version 0"):
        torch.autograd.grad(y.sum(), X, create_graph=True)


def test_a_graph_that_is_freed() -> None:
    y = compiled(model)(X, W).sum()
    torch.autograd.grad(y, X)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, X, create_graph=True)


def test_nothing_is_kept_after_a_backward() -> None:
    ours = compiled(lambda x, w: (x * 2).relu() @ w)
    x = numbers(3, 4) * 1.0
    alive = weakref.ref(x)
    y = ours(x, W).sum()
    torch.autograd.grad(y, W)
    del x
    assert alive() is None
    assert y.grad_fn is not None


def test_memory_is_flat() -> None:
    ours = compiled(model)

    def tensors() -> int:
        derivatives(ours, X, W)
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    tensors()
    before = tensors()
    for _ in range(20):
        derivatives(ours, X, W)
    assert tensors() == before


def test_threads() -> None:
    ours, right = compiled(model), derivatives(model, X, W)
    ours(X, W)  # Dynamo compiles for one thread at a time, and leaves the others to eager mode
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(derivatives(ours, X, W))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for one in found:
        assert_same(one, right)


def test_a_thread_that_calls_while_another_compiles_a_derivative() -> None:
    """A graph that is being traced is a state of the process."""
    other, found = compiled(torch.sin), []
    other(X)
    is_traced = threading.Event()

    def call_it(x: Tensor) -> Tensor:
        if is_traced.is_set():
            thread = threading.Thread(target=lambda: found.append(other(X)))
            thread.start()
            thread.join()
        return torch.empty_like(x)

    with torch.library._scoped_library("normpass_tests", "FRAGMENT") as library:
        library.define("twice_while_traced(Tensor x) -> Tensor")
        twice: Any = torch.ops.normpass_tests.twice_while_traced
        library.impl("twice_while_traced", lambda x: 2 * x, "CPU")
        torch.library.register_fake("normpass_tests::twice_while_traced", call_it, lib=library)
        torch.library.register_autograd(
            "normpass_tests::twice_while_traced", lambda ctx, g: 2 * g, lib=library
        )
        y = compiled(lambda x, w: twice(x @ w).sin())(X, W)
        is_traced.set()
        (first,) = torch.autograd.grad(y.sum(), X, create_graph=True)
    assert_same([first], torch.autograd.grad((2 * (X @ W)).sin().sum(), X))
    assert len(found) > 0
    assert_same(found, [torch.sin(X)] * len(found))


@pytest.mark.parametrize("draws", [False, True])
def test_a_graph_that_runs_on_fake_tensors_first(draws: bool) -> None:
    """As the optimizer of DistributedDataParallel runs each part, to know what comes out of it."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones_like(x @ w)
        mask = F.dropout(mask, 0.5) if draws else mask
        return (x @ w * mask).sin(), mask

    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        code = normpass(graph, inputs, options={"inner": "eager"})
        places = graph.graph.find_nodes(op="placeholder")
        fake = [place.meta["example_value"] for place in places]
        with fake[0].fake_mode:
            shapes.append(code(*fake)[0].shape)
        return code

    def gradients(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y.sum(), (X, W), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.sin().sum() for g in first), (X, W))]

    y, mask = torch.compile(function, backend=backend)(X, W)
    assert_same(gradients(y), gradients((X @ W * mask.detach()).sin()))
    assert shapes == [(3, 4)]


def test_what_torch_has_no_derivative_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a fault of ours: uncompiled, it is as in eager mode."""

    def fail(*args: Any) -> Any:
        raise NotImplementedError("the derivative for '_pdist_backward' is not implemented.")

    monkeypatch.setattr(higher_order.Derivatives, "_compile", fail)
    assert_same(derivatives(compiled(model), X, W), derivatives(model, X, W))
    assert not faults.reported()


@pytest.mark.usefixtures("faults_are_meant")
@pytest.mark.parametrize("function", [model, breaks])
def test_what_cannot_be_compiled_runs_uncompiled(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("for the test")

    monkeypatch.setattr(higher_order.Derivatives, "_compile", fail)
    assert_same(derivatives(compiled(function), X, W), derivatives(function, X, W))


@pytest.mark.usefixtures("faults_are_meant")
@pytest.mark.parametrize("name", sorted(NORMS))
def test_norms_that_run_uncompiled_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third order on eager mode's are not."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("for the test")

    monkeypatch.setattr(higher_order.Derivatives, "_compile", fail)
    norm, written_out = NORMS[name]
    found = derivatives(compiled(norm), X, W, order=3)
    assert_same(found, derivatives(written_out, X, W, order=3))


@pytest.mark.usefixtures("faults_are_meant")
def test_random_numbers_are_drawn_again_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, the same graph would draw others."""
    compile_it = higher_order.Derivatives._compile

    def only_alone(self: Any, key: Any) -> Any:
        if key.higher or key.batch is not None:
            raise RuntimeError("for the test")
        return compile_it(self, key)

    monkeypatch.setattr(higher_order.Derivatives, "_compile", only_alone)
    y = compiled(lambda x, w: F.dropout(x, 0.5) @ w)(X, W)
    (of_all,) = torch.autograd.grad(y.sum(), X, retain_graph=True)
    eye = torch.eye(12, dtype=torch.float64).view(12, 3, 4)
    (rows,) = torch.autograd.grad(y, X, eye, is_grads_batched=True, retain_graph=True)
    assert_same([rows.sum(0)], [of_all])  # one by one
    with pytest.raises(RuntimeError, match=r"expected to compile it too.*found for the test"):
        torch.autograd.grad(y.sum(), X, create_graph=True)


def test_generators_that_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a CUDA graph is captured: training goes on, a further derivative is refused."""

    def fail(inputs: Any) -> Any:
        raise RuntimeError("captured")

    monkeypatch.setattr(kept, "random_state", fail)
    ours = compiled(lambda x, w: F.dropout(x, 0.5) @ w)
    torch.autograd.grad(ours(X, W).sum(), X)
    y = ours(X, W)
    with pytest.raises(RuntimeError, match="expected the states of the random number generators"):
        torch.autograd.grad(y.sum(), X, create_graph=True)


@pytest.mark.usefixtures("faults_are_meant")
@pytest.mark.parametrize("broken", ["install", "attach"])
def test_a_first_derivative_survives(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AttributeError("for the test")

    monkeypatch.setattr(higher_order, broken, fail)
    assert_same(derivatives(compiled(model), X, W, order=1), derivatives(model, X, W, order=1))


def test_levels_of_grad_over_a_backward() -> None:
    y = compiled(model)(X, W)
    with pytest.raises(RuntimeError, match="expected levels of vmap alone"):
        torch.func.grad(lambda v: torch.autograd.grad(y, X, v, retain_graph=True)[0].sum())(
            torch.ones(3, 4, dtype=torch.float64)
        )


def test_a_buffer_on_the_tape_does_not_hold_its_call() -> None:
    def function(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
        buffer.copy_((x @ w).tanh())
        return (x @ w).sin()

    gc.collect()
    gc.disable()
    try:
        ours, x = compiled(function), numbers(3, 4) * 1.0
        buffer = torch.zeros(3, 4, dtype=torch.float64)
        ours(x, W, buffer)
        alive = weakref.ref(x)
        del x, buffer
        assert alive() is None
    finally:
        gc.enable()


def test_the_second_derivative_of_a_norm_is_one_region() -> None:
    def function(x: Tensor) -> Tensor:
        return F.group_norm(x, 4)

    x = numbers(4, 8, 6, 6)
    ours = compiled(function, least_bytes=0)
    with record.watch() as graphs:
        found = derivatives(ours, x)
    assert_same(found, derivatives(function, x))
    assert len([d for d in graphs[-1].decisions if hasattr(d, "text")]) == 1


def test_statistics_of_norms_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what they are before a call matters to no derivative."""
    copied: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        kept, "_before_it_is_written", lambda x: copied.append(tuple(x.shape)) or x.clone()
    )
    norm, buffer = nn.BatchNorm1d(4).double(), numbers(5).detach()

    def function(x: Tensor, w: Tensor) -> Tensor:
        read = buffer.sum()
        buffer.mul_(2)
        return norm(x @ w).tanh() * read

    compiled(function)(X, W)
    assert copied == [(5,)]


class _Printing(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        torch._higher_order_ops.print("once")
        return (x @ w).tanh()


def test_what_has_an_effect_is_refused_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    """It would be done again. The first derivative is as it was."""
    ours = compiled(_Printing())
    assert_same(derivatives(ours, X, W, order=1), derivatives(_Printing(), X, W, order=1))
    assert "cannot be differentiated" not in caplog.text
    with pytest.raises(RuntimeError):
        derivatives(ours, X, W)
    assert "cannot be differentiated (create_graph=True): expected a graph that" in caplog.text
    assert "found print" in caplog.text


def test_inputs_that_share_memory_are_refused_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        x.mul_(2)
        return (x @ w).tanh() + y.sum()

    both = torch.arange(16, dtype=torch.float64) / 16
    ours = compiled(function)
    value = ours(both[:12].view(3, 4), both[4:].view(3, 4), W)
    torch.autograd.grad(value.sum(), W, create_graph=True)
    assert caplog.text.count("found some that share it and are written to") == 1


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_make_saved_tensor"),
    reason="further derivatives under hooks for saved tensors need torch 2.12",
)
@pytest.mark.parametrize("order", [2, 3])
def test_a_checkpoint_around_code_that_takes_derivatives(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts what is saved, the first time and when it runs again; the compiled convolution is
    handed over from the second call on, and compiled in between.
    """
    monkeypatch.setattr(handover, "LEAST_OPERATIONS", 1)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(x[:, None], w[:2, None, :3], padding=1).sin().mean(1)

    def slope(f: Any) -> Any:
        def of(x: Tensor, w: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(f(x, w).sin().sum(), x, create_graph=True)
            return found

        return lambda x, w: checkpoint(of, x * 1, w, use_reentrant=False)

    ours = slope(compiled(block))
    right = derivatives(slope(block), X, W, order=order)
    for _ in range(2):
        assert_same(derivatives(ours, X, W, order=order), right)


def test_a_graph_that_records_where_its_caller_does_not() -> None:
    """What comes before it does is a constant, at every order."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        factor = x.square()
        with torch.enable_grad():
            return (factor * w.sin() * x).tanh()

    compiled = torch.compile(function, backend="normpass", options={"inner": "eager"})
    x, w = (torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    found = []
    for f in (function, compiled):
        with torch.no_grad():
            y = f(x, w)
        assert y.requires_grad
        first = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), (x, w))
        found.append([*first, *second])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)
