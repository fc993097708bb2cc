"""The rules for zero tensors act where a zero is met, and leave every other trace as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


def fixed(*shape: int) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel()).float() ** 2).reshape(shape)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)) + x


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), fixed(3, 8)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        fixed(2, 2, 8, 8),
    ),
    "attention": (Attention, fixed(2, 5, 8)),
}

Nodes = list[tuple[str, str, str, str]]


def nodes(graph: torch.fx.Graph) -> Nodes:
    return [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in graph.nodes]


def trace(function: Callable[..., Any], *args: Tensor) -> torch.fx.Graph:
    """A symbolic trace, as AOTAutograd makes it."""
    with enable_python_dispatcher():
        return make_fx(function, tracing_mode="symbolic")(*args).graph


def traced(function: Callable[..., Any], *args: Tensor) -> Nodes:
    return nodes(trace(function, *args))


def live(function: Callable[..., Any], *args: Tensor) -> list[str]:
    """The operators that the results need."""
    graph = trace(function, *args)
    graph.eliminate_dead_code()
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def compiled(function: Callable[..., Any], *args: Tensor) -> list[Nodes]:
    """Forward, and backward where there is one, as AOTAutograd hands them to a backend."""
    graphs: list[Nodes] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(nodes(graph.graph))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    out = torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*args)
    if out.requires_grad:
        out.sum().backward()
    return graphs


def with_parameters(model: nn.Module) -> tuple[Callable[..., Tensor], list[Tensor]]:
    names, values = zip(*model.named_parameters(), strict=True)

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    return call, [value.detach() for value in values]


@pytest.mark.parametrize("name", MODELS)
def test_models_are_traced_node_for_node(name: str) -> None:
    """Their forward and their gradients; of their tangents, for which numbers such as the 2 in
    x / 2 are tangents that are not there, what is alive.
    """
    torch.manual_seed(0)
    call, parameters = with_parameters(MODELS[name][0]())
    args = (MODELS[name][1], *parameters)
    everything = tuple(range(len(args)))

    def gradients(*args: Tensor) -> Any:
        return grad(lambda *a: call(*a).sin().sum(), everything)(*args)

    def tangents(*args: Tensor) -> Tensor:
        return jvp(lambda *a: call(*a).sin(), args, args)[1]

    stock = [traced(call, *args), traced(gradients, *args), live(tangents, *args)]
    with registered():
        assert [traced(call, *args), traced(gradients, *args), live(tangents, *args)] == stock


@pytest.mark.parametrize("name", MODELS)
def test_models_are_compiled_node_for_node(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name][0](), MODELS[name][1]
    stock = compiled(model, x.requires_grad_())
    assert len(stock) == 2, "a forward and a backward"
    with registered():
        assert compiled(model, x) == stock


# A tangent for each argument, and operators with kernels for zeros among them.
FULL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, y: x * y,
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "div": lambda x, y: x / y,
    "views": lambda x, y: (x.view(-1) * y.reshape(-1)).as_strided((2, 3), (3, 1)),
    "cross": lambda x, y: torch.linalg.cross(x, y, dim=0),
    "where": lambda x, y: torch.where(x > y, x.exp(), y.sum(0)),
}


@pytest.mark.parametrize("name", FULL)
def test_tangents_that_are_all_there(name: str) -> None:
    x, y = fixed(3, 4) + 2, fixed(3, 4).flip(1) + 3

    def tangent(x: Tensor, y: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
        return jvp(FULL[name], (x, y), (dx, dy))[1]

    def batched(x: Tensor, y: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
        return vmap(tangent)(*(v[None].expand(2, *v.shape) for v in (x, y, dx, dy)))

    for function in (tangent, batched) if name != "views" else (tangent,):
        stock = traced(function, x, y, y, x)
        with registered():
            assert traced(function, x, y, y, x) == stock


# One tangent is missing.
PARTIAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, y: x * y,
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: (x - y).sin(),
    "quotient": lambda x, y: x / y,
    "numbers": lambda x, y: 2 * x - y / 3 + 1,
}


@pytest.mark.parametrize("name", PARTIAL)
def test_a_tangent_that_is_not_there(name: str) -> None:
    """What the result needs is the same; what is dead is on the device that it says it is on."""
    x, y = fixed(3, 4) + 2, fixed(3, 4).flip(1) + 3

    def tangent(x: Tensor, y: Tensor, dx: Tensor) -> Tensor:
        return jvp(lambda v: PARTIAL[name](v, y), (x,), (dx,))[1]

    stock = live(tangent, x, y, y)
    with registered():
        assert live(tangent, x, y, y) == stock
        everything = str(traced(tangent, x, y, y))
    assert "_efficientzerotensor" not in everything
    assert "meta" not in everything
