"""The tensors of a region lie as Inductor lays out what stands beside it: nothing is copied that
stock Inductor does not copy as well, and numbers are right.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import ir
from torch.nn import functional as F
from tracing import trace

from normpass.backend.inductor import inductor_call
from normpass.backend.inductor.images import images as image_nodes
from normpass.backend.run import layouts
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SIZE = 12


class Residual(nn.Module):
    """As in a ResNet: n c h w -> n d h/s w/s"""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride) if stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(Residual(8, 8), Residual(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class ConvNeXt(nn.Module):
    """A stem and blocks of depthwise convolution, LayerNorm over channels and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.deep = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm, wide, narrow in zip(
            self.deep, self.norms, self.wide, self.narrow, strict=True
        ):
            y = norm(conv(x).permute(0, 2, 3, 1))
            x = x + narrow(F.gelu(wide(y))).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class ViT(nn.Module):
    """Patches by a convolution, whose transposed result is the first residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for norm, linear in zip(self.norms, self.layers, strict=True):
            x = x + linear(norm(x))
        return self.head(x.mean(1))


class VGG(nn.Module):
    """An image that nothing but a matrix product reads, as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * (SIZE // 2) ** 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


class UNet(nn.Module):
    """Down and up again with a concatenation, GroupNorm and SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(4, 16)
        self.norm3 = nn.GroupNorm(4, 24)
        self.down = nn.Conv2d(8, 16, 3, 2, 1)
        self.up = nn.Conv2d(16, 16, 3, padding=1)
        self.leave = nn.Conv2d(24, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.enter(x)))
        y = F.silu(self.norm2(self.down(x)))
        y = self.up(F.interpolate(y, scale_factor=2))
        return self.leave(F.silu(self.norm3(torch.cat([x, y], 1))))


class Speech(nn.Module):
    """One-dimensional: Conv1d, GroupNorm, InstanceNorm and SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(1, 8, 5, 2, 2), nn.GroupNorm(2, 8), nn.SiLU()),
            *(nn.Conv1d(8, 16, 5, 2, 2), nn.InstanceNorm1d(16, affine=True), nn.SiLU()),
            nn.Conv1d(16, 5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "convnext": ConvNeXt,
    "vit": ViT,
    "vgg": VGG,
    "unet": UNet,
    "speech": Speech,
}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is copied for the sake of its layout: by Inductor's code, and before our kernels."""
    seen: list[str] = []

    def counted(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def counting(*args: Any) -> Any:
            result = original(*args)
            if kind == "inductor" or result is not args[0]:
                seen.append(kind)
            return result

        monkeypatch.setattr(owner, name, counting)

    counted(ir.ExternKernel, "copy_input", "inductor")
    counted(layouts, "_relaid_out", "region")
    return seen


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The text of each region as it was weighed, and as it was lowered."""
    seen: list[tuple[str, str]] = []
    original = inductor_call.settled

    def telling(text: str, *args: Any) -> tuple[str, list[Any]]:
        result = original(text, *args)
        seen.append((text, result[0]))
        return result

    monkeypatch.setattr(inductor_call, "settled", telling)
    return seen


def gradients(function: Any, net: nn.Module, x: Tensor) -> list[Tensor]:
    y = function(x)
    return [y, *torch.autograd.grad(y, list(net.parameters()), (3 * y).sin())]


def images(net: str, batch: int, memory_format: torch.memory_format, dynamic: bool) -> Tensor:
    """dynamic: of any batch. (Any height and width are too much for stock Inductor's ConvNeXt.)"""
    if net == "speech":
        x = torch.randn(batch, 1, 64, dtype=torch.float64)
    else:
        x = torch.randn(batch, 3, SIZE, SIZE, dtype=torch.float64)
        x = x.to(memory_format=memory_format)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return x


def compiled(net: nn.Module, backend: str) -> Any:
    options: dict[str, Any] = {"fx_graph_cache": False}
    if backend == "normpass":
        options = {"inductor": options, "least_bytes": 0}
    return torch.compile(net, backend=backend, options=options)


# What takes long and goes the way of another is for the sweep: any batch but ResNet's, the second
# layout of most, the one convolution of ViT, ConvNeXt and the U-Net, whose parts others have.
DAILY = {
    ("resnet", torch.contiguous_format, False),
    ("resnet", torch.channels_last, True),
    ("vgg", torch.channels_last, False),
    ("speech", torch.contiguous_format, False),
}
CASES = [
    pytest.param(
        name,
        memory_format,
        dynamic,
        marks=[pytest.mark.sweep] * ((name, memory_format, dynamic) not in DAILY),
        id=f"{name}-{str(memory_format).partition('.')[2]}{'-any batch' if dynamic else ''}",
    )
    for name in NETS
    for memory_format in (torch.contiguous_format, torch.channels_last)
    for dynamic in (False, True)
    if name != "speech" or memory_format is torch.contiguous_format  # there is no other for it
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "memory_format", "dynamic"), CASES)
def test_nothing_more_is_copied_than_by_inductor(
    name: str,
    memory_format: torch.memory_format,
    dynamic: bool,
    copied: list[str],
    told: list[tuple[str, str]],
) -> None:
    net = NETS[name]().double().to(memory_format=memory_format)
    x = images(name, 2, memory_format, dynamic)
    right = gradients(net, net, x)
    gradients(compiled(net, "inductor"), net, x)
    stock = len(copied)
    copied.clear()
    torch._dynamo.reset()
    counters.clear()
    function = compiled(net, "normpass")
    for found, want in zip(gradients(function, net, x), right, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-11)
    assert "region" not in copied
    assert len(copied) <= stock
    fused = [what for what in counters["normpass"] if what.startswith("fused")]
    assert fused
    assert len(told) >= len(fused)
    if dynamic:
        x = images(name, 3, memory_format, dynamic)
        for found, want in zip(gradients(function, net, x), gradients(net, net, x), strict=True):
            torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-11)
        assert "region" not in copied
    else:  # what was weighed is what runs
        assert [weighed for weighed, _ in told] == [lowered for _, lowered in told]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["convnext", "vit"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_what_a_matrix_product_reads_is_contiguous(
    name: str, memory_format: torch.memory_format, told: list[tuple[str, str]]
) -> None:
    """A ConvNeXt's n h w c are no images, though they are behind convolutions and before them; what
    a ViT adds up lies as most of it does, not as its first addend.
    """
    net = NETS[name]().double().to(memory_format=memory_format)
    gradients(compiled(net, "normpass"), net, images(name, 2, memory_format, False))
    forward = [region for _, text in told if not (region := parse(text)).name.endswith("backward")]
    assert forward
    for region in forward:
        assert all(output.buffer.strides is None for output in region.outputs)


def test_what_the_caller_gets_lies_as_in_eager_mode() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.mT + y
        return z, F.layer_norm(z, (8,))

    x, y = torch.randn(4, 8, 6), torch.randn(4, 6, 8)
    found = torch.compile(f, backend="normpass", options={"least_bytes": 0})(x, y)
    for ours, right in zip(found, f(x, y), strict=True):
        torch.testing.assert_close(ours, right)
        assert ours.stride() == right.stride()


def test_weights_of_convolutions_are_not_saved_twice() -> None:
    """What a forward puts together for oneDNN, the backward can put together again."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)),
    )
    y = compiled(net, "normpass")(torch.randn(4, 3, 12, 12))
    saved = {tuple(t.shape): t for t in saved_tensors(y)}
    for convolution in (net[0], net[3], net[6]):
        weight = convolution.weight
        assert saved[tuple(weight.shape)].data_ptr() == weight.data_ptr()


def saved_tensors(y: Tensor) -> list[Tensor]:
    """What the compiled function that made a tensor has saved."""
    node: Any = y.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    return list(node.saved_tensors)


# --- what is an image ---------------------------------------------------------------------------


def test_images_end_at_permutations() -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        y = F.conv2d(x, weight).relu().permute(0, 2, 3, 1)
        return F.conv2d((y - y.mean(-1, keepdim=True)).exp().permute(0, 3, 1, 2).sin(), weight)

    graph = trace(f, torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)).graph
    found = {node.target for node in image_nodes(graph) if node.op == "call_function"}
    aten = torch.ops.aten
    assert {aten.convolution.default, aten.relu.default, aten.sin.default} <= found
    assert not found & {aten.mean.dim, aten.sub.Tensor, aten.exp.default}
