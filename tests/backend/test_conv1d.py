"""Convolutions over one dimension are such of images of one row where that is faster: right, and
nothing is copied between them and norms.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from compiled import compile_fused
from oracles import assert_no_less_accurate
from torch import nn
from torch._inductor import ir
from torch.utils._python_dispatch import TorchDispatchMode
from tracing import trace_gradients

from normpass.backend.inductor import conv1d
from normpass.backend.run import layouts
from normpass.passes import faults

if TYPE_CHECKING:
    from torch import Tensor

CHANNELS, LENGTH = 16, 60
MM = torch.ops.aten.mm.default


def around(convolution: nn.Module) -> nn.Module:
    """A convolution between norms of all kinds; its own channels are 16 and 16."""
    return nn.Sequential(
        *(nn.Conv1d(CHANNELS, CHANNELS, 3), nn.GroupNorm(4, CHANNELS), nn.SiLU()),
        *(convolution, nn.InstanceNorm1d(CHANNELS, affine=True), nn.SiLU()),
        *(nn.Conv1d(CHANNELS, CHANNELS, 4, 2, bias=False), nn.BatchNorm1d(CHANNELS), nn.SiLU()),
        nn.Conv1d(CHANNELS, CHANNELS, 1),
    )


def convolution(**options: Any) -> nn.Module:
    return nn.Conv1d(CHANNELS, CHANNELS, **{"kernel_size": 5, "padding": 2, **options})


CONVOLUTIONS = {
    "plain": lambda: convolution(),
    "strided": lambda: convolution(kernel_size=8, stride=4),
    "dilated": lambda: convolution(dilation=3),
    "circular": lambda: convolution(padding_mode="circular"),
    "groups": lambda: convolution(groups=2),
    "depthwise": lambda: convolution(groups=CHANNELS),
    "transposed": lambda: nn.ConvTranspose1d(CHANNELS, CHANNELS, 4, 2, 1, output_padding=1),
    "transposed groups": lambda: nn.ConvTranspose1d(CHANNELS, CHANNELS, 3, groups=2),
}
# Those that differ most are compiled; with `make sweep`, all.
DAILY = ("plain", "transposed")
CASES = [
    *(
        pytest.param(name, torch.float32, False, marks=() if name in DAILY else pytest.mark.sweep)
        for name in CONVOLUTIONS
    ),
    ("strided", torch.float32, True),
    ("plain", torch.bfloat16, False),
    ("plain", torch.float64, False),
]


class Calls(TorchDispatchMode):
    """How many dimensions the images have that a backward convolves, with their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is conv1d.BACKWARD:
            last = torch.channels_last
            lie = all(x.ndim == 4 and x.is_contiguous(memory_format=last) for x in args[:2])
            self.found.append((args[1].ndim, lie))
        return op(*args, **(kwargs or {}))


