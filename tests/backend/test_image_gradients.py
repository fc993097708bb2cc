"""The gradients of convolutions, max pooling and upsampling get their tensors as they read them,
and are right.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled import compile_fused
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from tracing import trace

from normpass.backend.inductor import image_gradients
from normpass.backend.inductor.image_gradients import CONVOLUTION, IMAGES, LAST, POOLING, UPSAMPLING
from normpass.benchmarks.measure import peak_bytes
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FORMATS = {"contiguous": False, "channels_last": True}


def plain(dims: int = 2) -> nn.Module:
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
    return nn.Sequential(conv(3, 8, 3, padding=1), norm(8), nn.SiLU(), conv(8, 8, 3), norm(8))


def depthwise() -> nn.Module:
    """As in a MobileNet: weights of one input channel, and of one pixel. (Smooth functions
    everywhere: rounding may move a number across a kink, in stock too.)
    """
    return nn.Sequential(
        *(
            nn.Conv2d(3, 8, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.ZeroPad2d((0, 1, 0, 1)),
        ),
        *(nn.Conv2d(8, 8, 3, 2, groups=8, bias=False), nn.BatchNorm2d(8), nn.SiLU()),
        *(nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)),
    )


def pooled(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.MaxPool2d(**{"kernel_size": 3, "stride": 2, "padding": 1, **options}),
        nn.BatchNorm2d(8),
    )


def transposed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2, 2))


def upsampled(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Upsample(**{"scale_factor": 2, "mode": "bilinear", **options}),
        nn.Conv2d(8, 16, 3),
        nn.Upsample(**{"scale_factor": (1.5, 3), "mode": "bilinear", **options}),
        nn.BatchNorm2d(16),
    )


MODELS = {
    "plain": plain,
    "3d": lambda: plain(3),
    "depthwise": depthwise,
    "pooled": pooled,
    "a dilated window": lambda: pooled(dilation=2),
    "a large window": lambda: pooled(kernel_size=7, padding=3),
    "ceil mode": lambda: pooled(ceil_mode=True),
    "transposed": transposed,
    "upsampled": upsampled,
    "aligned corners": lambda: upsampled(align_corners=True),
    "made smaller": lambda: upsampled(scale_factor=None, size=(5, 4)),
}


def image(name: str, dtype: torch.dtype, channels_last: bool, n: int = 4) -> Tensor:
    x = torch.randn(n, 3, *([9] * (3 if name == "3d" else 2)), dtype=dtype)
    return x.contiguous(memory_format=LAST[x.ndim]) if channels_last else x


def model(name: str, dtype: torch.dtype, channels_last: bool) -> nn.Module:
    net = MODELS[name]().to(dtype)
    if channels_last:
        net = net.to(memory_format=LAST[5 if name == "3d" else 4])
    return net


class Calls(TorchDispatchMode):
    """The gradients that a backward calls, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in IMAGES:
            self.found.append((op, args))
        return op(*args, **(kwargs or {}))


