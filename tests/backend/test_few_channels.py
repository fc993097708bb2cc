"""Gradients of images of few channels are matrix products: as right as oneDNN's, for no others."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled import compile_fused
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tracing import trace_gradients

from normpass.backend.inductor import few_channels
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable

CONVOLUTIONS: dict[str, tuple[Any, ...]] = {  # channels in and out, window, stride, padding
    "a third": (3, 16, 3, 1, 1),
    "of one": (1, 16, 5, 1, 2),
    "without padding": (2, 16, 3, 1, 0),
    "more padding than window": (1, 8, 2, 1, 3),
    "strided": (3, 32, 5, 2, 2),
    "another stride each way": (3, 32, (3, 5), (2, 1), (0, 2)),
    "pixels beyond the last window": (3, 16, 3, 3, 1),
    "patches": (3, 64, 4, 4, 0),
    "larger patches": (3, 256, (9, 16), (9, 16), 0),
    "patches on padding": (3, 32, 4, 4, 2),
    "one pixel": (4, 16, 1, 1, 0),
    # The most that is taken: of channels, columns, pixels and residues.
    "8 channels": (8, 32, 3, 1, 1),
    "48 columns of 16": (3, 16, 4, 1, 1),
    "25 pixels": (2, 32, 5, 1, 1),
    "16 residues": (1, 16, 5, 4, 2),
}
# Each is left for this reason alone.
LEFT: dict[str, dict[str, Any]] = {
    "dilated": {"dilation": 2},
    "groups": {"in_channels": 2, "groups": 2},
    "9 channels": {"in_channels": 9, "out_channels": 64},
    "32 columns of 8": {"out_channels": 8},
    "pixels in no window": {"kernel_size": 2, "stride": 3},
    "30 pixels": {"in_channels": 1, "kernel_size": (5, 6), "out_channels": 32},
    "20 residues": {"in_channels": 1, "kernel_size": 5, "stride": (4, 5), "padding": 1},
}
SIZE = (13, 18)


class Wanted(TorchDispatchMode):
    """The masks of the gradients that convolutions are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is few_channels.BACKWARD:
            self.masks.append(list(args[-1]))
        return op(*args, **(kwargs or {}))


def gradients(net: Any, of: list[Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(net(x), of, g))


def check(net: nn.Module, x: Tensor, compiled: Any, weights: bool = True) -> list[list[bool]]:
    """Compares all gradients with exact ones, and the image's with eager mode's error. Returns the
    masks of compiled code.
    """
    torch.manual_seed(1)
    x = x.requires_grad_()
    g = torch.randn_like(net(x))
    exact, exact_x = deepcopy(net).double(), x.detach().double().requires_grad_()
    of = [x, *net.parameters()] if weights else [x]
    of_exact = [exact_x, *exact.parameters()] if weights else [exact_x]
    want = gradients(exact, of_exact, exact_x, g.double())
    eager = gradients(net, of, x, g)
    y = compiled(x)
    with Wanted() as wanted:
        found = torch.autograd.grad(y, of, g)
    for ours, stock, right in zip(found, eager, want, strict=True):
        off = 2 * float((stock.double() - right).norm()) + 1e-6 * float(right.norm())
        assert float((ours.double() - right).norm()) <= off
        assert ours.shape == stock.shape
    return wanted.masks


def rewritten(net: nn.Module, x: Tensor) -> Callable[..., Any]:
    """Stands for a compiled net: what it computes, and the gradients by a graph of their own that
    is rewritten as one of compiled code is.
    """
    graph = trace_gradients(net, x)
    few_channels.as_products(graph.graph)
    graph.graph.lint()
    graph.recompile()

    class Net(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            ctx.save_for_backward(x, *parameters)
            return net(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return graph(g, *ctx.saved_tensors)[1:]

    return lambda x: Net.apply(x, *net.parameters())


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(*CONVOLUTIONS[name]), nn.SiLU())
    x = torch.randn(3, CONVOLUTIONS[name][0], *SIZE)
    return net, x if name == "strided" else x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_right(name: str) -> None:
    net, x = case(name)
    assert check(net, x, rewritten(net, x)) == [[False, True, True]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["a third", "strided", "patches on padding"])
def test_compiled(name: str) -> None:
    net, x = case(name)
    assert check(net, x, compile_fused(net)) == [[False, True, True]]


def test_alone() -> None:
    """Where nothing but the image has a gradient, no convolution is left."""
    net = nn.Conv2d(3, 16, 3, padding=1).requires_grad_(False)
    assert check(net, torch.randn(2, 3, *SIZE), compile_fused(net), weights=False) == []


@pytest.mark.parametrize("name", LEFT)
def test_left_to_onednn(name: str) -> None:
    torch.manual_seed(0)
    how = {"in_channels": 3, "out_channels": 16, "kernel_size": 3, **LEFT[name]}
    net = nn.Sequential(nn.Conv2d(**how), nn.SiLU())
    x = torch.randn(2, how["in_channels"], 24, 24)
    assert check(net, x, rewritten(net, x)) == [[True, True, True]]


@pytest.mark.parametrize("kind", [nn.ConvTranspose2d, nn.Conv1d, nn.Conv3d])
def test_other_convolutions_are_left(kind: Any) -> None:
    torch.manual_seed(0)
    channels = (32, 3) if kind is nn.ConvTranspose2d else (3, 32)
    net = nn.Sequential(kind(*channels, 3), nn.SiLU())
    x = torch.randn(2, channels[0], *[6] * (net[0].weight.ndim - 2))
    assert check(net, x, rewritten(net, x)) == [[True, True, True]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_numbers_are_left(dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU()).to(dtype)
    x = torch.randn(2, 3, *SIZE, dtype=dtype, requires_grad=True)
    y = rewritten(net, x)(x)
    with Wanted() as wanted:
        torch.autograd.grad(y, [x, *net.parameters()], torch.ones_like(y))
    assert wanted.masks == [[True, True, True]]


def test_batches_of_any_size() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU()).requires_grad_(False)
    compiled = compile_fused(net, dynamic=None)
    for n in (4, 7, 0):
        x = torch.randn(n, 3, *SIZE)
        if n:
            torch._dynamo.mark_dynamic(x, 0)
        assert check(net, x, compiled, weights=False) == []


@pytest.mark.sweep
def test_sizes_that_vary_are_left() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU()).requires_grad_(False)
    compiled = compile_fused(net, dynamic=True)
    for size in (SIZE, (8, 9)):
        x = torch.randn(2, 3, *size)
        assert check(net, x, compiled, weights=False) == [[True, False, False]]


def test_a_penalty_on_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is differentiated again, the convolution is: the product is Inductor's alone."""
    torch.manual_seed(0)
    made: list[int] = []
    stock = few_channels._of_image
    spy = lambda graph, node: made.append(1) or stock(graph, node)  # noqa: E731
    monkeypatch.setattr(few_channels, "_of_image", spy)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()).double()

    def penalty(score: Any, net: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(score(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), [x, *net.parameters()]))

    x = torch.randn(2, 1, 6, 7, dtype=torch.float64)
    want = penalty(net, net, x)
    single = deepcopy(net).float()
    found = penalty(compile_fused(single), single, x.float())
    for ours, right in zip(found, want, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-4)
    assert made


def test_a_fault_costs_no_more_than_time(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.forget()

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(few_channels, "_of_image", fail)
    net = nn.Conv2d(3, 16, 3, padding=1)
    assert check(net, torch.randn(2, 3, *SIZE), compile_fused(net)) == [[True, True, True]]
    assert {stage for stage, *_ in faults.reported()} == {"gradients of images of few channels"}
    faults.forget()
