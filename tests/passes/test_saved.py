"""What is saved for the backward: what a norm or an activation was computed from, and not its
result for a matrix product as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from normpass.backend.entry import SavingPass
from normpass.backend.inductor.mutated import constant_inputs
from normpass.backend.options import Options
from normpass.backend.table import decomposition_table
from normpass.benchmarks.measure import peak_bytes
from normpass.passes import saved

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

ROWS, WIDTH, WIDE = 256, 128, 192


def matrix(rows: int, columns: int) -> Tensor:
    values = torch.randn(rows, columns, dtype=torch.float64) / rows**0.5
    return values.requires_grad_()


X, W, V = matrix(ROWS, WIDTH), matrix(WIDTH, WIDE), matrix(WIDE, WIDTH)


def saved_for_backward(
    function: Callable[..., Any], *inputs: Tensor, marked: bool = True
) -> list[tuple[int, ...]]:
    """The shapes of the tensors with many rows that a forward saves."""
    found: list[tuple[int, ...]] = []

    def partition(joint: GraphModule, *args: Any, num_fwd_outputs: int, **kwargs: Any) -> Any:
        if marked:
            saved.mark(joint.graph, constant_inputs(joint.graph))
        forward, backward = min_cut_rematerialization_partition(
            joint, *args, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
        (output,) = forward.graph.find_nodes(op="output")
        for node in output.args[0][num_fwd_outputs:]:
            value = node.meta["val"]
            if isinstance(value, Tensor) and set(value.shape) > {ROWS}:  # transposed or not
                found.append((ROWS, *({*value.shape} - {ROWS})))
        return forward, backward

    compiled = aot_function(
        function,
        fw_compiler=nop,
        bw_compiler=nop,
        partition_fn=partition,
        decompositions=decomposition_table(),
    )

    def gradients(f: Callable[..., Any]) -> tuple[Tensor, ...]:
        y = f(*inputs)
        results = y if isinstance(y, tuple | list) else [y]
        return torch.autograd.grad(sum(each.sin().sum() for each in results), inputs)

    expected, result = gradients(function), gradients(compiled)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    return sorted(found)


def normalized(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x.sin() @ x.mT @ x, (WIDTH,)) @ w


def test_a_normalized_tensor_is_computed_again() -> None:
    assert saved_for_backward(normalized, X, W, marked=False).count((ROWS, WIDTH)) == 3
    assert saved_for_backward(normalized, X, W).count((ROWS, WIDTH)) == 2


@pytest.mark.parametrize("activation", [F.gelu, F.silu])
def test_an_activation_is_computed_again(activation: Callable[[Tensor], Tensor]) -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return activation(x @ w) @ v

    assert saved_for_backward(f, X, W, V, marked=False).count((ROWS, WIDE)) == 2
    assert saved_for_backward(f, X, W, V).count((ROWS, WIDE)) == 1


def test_a_gated_activation_is_computed_again_from_both() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (F.silu(x @ w) * (x.sin() @ w)) @ v

    plain = saved_for_backward(f, X, W, V, marked=False)
    assert plain.count((ROWS, WIDE)) == 3
    assert saved_for_backward(f, X, W, V).count((ROWS, WIDE)) == 2  # both factors


def test_what_the_backward_does_not_have_is_saved() -> None:
    """A sum's gradient takes nothing."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (x @ w + x @ w.sin()) @ v

    assert saved_for_backward(f, X, W, V) == saved_for_backward(f, X, W, V, marked=False)


def test_one_is_not_computed_from_another_that_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the first of a chain would wait for the whole of it."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        a = F.gelu(h)
        b = F.gelu(a)
        return (a @ v + b @ v) @ w

    dropped: list[str] = []
    original = saved.mark
    monkeypatch.setattr(saved, "mark", lambda *args: dropped.extend(map(str, original(*args))))
    assert saved_for_backward(f, X, W, V, marked=False).count((ROWS, WIDE)) == 3
    assert saved_for_backward(f, X, W, V).count((ROWS, WIDE)) == 2
    assert len(dropped) == 1


def test_what_the_caller_gets_is_no_loss() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(x @ w)
        return y, y @ w.mT

    assert saved_for_backward(f, X, W) == saved_for_backward(f, X, W, marked=False)


def test_a_product_of_little_work_is_not_worth_it() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.gelu(x @ w) @ v

    narrow = matrix(WIDE, 32)
    plain = saved_for_backward(f, X, W, narrow, marked=False)
    assert saved_for_backward(f, X, W, narrow) == plain