def gradients(net: Any, parameters: list[Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(net(x), [x, *parameters], g))


def observed(
    net: Any, parameters: list[Tensor], x: Tensor, g: Tensor
) -> list[tuple[Any, tuple[Any, ...]]]:
    """What the backward calls: without the forward, since nothing is compiled under a mode."""
    y = net(x.detach().requires_grad_())
    with Calls() as calls:
        torch.autograd.grad(y, parameters, g)
    return calls.found


# Half precision where no rounding decides which pixel of a window is the largest.
CASES = [
    *((name, False, torch.float32) for name in MODELS),
    *((name, True, torch.float32) for name in ("plain", "pooled", "upsampled")),
    *((name, False, torch.bfloat16) for name in ("plain", "depthwise", "upsampled")),
]


def is_daily(k: int, dynamic: bool, layout: str) -> bool:
    """Whether the k-th case is tested in a layout every day: the other takes as long, and goes the
    same way.
    """
    return layout == ("contiguous" if dynamic or k % 2 else "channels_last")


IN_EACH_LAYOUT = [
    pytest.param(*case, layout, marks=[pytest.mark.sweep] * (not is_daily(k, case[1], layout)))
    for k, case in enumerate(CASES)
    for layout in FORMATS
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("name", "dynamic", "dtype", "layout"), IN_EACH_LAYOUT)
def test_each_reads_its_tensors_as_they_lie(
    name: str, dynamic: bool, dtype: torch.dtype, layout: str
) -> None:
    torch.manual_seed(0)
    net = model(name, dtype, FORMATS[layout])
    exact = deepcopy(net).to(torch.float64)
    compiled = compile_fused(net, dynamic=dynamic)
    for n in (4, 5) if dynamic else (4,):
        x = image(name, dtype, FORMATS[layout], n)
        g = torch.randn_like(net(x))
        found = gradients(compiled, list(net.parameters()), x, g)
        want = gradients(exact, list(exact.parameters()), x.double(), g.double())
        eager = gradients(net, list(net.parameters()), x, g)
        for ours, stock, right in zip(found, eager, want, strict=True):
            share = 2e-2 if dtype is torch.bfloat16 else 1e-5
            allowed = 4 * (stock.double() - right).abs().max() + share * right.abs().max()
            torch.testing.assert_close(ours.double(), right, rtol=0, atol=float(allowed))
        calls = observed(compiled, list(net.parameters()), x, g)
        others = {op for op, names in OTHERS.items() if name in names}
        assert {op for op, _ in calls} == {CONVOLUTION} | others
        for op, args in calls:
            assert_as_read(op, args)


OTHERS = {
    POOLING: ("pooled", "a dilated window", "a large window", "ceil mode"),
    UPSAMPLING: ("upsampled", "aligned corners", "made smaller"),
}


def assert_as_read(op: Any, args: tuple[Any, ...]) -> None:
    """That ATen need not copy: all lies as what it asks for its format does."""
    telling = [args[k] for k in image_gradients.TELLING[op]]
    last = LAST[args[0].ndim]
    if op is UPSAMPLING or any(suggest_memory_format(x) is last for x in telling):
        for k in IMAGES[op]:
            assert args[k].is_contiguous(memory_format=last), (op, k, args[k].stride())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", FORMATS)
def test_depthwise_weights_gradients_are_not_held_in_blocks(layout: str) -> None:
    """Of 7 x 7 pixels, where oneDNN has 256 numbers for each one where channels lie together."""
    torch.manual_seed(0)
    size, c = (2, 64, 6, 6), 64
    net = nn.Sequential(nn.Conv2d(c, c, 7, padding=3, groups=c), nn.BatchNorm2d(c), nn.SiLU())
    net = net.to(torch.bfloat16)
    x, g = torch.randn(size, dtype=torch.bfloat16), torch.randn(size, dtype=torch.bfloat16)
    if FORMATS[layout]:
        x, net = x.contiguous(memory_format=LAST[4]), net.to(memory_format=LAST[4])
    exact, parameters = deepcopy(net).double(), list(net.parameters())
    want = gradients(exact, list(exact.parameters()), x.double(), g.double())
    compiled = compile_fused(net)
    eager, found = (gradients(call, parameters, x, g) for call in (net, compiled))
    for ours, stock, right in zip(found, eager, want, strict=True):
        allowed = 4 * (stock.double() - right).abs().max() + 2e-2 * right.abs().max()
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=float(allowed))
    weight = parameters[0]
    blocks = image_gradients.BLOCK * weight.numel() * 4
    assert peak_bytes(lambda: gradients(compiled, parameters, x, g), "cpu") < blocks / 4


