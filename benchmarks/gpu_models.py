"""Models that people train on GPUs, of published sizes, in plain torch: nothing is downloaded.

gpt2      GPT-2 small: layer norms, causal attention; words n t -> logits n t v
vit       ViT-B/16: layer norms, attention over patches; images n 3 h w -> n 1000
resnet    ResNet-50, channels_last: batch norms in bottlenecks; images n 3 h w -> n 1000
unet      a diffusion U-Net, channels_last: group norms with SiLU, attention over the pixels of
          its coarse levels; latents n 4 h w and times n -> noise n 4 h w
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normpass.benchmarks.zoo import Made, Model
from normpass.benchmarks.zoo_own import Decoder, GPTBlock, classify, predict_words

CLASSES = 1000


# --- rows and tokens ----------------------------------------------------------------------------


class FlashBlock(GPTBlock):
    """Its attention by torch's fused operator: n t d -> n t d."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__(width, heads)
        self.causal = causal

    def attention(self, x: Tensor) -> Tensor:
        """n t d -> n t d"""
        n, t, d = x.shape
        split = self.qkv(x).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


class Words(nn.Module):
    """Words with learned positions, before the blocks: n t -> n t d."""

    def __init__(self, vocabulary: int, tokens: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, words: Tensor) -> Tensor:
        """n t -> n t d"""
        return self.words(words) + self.position