def test_dropout_keeps_its_mask() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        mask = torch.ops.aten.gt(torch.ops.aten.rand_like(x @ w, dtype=torch.float64), 0.1)
        return (F.gelu(x @ w) * mask * (1 / 0.9)) @ v

    joint: list[int] = []

    def partition(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        dropped = saved.mark(graph.graph, constant_inputs(graph.graph))
        joint.append(len(dropped))
        marked = [node for node in graph.graph.nodes if "recompute" in node.meta]
        assert not any("rand" in str(node.target) for node in marked)
        return min_cut_rematerialization_partition(graph, *args, **kwargs)

    compiled = aot_function(
        f,
        fw_compiler=nop,
        bw_compiler=nop,
        partition_fn=partition,
        decompositions=decomposition_table(),
    )
    torch.autograd.grad(compiled(X, W, V).sum(), (X, W, V))
    assert joint == [1]


def test_checkpoints_of_the_user_stay() -> None:
    """Who marks what is computed again has decided."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["recompute"] = 0
    graph.output(x)
    assert saved.mark(graph, [x]) == []


# --- compiled -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def step(function: Any, net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(x).sin().sum(), list(net.parameters()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step_takes_less_memory_and_is_right(dynamic: bool) -> None:
    net = nn.Sequential(*(Block() for _ in range(3))).double()
    x = torch.randn(2048, WIDTH, dtype=torch.float64)
    right = step(net, net, x)
    peaks: dict[bool | None, int] = {}
    for recompute in (None, False):
        function: Any = torch.compile(
            net, backend="normpass", dynamic=dynamic, options={"recompute": recompute}
        )
        torch.testing.assert_close(step(function, net, x), right, rtol=1e-9, atol=1e-9)
        peaks[recompute] = peak_bytes(lambda f=function: step(f, net, x), "cpu")
        torch._dynamo.reset()
    assert peaks[None] < 0.75 * peaks[False]


@pytest.mark.parametrize(
    ("recompute", "device", "marks"),
    [
        (None, "cpu", True),
        (None, "meta", False),
        (True, "meta", True),
    ],
)
def test_other_devices_are_asked_for(
    recompute: bool | None, device: str, marks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, seen = torch.fx.Graph(), list[torch.fx.Graph]()
    graph.placeholder("x").meta["val"] = torch.empty(2, device=device)
    graph.output(())
    monkeypatch.setattr(saved, "mark", lambda graph, constant: seen.append(graph))
    SavingPass(Options(recompute=recompute))(graph)
    assert seen == [graph] * marks


def test_a_user_s_checkpoint_is_compiled() -> None:
    net = nn.Sequential(Block(), Block()).double()

    def f(x: Tensor) -> Tensor:
        return net[1](checkpoint(net[0], x, use_reentrant=False))

    x = torch.randn(256, WIDTH, dtype=torch.float64)
    found = step(torch.compile(f, backend="normpass", options={"recompute": True}), net, x)
    torch.testing.assert_close(found, step(net, net, x), rtol=1e-9, atol=1e-9)


def written_to(b: Tensor, w: Tensor) -> Tensor:
    y = F.gelu(b) @ w
    b.mul_(2)
    return y


def added_to(b: Tensor, w: Tensor) -> Tensor:
    """(With b[0] for b.mean(0), a view of what is written to, stock's gradient is wrong.)"""
    y = F.gelu(w.sin() @ w + b.mean(0)) @ w
    b.add_(y.detach())
    return y


def written_to_by_another_name(b: Tensor, w: Tensor, view: Tensor) -> Tensor:
    y = F.gelu(view) @ w
    b.mul_(2)
    return y


def written_to_with_a_gradient(b: Tensor, w: Tensor) -> Tensor:
    y = (b + 1) @ w
    b.mul_(2)
    return y + b


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo
@pytest.mark.parametrize(
    "function", [written_to, added_to, written_to_by_another_name, written_to_with_a_gradient]
)
def test_an_input_that_is_written_to_is_another_in_the_backward(
    function: Callable[..., Tensor],
) -> None:
    w = matrix(WIDTH, WIDTH)
    values = torch.randn(WIDTH, WIDTH, dtype=torch.float64)

    def gradient(f: Callable[..., Tensor]) -> Tensor:
        b = values.clone()
        if function is written_to_with_a_gradient:
            b = b.requires_grad_() * 1
        views = [b.view(-1, WIDTH)] if function is written_to_by_another_name else []
        (found,) = torch.autograd.grad(f(b, w, *views).sin().sum(), w)
        return found

    compiled: Any = torch.compile(function, backend="normpass", options={"recompute": True})
    torch.testing.assert_close(gradient(compiled), gradient(function), rtol=1e-9, atol=1e-9)