# Channels of the image, of the result, pixels of a weight along a side and of an image.
IN_BLOCKS = {
    "7 x 7": ((64, 64, 7, 6), {}, True),
    "several results of a channel": ((64, 128, 7, 6), {"groups": 64}, True),
    "a kernel of its own": ((64, 64, 3, 6), {}, False),
    "a large image": ((64, 64, 7, 64), {}, False),
    "float32": ((64, 64, 7, 6), {"dtype": torch.float32}, False),
    "one channel": ((1, 64, 7, 6), {}, False),
    "transposed": ((64, 64, 7, 6), {"transposed": True}, False),
    "not asked for": ((64, 64, 7, 6), {"mask": (True, False, False)}, False),
}


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_which_weights_gradients_would_be_held_in_blocks(name: str) -> None:
    (c, k, side, size), how, expected = IN_BLOCKS[name]
    dtype, mask = how.get("dtype", torch.bfloat16), how.get("mask", (True, True, False))
    transposed, groups = how.get("transposed", False), how.get("groups", c)
    x, g = (
        torch.randn(2, n, size, size, dtype=dtype).contiguous(memory_format=LAST[4]) for n in (c, k)
    )
    pad, one = [side // 2] * 2, [1, 1]

    def gradient(g: Tensor, x: Tensor, weight: Tensor) -> Any:
        rest = (None, one, pad, one, transposed, [0, 0], groups, mask)
        return CONVOLUTION(g, x, weight, *rest)[0 if mask[0] else 1]

    traced = trace(gradient, g, x, torch.randn(k, c // groups, side, side, dtype=dtype))
    image_gradients.mark(traced.graph)
    (node,) = traced.graph.find_nodes(op="call_function", target=CONVOLUTION)
    assert image_gradients._is_held_in_blocks(node) is expected
    if expected:
        assert not node.meta[image_gradients.MARK]


def test_what_was_pooled_is_not_saved() -> None:
    """Its shape is all that the gradient reads."""
    net = nn.Sequential(nn.BatchNorm2d(8), nn.Tanh(), nn.MaxPool2d(2), nn.BatchNorm2d(8))
    x = torch.randn(4, 8, 32, 32, requires_grad=True)
    compiled = compile_fused(net)
    compiled(x)
    y = compiled(x)
    node = y.grad_fn
    while node is not None and not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    saved = [(t.numel(), t.dtype) for t in node.saved_tensors]
    # The norm's input alone: tanh is computed again.
    assert sum(n == x.numel() and t is x.dtype for n, t in saved) == 1


def enlarge(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def test_some_of_the_channels_of_a_gradient() -> None:
    """Each of several images that are enlarged and put together, as in a SegFormer's head."""
    torch.manual_seed(0)
    images = [torch.randn(2, 9, n, n, requires_grad=True) for n in (3, 6)]
    head = nn.Sequential(nn.Conv2d(18, 8, 1), nn.BatchNorm2d(8))

    def merge(x: Tensor, y: Tensor) -> Tensor:
        return head(
            torch.cat([F.interpolate(x, (6, 6), mode="bilinear"), enlarge(y)[:, :, :6, :6]], 1)
        )

    compiled = compile_fused(merge)
    y = merge(*images)
    g = torch.randn_like(y)
    want = torch.autograd.grad(y, images, g)
    found = torch.autograd.grad(compiled(*images), images, g)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    y = compiled(*images)
    with Calls() as calls:
        torch.autograd.grad(y, images, g)
    for op, args in calls.found:
        assert_as_read(op, args)
    assert sum(op is UPSAMPLING for op, _ in calls.found) == 2


UPSAMPLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "few channels": lambda x: enlarge(x[:, :3]),
    "no images": lambda x: enlarge(x[:0]),
    "a transform inside": lambda x: torch.func.grad(lambda y: enlarge(y).square().sum())(x),
    "a transform of images": lambda x: torch.func.vmap(enlarge)(x[None])[0],
    "autocast": lambda x: _autocast(lambda: enlarge(x)),
    "twice": lambda x: enlarge(enlarge(x) * x.mean()),
}


def _autocast(call: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", UPSAMPLINGS)
def test_upsampling(name: str) -> None:
    torch.manual_seed(0)
    upsample = UPSAMPLINGS[name]
    x = torch.randn(2, 9, 6, 5, requires_grad=True)
    compiled = torch.compile(upsample, backend="normpass", fullgraph=True)
    y = upsample(x)
    torch.testing.assert_close(compiled(x), y)
    torch.testing.assert_close(compiled(x.detach()), y.detach())
    g = torch.randn_like(y)
    (found,) = torch.autograd.grad(compiled(x), x, g)
    (want,) = torch.autograd.grad(upsample(x), x, g)
    torch.testing.assert_close(found, want)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), y.detach())


@pytest.mark.parametrize(
    ("channels", "size", "is_whole"), [(9, (12, 9), True), (3, (12, 9), False), (9, (3, 2), True)]
)
def test_upsampling_without_gradients(channels: int, size: tuple[int, int], is_whole: bool) -> None:
    """ATen's, of an image whose channels lie together unless it is made smaller."""

    def resize(x: Tensor) -> Tensor:
        return F.interpolate(x.sin(), size, mode="bilinear").sin()

    torch.manual_seed(0)
    x = torch.randn(2, channels, 6, 5)
    compiled = torch.compile(resize, backend="normpass", fullgraph=True)
    with torch.no_grad():
        found, (code, *_) = run_and_get_code(compiled, x)
    torch.testing.assert_close(found, resize(x))
    assert found.stride() == resize(x).stride()
    h, w = size
    as_read = (channels * h * w, 1, channels * w, channels) if h > 6 else found.stride()
    called = re.search(r"(buf\d+) = torch.ops.aten.upsample_bilinear2d.default\(", code)
    assert bool(called) is is_whole
    if called:
        lies = rf"assert_\w+\(\w+, \(2, {channels}, {h}, {w}\), (\(.*?\))"
        assert tuple(map(int, re.search(lies, code)[1].strip("()").split(", "))) == as_read


def test_tensors_of_other_classes_are_upsampled_as_ever() -> None:
    parts = [torch.randn(2, 9, 6, 5) for _ in range(2)]
    x = TwoTensor(*parts).requires_grad_()
    compiled = torch.compile(enlarge, backend="normpass", fullgraph=True)
    compiled(x).sum().backward()
    want = enlarge(parts[0].requires_grad_())
    want.sum().backward()
    torch.testing.assert_close(x.grad.a, parts[0].grad)


@pytest.mark.sweep
def test_a_fault_costs_copies_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults.forget()
    net, x = pooled(), torch.randn(2, 3, 11, 9)

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(image_gradients, "_lies_channels_last", fail)
    g = torch.randn_like(net(x))
    found = gradients(compile_fused(net), list(net.parameters()), x, g)
    for ours, eager in zip(found, gradients(net, list(net.parameters()), x, g), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    (fault,) = faults.reported()
    assert fault[0] == "the gradients of images"
    faults.forget()


@pytest.mark.sweep
def test_graphs_of_others_are_compiled_as_ever() -> None:
    """After ours were, in the same process: what marks a gradient is not there."""
    image_gradients.install()
    net, x = nn.Sequential(pooled(), upsampled()[2]), torch.randn(3, 3, 13, 9)
    g = torch.randn_like(net(x))
    stock = torch.compile(net, backend="inductor", fullgraph=True)
    found = gradients(stock, list(net.parameters()), x, g)
    for ours, eager in zip(found, gradients(net, list(net.parameters()), x, g), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    calls = observed(stock, list(net.parameters()), x, g)
    assert {op for op, _ in calls} == {CONVOLUTION}


def test_a_copy_in_channels_last_is_another_tensor() -> None:
    """Copies of what convolutions write are taken out only where nobody else has what is copied."""
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(8, 8, 3)
    x = torch.randn(2, 8, 8, 8)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = convolution(x)
        return y, y.contiguous(memory_format=torch.channels_last)

    for y, copy in (both(x), torch.compile(both, backend="normpass")(x)):
        y.detach().zero_()
        assert copy.detach().abs().sum() > 0
