"""The demo's three small models, one for each of the commonest norms, and their data.

    vit       images -> patches -> pre-norm encoder with nn.LayerNorm -> mean -> 10 classes
    decoder   images -> patches -> causal decoder with a hand-written RMSNorm -> last token
    resnet    images -> convolutions with nn.BatchNorm2d -> mean over pixels -> 10 classes

Images are scikit-learn's handwritten digits, f32[n 1 8 8] scaled to [-1, 1], which come with the
package: nothing is downloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

PATCH = 2
TOKENS = (8 // PATCH) ** 2
CLASSES = 10
TEST_IMAGES = 360


class RMSNorm(nn.Module):
    """RMSNorm as decoder models spell it out: y = cast(x * rsqrt(mean(x^2) + eps)) * weight.

    The statistics are taken in float32 whatever the dtype of x; x: *n d -> y: *n d.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis by its root mean square."""
        wide = x.to(torch.float32)
        mean_square = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype)


class Patches(nn.Module):
    """Cuts images into patches and embeds them: n 1 8 8 -> n 16 d, with learned positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, width))

    def forward(self, images: Tensor) -> Tensor:
        """n 1 8 8 -> n 16 d"""
        pixels = F.pixel_unshuffle(images, PATCH).flatten(2).transpose(1, 2)
        return self.embed(pixels) + self.position


class Attention(nn.Module):
    """Multi-head self-attention, n t d -> n t d."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """n t d -> n t d"""
        n, t, d = x.shape
        split = self.qkv(x).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


class Block(nn.Module):
    """A pre-norm transformer block, n t d -> n t d."""

    def __init__(
        self, width: int, heads: int, causal: bool, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.attention_norm = norm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = norm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """n t d -> n t d"""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The trunk that the ViT and the decoder share: n 1 8 8 -> n 10."""

    def __init__(
        self, norm: Callable[[int], nn.Module], causal: bool, width: int = 192, depth: int = 2
    ) -> None:
        super().__init__()
        self.causal = causal
        self.patches = Patches(width)
        self.layers = nn.ModuleList(Block(width, 4, causal, norm) for _ in range(depth))
        self.norm = norm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """n 1 8 8 -> n 10; a causal model answers from its last token, the other from the mean."""
        x = self.patches(images)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x[:, -1] if self.causal else x.mean(1))


class ResidualBlock(nn.Module):
    """conv-bn-relu-conv-bn, plus the input, relu: n c h w -> n k h/s w/s."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.short = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """n c h w -> n k h/s w/s"""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    """A small residual network with BatchNorm: n 1 8 8 -> n 10."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            ResidualBlock(channels, channels), ResidualBlock(channels, 2 * channels, stride=2)
        )
        self.head = nn.Linear(2 * channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """n 1 8 8 -> n 10"""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Digits(NamedTuple):
    """A fixed split of the digits: images f32[n 1 8 8], labels i64[n]."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: Transformer(nn.LayerNorm, causal=False),
    "decoder": lambda: Transformer(RMSNorm, causal=True),
    "resnet": ResNet,
}
NORM_OF = {
    "vit": "nn.LayerNorm",
    "decoder": "hand-written RMSNorm",
    "resnet": "nn.BatchNorm2d",
}


def build(name: str, device: str = "cpu", seed: int = 0) -> nn.Module:
    """The model of that name with the weights of that seed, the same on every device."""
    torch.manual_seed(seed)
    return MODELS[name]().to(device)


def digits(device: str = "cpu") -> Digits:
    """scikit-learn's 1,797 handwritten digits: 1,437 to train on and 360 to test on.

    Raises:
        RuntimeError: when scikit-learn is not installed; the message says how to install it.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RuntimeError(
            "the demo trains on scikit-learn's digits and scikit-learn is not installed: "
            "pip install 'normpass[demo]'"
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)[order]
    parts = images[:-TEST_IMAGES], labels[:-TEST_IMAGES], images[-TEST_IMAGES:]
    return Digits(*(part.to(device) for part in (*parts, labels[-TEST_IMAGES:])))
