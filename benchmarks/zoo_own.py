"""Models written out in plain torch: what people train, at sizes that two cores can do.

Norms stand as users write them: modules, functions, and by hand. Losses are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normpass.benchmarks.models import Block, ResidualBlock, RMSNorm
from normpass.benchmarks.zoo import BOTH, Made, Model

CLASSES = 100


def classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of n k logits; labels: n."""
    return F.cross_entropy(model(images).float(), labels)


def predict_words(model: nn.Module, words: Tensor) -> Tensor:
    """Cross entropy of each word given those before it; words: n t -> logits: n t v."""
    logits = model(words)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def regress(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Mean square error to a fixed target."""
    return F.mse_loss(model(x).float(), target.float())


# --- convolutions -------------------------------------------------------------------------------


class BasicBlock(ResidualBlock):
    """As in ResNet-18, with a norm where the input is projected too: n c h w -> n k h/s w/s."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__(channels, out, stride)
        if isinstance(self.short, nn.Conv2d):
            self.short = nn.Sequential(self.short, nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """ResNet-18 without its last stage: n 3 h w -> n 100."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = (channels, 2 * channels, 4 * channels)
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks, before = [], channels
        for width in widths:
            blocks += [BasicBlock(before, width, 1 if width == channels else 2)]
            blocks += [BasicBlock(width, width, 1)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """n 3 h w -> n 100"""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of n c h w, as ConvNeXt's downsampling layers have it."""

    def forward(self, x: Tensor) -> Tensor:
        """n c h w -> n c h w"""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then norm and MLP with the channels last: n c h w -> n c h w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        # The paper starts from 1e-6, from where nothing of a block is seen in one step.
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """n c h w -> n c h w"""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.mlp(y)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Four stages of ConvNeXt blocks: n 3 h w -> n 100."""

    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
        for stage, depth in enumerate(depths):
            if stage:
                layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2)]
                width *= 2
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """n 3 h w -> n 100"""
        return self.head(self.norm(self.layers(images).mean((2, 3))))


def pictures(batch: int, height: int, width: int) -> dict[str, Tensor]:
    """images: n 3 h w, labels: n"""
    images = torch.randn(batch, 3, height, width)
    return {"images": images, "labels": torch.randint(CLASSES, (batch,))}


def resnet(batch: int, pixels: int, channels: int) -> Made:
    """On square images."""
    return Made(ResNet(channels), pictures(batch, pixels, pixels))


def convnext(batch: int, pixels: int, width: int, depths: tuple[int, ...]) -> Made:
    """On square images."""
    return Made(ConvNeXt(width, depths), pictures(batch, pixels, pixels))


def waves(batch: int, samples: int, channels: int) -> Made:
    """Convolutions over sound with group and instance norm: n 1 t -> n 100."""
    layers: list[nn.Module] = [nn.Conv1d(1, channels, 16, 4, padding=6)]
    for _ in range(2):
        layers += [nn.GroupNorm(8, channels), nn.SiLU()]
        layers += [nn.Conv1d(channels, channels, 5, padding=2)]
        layers += [nn.InstanceNorm1d(channels, affine=True), nn.SiLU()]
        layers += [nn.Conv1d(channels, channels, 8, 4, padding=2)]
    layers += [nn.GroupNorm(8, channels), nn.SiLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    module = nn.Sequential(*layers, nn.Linear(channels, CLASSES))
    labels = torch.randint(CLASSES, (batch,))
    return Made(module, {"images": torch.randn(batch, 1, samples), "labels": labels})


# --- rows and tokens ----------------------------------------------------------------------------


def mlp(rows: int, width: int, depth: int) -> Made:
    """Linear, norm, GELU: where the norms are most of the work. x: n d -> n d"""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    inputs = {"x": torch.randn(rows, width), "target": torch.randn(rows, width)}
    return Made(nn.Sequential(*layers), inputs)


class ViT(nn.Module):
    """Patches of 8x8 pixels, pre-norm blocks, the mean of all tokens: n 3 h w -> n 100."""

    def __init__(self, tokens: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, 8)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        heads = max(1, width // 64)
        blocks = (Block(width, heads, causal=False, norm=nn.LayerNorm) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """n 3 h w -> n 100"""
        x = self.embed(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


def vit(batch: int, height: int, width: int, channels: int, depth: int) -> Made:
    """On images of height x width pixels."""
    tokens = height // 8 * (width // 8)
    return Made(ViT(tokens, channels, depth), pictures(batch, height, width))


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of n h t d, the halves of d as real and imaginary part."""
    t, half = x.shape[-2], x.shape[-1] // 2
    speed = 10000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LlamaBlock(nn.Module):
    """RMSNorm by hand, rotary attention, SwiGLU: n t d -> n t d."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = RMSNorm(width)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """n t d -> n t d"""
        n, t, d = x.shape
        split = self.qkv(self.attention_norm(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GPTBlock(nn.Module):
    """Layer norms, causal attention with its softmax by hand, GELU: n t d -> n t d."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def attention(self, x: Tensor) -> Tensor:
        """n t d -> n t d"""
        n, t, d = x.shape
        split = self.qkv(x).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        place = torch.arange(t, device=x.device)
        seen = torch.le(place[None, :], place[:, None])
        scores = scores.masked_fill(~seen, torch.finfo(x.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, d))

    def forward(self, x: Tensor) -> Tensor:
        """n t d -> n t d"""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Words in, logits of the next word out: n t -> n t v."""

    def __init__(self, vocabulary: int, blocks: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        width = next(norm.parameters()).numel()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """n t -> n t v"""
        return self.head(self.norm(self.blocks(self.embed(words))))


def llama(batch: int, tokens: int, vocabulary: int, width: int, depth: int) -> Made:
    """Heads are of 64 channels."""
    blocks: list[nn.Module] = [LlamaBlock(width, width // 64) for _ in range(depth)]
    words = torch.randint(vocabulary, (batch, tokens))
    return Made(Decoder(vocabulary, blocks, RMSNorm(width)), {"words": words})


def gpt(batch: int, tokens: int, vocabulary: int, width: int, depth: int) -> Made:
    """Heads are of 64 channels."""
    blocks: list[nn.Module] = [GPTBlock(width, width // 64) for _ in range(depth)]
    words = torch.randint(vocabulary, (batch, tokens))
    return Made(Decoder(vocabulary, blocks, nn.LayerNorm(width)), {"words": words})


TEXT = {"batch": 4, "tokens": 512, "vocabulary": 32000, "width": 256, "depth": 3}
TINY_TEXT = {"batch": 2, "tokens": 16, "vocabulary": 50, "width": 64, "depth": 1}
MODELS = (
    Model(
        "resnet",
        resnet,
        classify,
        {"batch": 16, "pixels": 128, "channels": 64},
        {"batch": 2, "pixels": 32, "channels": 8},
        formats=BOTH,
    ),
    Model(
        "convnext",
        convnext,
        classify,
        {"batch": 8, "pixels": 128, "width": 64, "depths": (2, 2, 4, 2)},
        {"batch": 2, "pixels": 64, "width": 8, "depths": (1, 1, 1, 1)},
        formats=BOTH,
    ),
    Model(
        "mlp",
        mlp,
        regress,
        {"rows": 32768, "width": 64, "depth": 6},
        {"rows": 32, "width": 8, "depth": 2},
    ),
    Model(
        "vit",
        vit,
        classify,
        {"batch": 4, "height": 256, "width": 128, "channels": 384, "depth": 3},
        {"batch": 2, "height": 32, "width": 16, "channels": 32, "depth": 1},
    ),
    Model("llama", llama, predict_words, TEXT, TINY_TEXT),
    Model("gpt", gpt, predict_words, TEXT, TINY_TEXT),
    Model(
        "waves",
        waves,
        classify,
        {"batch": 8, "samples": 16000, "channels": 64},
        {"batch": 2, "samples": 320, "channels": 16},
    ),
)