def gradients(net: Any, parameters: list[Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = net(x)
    return [y, *torch.autograd.grad(y, [x, *parameters], g)]


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done where it is faster, is right on every processor."""
    monkeypatch.setattr(conv1d, "_has_kernels", lambda: True)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is copied for the sake of its layout."""
    seen: list[int] = []
    of_inductors, of_ours = ir.ExternKernel.copy_input, layouts._relaid_out

    def copy_input(x: Any) -> Any:
        size = x.get_numel()
        if isinstance(size, int | sympy.Integer):
            seen.append(int(size))
        return of_inductors(x)

    def relaid_out(tensor: Tensor, *want: Any) -> Tensor:
        result = of_ours(tensor, *want)
        if result is not tensor:
            seen.append(tensor.numel())
        return result

    monkeypatch.setattr(ir.ExternKernel, "copy_input", copy_input)
    monkeypatch.setattr(layouts, "_relaid_out", relaid_out)
    return seen


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "dtype", "dynamic"), CASES)
def test_right_and_nothing_is_copied(
    name: str, dtype: torch.dtype, dynamic: bool, copied: list[int]
) -> None:
    torch.manual_seed(0)
    net = around(CONVOLUTIONS[name]()).to(dtype)
    exact = deepcopy(net).double()
    compiled = compile_fused(net, dynamic=dynamic)
    parameters = list(net.parameters())
    for n in (6, 7) if dynamic else (6,):
        x = torch.randn(n, CHANNELS, LENGTH, dtype=dtype)
        g = torch.randn_like(net(x))
        found = gradients(compiled, parameters, x, g)
        want = gradients(exact, list(exact.parameters()), x.double(), g.double())
        eager = gradients(net, parameters, x, g)
        for ours, stock, right in zip(found, eager, want, strict=True):
            share = 2e-2 if dtype is torch.bfloat16 else 1e-5
            # The bias before an instance norm has no gradient, but for what is rounded.
            size = float(right.detach().abs().max().maximum(g.abs().max()))
            allowed = 4 * float((stock.double() - right).detach().abs().max()) + share * size
            torch.testing.assert_close(ours.double(), right, rtol=0, atol=allowed)
            assert ours.is_contiguous() == stock.is_contiguous()
        y = compiled(x.requires_grad_())
        with Calls() as calls:
            torch.autograd.grad(y, parameters, g)
        assert len(calls.found) == 4
        if dtype is torch.float64:
            assert {dims for dims, _ in calls.found} == {3}
        else:
            assert all(dims == 4 and lie for dims, lie in calls.found), calls.found
    if dtype is not torch.float64 and not dynamic and name != "circular":
        # The caller's x lies as in eager mode, and what it gets: y and the gradients of both.
        of_images = [size for size in copied if size > CHANNELS * CHANNELS * 8]
        assert len(of_images) <= 4


def test_without_such_kernels_all_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv1d, "_has_kernels", lambda: False)
    graph = trace_gradients(convolution(), torch.randn(3, CHANNELS, LENGTH))
    before = str(graph.graph)
    conv1d.as_images(graph.graph)
    assert str(graph.graph) == before