def gpt2(batch: int, tokens: int, vocabulary: int, width: int, depth: int) -> Made:
    """Heads are of 64 channels."""
    blocks: list[nn.Module] = [
        FlashBlock(width, max(1, width // 64), causal=True) for _ in range(depth)
    ]
    module = Decoder(vocabulary, blocks, nn.LayerNorm(width))
    module.embed = Words(vocabulary, tokens, width)  # type: ignore[assignment]
    return Made(module, {"words": torch.randint(vocabulary, (batch, tokens))})


class ViT(nn.Module):
    """Square patches, a class token, pre-norm blocks: n 3 h w -> n 1000."""

    def __init__(self, patch: int, patches: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(patches + 1, width))
        heads = max(1, width // 64)
        self.blocks = nn.Sequential(*(FlashBlock(width, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """n 3 h w -> n 1000"""
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def pictures(batch: int, pixels: int) -> dict[str, Tensor]:
    """images: n 3 h w, labels: n"""
    labels = torch.randint(CLASSES, (batch,))
    return {"images": torch.randn(batch, 3, pixels, pixels), "labels": labels}


def vit(batch: int, pixels: int, patch: int, width: int, depth: int) -> Made:
    """On square images."""
    return Made(ViT(patch, (pixels // patch) ** 2, width, depth), pictures(batch, pixels))


# --- images -------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norms, plus the input: n c h w -> n 4k h/s w/s."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.short = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """n c h w -> n 4k h/s w/s"""
        return F.relu(self.body(x) + self.short(x))


class ResNet(nn.Module):
    """Four stages of bottlenecks: n 3 h w -> n 1000."""

    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        channels = width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            for block in range(depth):
                layers.append(Bottleneck(channels, inner, 2 if stage and not block else 1))
                channels = 4 * inner
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """n 3 h w -> n 1000"""
        return self.head(self.layers(images).mean((2, 3)))


def resnet(batch: int, pixels: int, width: int, depths: tuple[int, ...]) -> Made:
    """On square images."""
    return Made(ResNet(width, depths), pictures(batch, pixels))


class TimedBlock(nn.Module):
    """Norm, SiLU, convolution twice, with the time added in between, plus the input:
    n c h w, n d -> n k h w.
    """

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.before = nn.Sequential(
            nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, out))
        self.after = nn.Sequential(
            nn.GroupNorm(32, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.short = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """n c h w, n d -> n k h w"""
        y = self.before(x) + self.time(time)[:, :, None, None]
        return self.after(y) + self.short(x)


class PixelAttention(nn.Module):
    """Attention of every pixel to every other, plus the input: n c h w -> n c h w."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = max(1, channels // 64)
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """n c h w -> n c h w"""
        n, c, h, w = x.shape
        split = self.qkv(self.norm(x)).view(n, 3, self.heads, c // self.heads, h * w)
        q, k, v = split.transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(2, 3).reshape(n, c, h, w))


class Level(nn.Module):
    """A block of one resolution, with attention where that is coarse."""

    def __init__(self, channels: int, out: int, time: int, *, attends: bool) -> None:
        super().__init__()
        self.block = TimedBlock(channels, out, time)
        self.attention = PixelAttention(out) if attends else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """n c h w, n d -> n k h w"""
        return self.attention(self.block(x, time))


class UNet(nn.Module):
    """Down, across and up again, with what each level had on the way down beside what it gets on
    the way up: n 4 h w, n -> n 4 h w.
    """

    def __init__(self, width: int, levels: int, blocks: int) -> None:
        super().__init__()
        time, widths = 4 * width, [width * 2**k for k in range(levels)]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        kept, channels = [width], width
        for k, out in enumerate(widths):
            for _ in range(blocks):
                self.down.append(Level(channels, out, time, attends=k > 0))
                kept.append(channels := out)
            self.shrink.append(nn.Conv2d(out, out, 3, 2, padding=1))
        self.middle = Level(channels, channels, time, attends=True)
        for k, out in reversed([*enumerate(widths)]):
            self.grow.append(nn.Conv2d(channels, out, 3, padding=1))
            channels = out
            for _ in range(blocks):
                self.up.append(Level(channels + kept.pop(), out, time, attends=k > 0))
        self.blocks = blocks
        self.head = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1)
        )

    def forward(self, latents: Tensor, times: Tensor) -> Tensor:
        """n 4 h w, n -> n 4 h w"""
        time = self.time(waves(times, self.width))
        x, kept = self.stem(latents), []
        for k, shrink in enumerate(self.shrink):
            for level in self.down[k * self.blocks : (k + 1) * self.blocks]:
                kept.append(x := level(x, time))
            x = shrink(x)
        x = self.middle(x, time)
        for k, grow in enumerate(self.grow):
            x = grow(F.interpolate(x, scale_factor=2.0))
            for level in self.up[k * self.blocks : (k + 1) * self.blocks]:
                x = level(torch.cat([x, kept.pop()], 1), time)
        return self.head(x)


def waves(times: Tensor, width: int) -> Tensor:
    """Sines and cosines of times between 0 and 1: n -> n width."""
    speed = 1e4 ** (-torch.arange(width // 2, device=times.device) / (width // 2))
    angle = 1e3 * times[:, None] * speed
    return torch.cat([angle.sin(), angle.cos()], 1)


def predict_noise(model: nn.Module, latents: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    """Mean square error to the noise that latents were mixed with."""
    return F.mse_loss(model(latents, times).float(), noise)


def unet(batch: int, pixels: int, width: int, levels: int, blocks: int) -> Made:
    """On square latents of four channels."""
    noise, latents = torch.randn(2, batch, 4, pixels, pixels)
    inputs = {"latents": latents, "times": torch.rand(batch), "noise": noise}
    return Made(UNet(width, levels, blocks), inputs)


LAST = ("channels_last",)
MODELS = {
    model.name: model
    for model in (
        Model(
            "gpt2",
            gpt2,
            predict_words,
            {"batch": 8, "tokens": 1024, "vocabulary": 50304, "width": 768, "depth": 12},
            {"batch": 2, "tokens": 8, "vocabulary": 50, "width": 64, "depth": 1},
        ),
        Model(
            "vit",
            vit,
            classify,
            {"batch": 64, "pixels": 224, "patch": 16, "width": 768, "depth": 12},
            {"batch": 2, "pixels": 16, "patch": 8, "width": 64, "depth": 1},
        ),
        Model(
            "resnet",
            resnet,
            classify,
            {"batch": 128, "pixels": 224, "width": 64, "depths": (3, 4, 6, 3)},
            {"batch": 2, "pixels": 32, "width": 8, "depths": (1, 1)},
            formats=LAST,
        ),
        Model(
            "unet",
            unet,
            predict_noise,
            {"batch": 16, "pixels": 64, "width": 128, "levels": 3, "blocks": 2},
            {"batch": 1, "pixels": 4, "width": 32, "levels": 1, "blocks": 1},
            formats=LAST,
        ),
    )
}
