"""A small vision transformer that learns to read the digits: LayerNorm, AdamW, bfloat16.

    python examples/train_vit.py [--backend inductor] [--bfloat16] [--steps 200]

The plainest use there is: the model goes through torch.compile, and nothing else of the program
knows of it. Look at three things: the loss and the accuracy on images that were held out come out
with every backend, up to rounding; the last line compares a step with one in eager mode, taken in
turn on the same machine; and `python -m normpass explain` says of a model of yours which of its
norms are fused. Needs scikit-learn, which brings the 1797 images.
"""

# %%
from __future__ import annotations

import argparse
import statistics
from timeit import timeit
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PATCH, TOKENS, CLASSES, HELD_OUT = 2, 16, 10, 360

# %% [markdown]
# The model: patches of 2 x 2 pixels, each a token, and blocks with a LayerNorm before attention and
# before the MLP.


# %%
class Block(nn.Module):
    """n t d -> n t d"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.mixed(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Classifier(nn.Module):
    """Images n 1 8 8 -> logits n 10, of the mean over tokens."""

    def __init__(self, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(images, PATCH).flatten(2).transpose(1, 2)
        return self.head(self.blocks(self.embed(patches) + self.position).mean(1))


# %% [markdown]
# The images, in an order of chance that is always the same, and a step of training.


# %%
def digits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """1797 images of 1 x 8 x 8, between -1 and 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target))
    images = torch.tensor(found.images, dtype=dtype).unsqueeze(1) / 8 - 1
    return images[order], torch.tensor(found.target)[order]


class Training:
    """Called, it takes one step on a batch of its own drawing and returns the loss."""

    def __init__(
        self,
        compile: Callable[[Any], Any],
        bfloat16: bool = False,
        width: int = 64,
        depth: int = 2,
        batch: int = 128,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.images, self.labels = digits(dtype)
        model = Classifier(width, depth).to(dtype)
        self.model, self.batch, self.bfloat16 = compile(model), batch, bfloat16
        self.optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)

    def logits(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            return self.model(images)

    def __call__(self) -> Tensor:
        some = torch.randint(HELD_OUT, len(self.images), (self.batch,))
        loss = F.cross_entropy(self.logits(self.images[some]), self.labels[some])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self) -> float:
        """On the images that no step has seen."""
        found = self.logits(self.images[:HELD_OUT]).argmax(1)
        return (found == self.labels[:HELD_OUT]).double().mean().item()


# %% [markdown]
# Steps are timed in turn, so that a machine that is busy for a while is so for both.


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--bfloat16", action="store_true", help="autocast")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    step = Training(compile, options.bfloat16)
    for i in range(options.steps):
        loss = step()
        if i % 50 == 0:
            print(f"step {i}: loss {loss.item():.4f}")
    print(f"accuracy on {HELD_OUT} images that were held out: {step.accuracy():.1%}")
    timed = {options.backend: step, "eager": Training(lambda module: module, options.bfloat16)}
    rounds = [[timeit(step, number=1) for step in timed.values()] for _ in range(15)]
    for backend, seconds in zip(timed, zip(*rounds, strict=True), strict=True):
        print(f"a step takes {1e3 * statistics.median(seconds):.1f} ms with {backend}")


# %%
if __name__ == "__main__":
    main()
