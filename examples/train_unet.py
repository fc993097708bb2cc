"""A small diffusion U-Net that learns to take noise off the digits: GroupNorm, SiLU, channels_last.

    python examples/train_unet.py [--backend inductor] [--channels-last] [--steps 300]

An image and noise are mixed, and the network is asked which noise it was (Ho et al., "Denoising
diffusion probabilistic models", 2020; the mixture is that of an angle: cos(a) image + sin(a)
noise). Look at the error on images that were held out, where an answer of zero has 1; at the
pictures, an image, the image with noise and what the network makes of it in one step; and at the
last lines, which compare a step with one in eager mode, taken in turn. With --channels-last the
channels of a pixel lie side by side, the order that convolutions prefer on many machines: norms
over channels and pixels are then fused along other axes. Needs scikit-learn, which brings the
images.
"""

# %%
from __future__ import annotations

import argparse
import math
import statistics
from timeit import timeit
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HELD_OUT = 256

# %% [markdown]
# The model: one level of 8 x 8 pixels, one of 4 x 4, and back, where what the first level knew is
# put beside what comes up.


# %%
class Residual(nn.Module):
    """Two convolutions, each after a norm; between them the angle shifts and scales the channels:
    n c h w, n e -> n k h w
    """

    def __init__(self, channels: int, out: int, embedding: int) -> None:
        super().__init__()
        self.before, self.between = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.first = nn.Conv2d(channels, out, 3, padding=1)
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.scale_and_shift = nn.Linear(embedding, 2 * out)
        self.short = nn.Identity() if out == channels else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        y = self.first(F.silu(self.before(x)))
        scale, shift = self.scale_and_shift(embedded)[:, :, None, None].chunk(2, 1)
        y = F.silu(self.between(y) * (1 + scale) + shift)
        return self.short(x) + self.second(y)


class UNet(nn.Module):
    """Images with noise n 1 8 8 and angles n -> the noise, n 1 8 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        e = 2 * width
        self.embed = nn.Sequential(nn.Linear(16, e), nn.SiLU(), nn.Linear(e, e), nn.SiLU())
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = Residual(width, width, e)
        self.halve = nn.Conv2d(width, e, 3, stride=2, padding=1)
        self.middle = Residual(e, e, e)
        self.up = Residual(e + width, width, e)
        self.leave = nn.Sequential(
            nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1)
        )

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        waves = angle[:, None] * torch.arange(1, 9, dtype=angle.dtype)
        embedded = self.embed(torch.cat([waves.sin(), waves.cos()], 1))
        fine = self.down(self.enter(x), embedded)
        coarse = self.middle(self.halve(fine), embedded)
        wide = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return self.leave(self.up(torch.cat([wide, fine], 1), embedded))


# %% [markdown]
# A step of training draws images, noise and angles; the held-out images always get the same.


# %%
def mixed(images: Tensor, noise: Tensor, angle: Tensor) -> Tensor:
    """Of variance one, where image and noise are."""
    a = angle[:, None, None, None]
    return a.cos() * images + a.sin() * noise


class Training:
    """Called, it takes one step on a batch of its own drawing and returns the loss."""

    def __init__(
        self,
        compile: Callable[[Any], Any],
        channels_last: bool = False,
        width: int = 32,
        batch: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from sklearn.datasets import load_digits

        torch.manual_seed(0)
        order = torch.contiguous_format if not channels_last else torch.channels_last
        images = torch.tensor(load_digits().images, dtype=dtype).unsqueeze(1) / 8 - 1
        images = images[torch.randperm(len(images))].to(memory_format=order)
        self.held_out, self.images = images[:HELD_OUT], images[HELD_OUT:]
        self.noise, self.batch = torch.randn_like(self.held_out), batch
        network = UNet(width).to(dtype)
        network.to(memory_format=order)  # type: ignore[call-overload]
        self.network = compile(network)
        self.optimizer = torch.optim.Adam(network.parameters(), 2e-3)

    def __call__(self) -> Tensor:
        images = self.images[torch.randint(len(self.images), (self.batch,))]
        noise = torch.randn_like(images)
        angle = torch.rand(self.batch, dtype=images.dtype) * math.pi / 2
        loss = F.mse_loss(self.network(mixed(images, noise, angle), angle), noise)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def tried_out(self, angle: float) -> tuple[float, Tensor, Tensor]:
        """On the held-out images: the mean squared error of the noise that is found, the images
        with noise, and what is left when the found noise is taken off.
        """
        angles = torch.full((HELD_OUT,), angle, dtype=self.held_out.dtype)
        noisy = mixed(self.held_out, self.noise, angles)
        found = self.network(noisy, angles)
        cleaned = (noisy - math.sin(angle) * found) / math.cos(angle)
        return F.mse_loss(found, self.noise).item(), noisy, cleaned


# %% [markdown]
# Pictures of letters; and steps that are timed in turn, so that a machine that is busy for a while
# is so for both.


# %%
def drawn(*images: Tensor) -> str:
    """Images of 8 x 8 side by side, -1 as a space and 1 as @."""
    pixels = torch.cat(images, -1).squeeze(0).clamp(-1, 1)
    return "\n".join("".join(2 * " .:-=+*#@"[int(4 * p + 4.5)] for p in row) for row in pixels)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--channels-last", action="store_true", help="the order in memory")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    step = Training(compile, options.channels_last)
    for i in range(options.steps):
        loss = step()
        if i % 50 == 0:
            print(f"step {i}: loss {loss.item():.4f}")
    error, noisy, cleaned = step.tried_out(math.pi / 5)
    print(f"error on {HELD_OUT} images that were held out: {error:.3f}")
    print(drawn(step.held_out[0], noisy[0], cleaned[0]))
    timed = {options.backend: step, "eager": Training(lambda module: module, options.channels_last)}
    rounds = [[timeit(step, number=1) for step in timed.values()] for _ in range(15)]
    for backend, seconds in zip(timed, zip(*rounds, strict=True), strict=True):
        print(f"a step takes {1e3 * statistics.median(seconds):.1f} ms with {backend}")


# %%
if __name__ == "__main__":
    main()
