"""A small decoder that learns to spell: RMSNorm by hand, rotary embedding, gated MLP.

    python examples/train_decoder.py [--backend inductor] [--steps 200]

The text is Python's own reference, which comes with every Python (pydoc_data.topics). The norm is
written out as decoder models do, with its statistics in float32; no list of ours holds that
spelling, and it is fused all the same. What is compiled is the loss, so that cross entropy is part
of the graph. Look at the loss, which falls from that of guessing, 4.6, to some 2.1; at what the
model writes at the end, which has the length of words and some of the words; and at the last lines,
which compare a step with one in eager mode, taken in turn.
"""

# %%
from __future__ import annotations

import argparse
import math
import statistics
from pydoc_data.topics import topics
from timeit import timeit
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# %% [markdown]
# The model, in the manner of Llama: each block is attention and a gated MLP, with a norm before
# either, and another norm stands before the logits.


# %%
class RMSNorm(nn.Module):
    """y = x / (mean_d(x^2) + 1e-6)^(1/2) * weight, in float32 at least: *n d -> *n d"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * rstd).to(x.dtype) * self.weight


def rotated(x: Tensor) -> Tensor:
    """Pairs of features, one from each half, turned by an angle that grows with the position:
    n h t d -> n h t d
    """
    frequency = 10000 ** -torch.linspace(0, 1, x.shape[3] // 2, dtype=x.dtype)
    angle = torch.arange(x.shape[2], dtype=x.dtype).outer(frequency)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Block(nn.Module):
    """n t d -> n t d"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = RMSNorm(width), RMSNorm(width)
        self.qkv, self.mixed = (nn.Linear(width, k * width, bias=False) for k in (3, 1))
        self.gate_and_value = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(2 * width, width, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.mixed(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        gate, value = self.gate_and_value(self.before_mlp(x)).chunk(2, -1)
        return x + self.out(F.silu(gate) * value)


def decoder(letters: int, width: int, depth: int, heads: int = 4) -> nn.Sequential:
    """Letters n t, as numbers -> logits of the letter after each, n t letters."""
    blocks = (Block(width, heads) for _ in range(depth))
    head = nn.Linear(width, letters, bias=False)
    return nn.Sequential(nn.Embedding(letters, width), *blocks, RMSNorm(width), head)


# %% [markdown]
# The text, and a step of training on pieces of it that start anywhere.


# %%
class Training:
    """Called, it takes one step on a batch of its own drawing and returns the loss."""

    def __init__(
        self,
        compile: Callable[[Any], Any],
        width: int = 64,
        depth: int = 2,
        length: int = 64,
        batch: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.alphabet = sorted(set(text))
        number = {letter: i for i, letter in enumerate(self.alphabet)}
        self.text = torch.tensor([number[letter] for letter in text])
        self.length, self.batch = length, batch
        self.model = decoder(len(self.alphabet), width, depth).to(dtype)
        self.loss = compile(self.loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)

    def loss_of(self, pieces: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    def __call__(self) -> Tensor:
        starts = torch.randint(len(self.text) - self.length, (self.batch, 1))
        loss = self.loss(self.text[starts + torch.arange(self.length + 1)])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def written(self, start: str, letters: int = 100) -> str:
        """What the model makes of a start: of each next letter one by its probability. The model
        that is not compiled, because each text has another length.
        """
        found = [self.alphabet.index(letter) for letter in start]
        for _ in range(letters):
            logits = self.model(torch.tensor([found[-self.length :]]))[0, -1]
            found.append(int(torch.multinomial(logits.softmax(0), 1)))
        return "".join(self.alphabet[i] for i in found)


# %% [markdown]
# Steps are timed in turn, so that a machine that is busy for a while is so for both.


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)

    def compile(function: Any) -> Any:
        eager = options.backend == "eager"
        return function if eager else torch.compile(function, backend=options.backend)

    step = Training(compile)
    print(f"guessing has a loss of {math.log(len(step.alphabet)):.3f}")
    for i in range(options.steps):
        loss = step()
        if i % 50 == 0 or i == options.steps - 1:
            print(f"step {i}: loss {loss.item():.3f}")
    print(step.written("The statement "))
    timed = {options.backend: step, "eager": Training(lambda function: function)}
    rounds = [[timeit(step, number=1) for step in timed.values()] for _ in range(15)]
    for backend, seconds in zip(timed, zip(*rounds, strict=True), strict=True):
        print(f"a step takes {1e3 * statistics.median(seconds):.1f} ms with {backend}")


# %%
if __name__ == "__main__":
    main()