@pytest.mark.parametrize(("capability", "has"), [("AVX512", True), ("AVX2", False)])
def test_which_processors_have_them(
    capability: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert conv1d._has_kernels() is has


def test_a_fault_costs_no_more_than_time(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.forget()
    net, x = around(convolution()), torch.randn(2, CHANNELS, LENGTH)

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(conv1d, "_gains", fail)
    g = torch.randn_like(net(x))
    parameters = list(net.parameters())
    found = gradients(compile_fused(net), parameters, x, g)
    for ours, eager in zip(found, gradients(net, parameters, x, g), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    assert {stage for stage, *_ in faults.reported()} == {"convolutions in one dimension"}
    faults.forget()


def test_without_a_batch() -> None:
    net = nn.Sequential(convolution(), nn.SiLU(), convolution())
    x = torch.randn(CHANNELS, LENGTH, requires_grad=True)
    y = net(x)
    found = compile_fused(net)(x)
    torch.testing.assert_close(found, y)
    ours, eager = (torch.autograd.grad(z, x, torch.ones_like(z))[0] for z in (found, y))
    torch.testing.assert_close(ours, eager)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(0, CHANNELS, LENGTH), (1, CHANNELS, 5), (2, CHANNELS, 1)])
def test_sizes_at_the_edge(shape: tuple[int, ...]) -> None:
    net = nn.Sequential(convolution(), nn.SiLU(), convolution())
    x = torch.randn(shape, requires_grad=True)
    y = net(x)
    found = compile_fused(net)(x)
    torch.testing.assert_close(found, y)
    parameters = [x, *net.parameters()]
    g = torch.randn_like(y)
    eager = torch.autograd.grad(y, parameters, g)
    for ours, right in zip(torch.autograd.grad(found, parameters, g), eager, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)


SOUNDS = {
    "strided": {"kernel_size": 8, "stride": 4, "padding": 2},
    "without padding": {"kernel_size": 10, "stride": 5, "bias": False},
    "of several": {"in_channels": 2, "kernel_size": 3, "padding": 1},
    "of more": {"in_channels": 5, "kernel_size": 3, "padding": 1},
    "dilated": {"kernel_size": 4, "dilation": 2},
    "long windows": {"kernel_size": 80, "padding": 40},
}
OF_WINDOWS = ("strided", "without padding", "of several")


def sound(name: str) -> nn.Conv1d:
    return nn.Conv1d(**{"in_channels": 1, "out_channels": CHANNELS, **SOUNDS[name]})


LAYERS = CONVOLUTIONS | {f"sound, {name}": partial(sound, name) for name in SOUNDS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_graphs(name: str, dtype: torch.dtype) -> None:
    """What each is rewritten to, computed as a graph; which gradients are left."""
    torch.manual_seed(0)
    net = LAYERS[name]().to(dtype)
    x = torch.randn(3, net.in_channels, LENGTH, dtype=dtype)
    g = torch.randn_like(net(x))
    graph = trace_gradients(net, x)
    conv1d.as_images(graph.graph)
    graph.graph.lint()
    graph.recompile()
    with Calls() as calls:
        found = graph(g, x, *net.parameters())
    exact = deepcopy(net).double()
    want = gradients(exact, list(exact.parameters()), x.double(), g.double())
    eager = gradients(net, list(net.parameters()), x, g)
    for ours, stock, right in zip(found, eager, want, strict=True):
        assert_no_less_accurate(ours.detach(), stock.detach(), right.detach(), name)
    # A sound's gradient at itself stays as it was; its weight's and bias' are none of its call's.
    as_images = dtype is not torch.float64 and (name in CONVOLUTIONS or name == "sound, of more")
    assert [dims for dims, _ in calls.found] == [4 if as_images else 3]
    is_product = dtype is not torch.float64 and name in {f"sound, {each}" for each in OF_WINDOWS}
    assert (MM in {node.target for node in graph.graph.nodes}) is is_product


DAILY_SOUNDS = {("strided", False), ("strided", True), ("of several", False)}


def is_daily(name: str, dtype: torch.dtype, of_sound: bool) -> bool:
    return dtype is torch.float32 and (name, of_sound) in DAILY_SOUNDS


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "dtype", "of_sound"),
    [
        pytest.param(*case, marks=[pytest.mark.sweep] * (not is_daily(*case)))
        for case in product(SOUNDS, (torch.float32, torch.bfloat16), (False, True))
    ],
)
def test_sound(name: str, dtype: torch.dtype, of_sound: bool) -> None:
    """Few channels are read: the gradient of the weight is a matrix product, its result's channels
    lie together.
    """
    torch.manual_seed(0)
    first = sound(name)
    net = nn.Sequential(first, nn.GroupNorm(4, CHANNELS), nn.SiLU(), convolution()).to(dtype)
    exact = deepcopy(net).double()
    compiled = compile_fused(net)
    x = torch.randn(3, first.in_channels, 64, dtype=dtype).requires_grad_(of_sound)
    g = torch.randn_like(net(x))

    def results(net: Any, module: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
        y = net(x)
        return [y, *torch.autograd.grad(y, [*module.parameters(), *[x] * of_sound], g)]

    found, eager = results(compiled, net, x, g), results(net, net, x, g)
    wanted = results(exact, exact, x.detach().double().requires_grad_(of_sound), g.double())
    for ours, stock, right in zip(found, eager, wanted, strict=True):
        share = 2e-2 if dtype is torch.bfloat16 else 1e-5
        allowed = 4 * (stock.double() - right).abs().max() + share * right.abs().max()
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=float(allowed.detach()))
    y = compiled(x)
    with Calls() as calls:
        torch.autograd.grad(y, list(net.parameters()), g)
    assert len(calls.found) == (1 if name in OF_WINDOWS and not of_sound else 2)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_sound_through_frozen_parameters(frozen: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, CHANNELS, 8, 4), nn.GroupNorm(4, CHANNELS), convolution())
    getattr(net[0], frozen).requires_grad_(False)
    getattr(net[2], frozen).requires_grad_(False)
    x = torch.randn(3, 1, 64, requires_grad=True)
    trained = [x, *(p for p in net.parameters() if p.requires_grad)]
    y = net(x)
    g = torch.randn_like(y)
    want = torch.autograd.grad(y, trained, g)
    found = torch.autograd.grad(compile_fused(net)(x), trained, g)
    for ours, right in zip(found, want, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
