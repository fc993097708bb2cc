"""A norm that PyTorch does not have, and that nobody has registered: it is fused all the same.

    python examples/custom_norm.py [--backend inductor] [--width 512] [--steps 100]

The norm divides by a power mean whose exponent is learned: it starts as RMSNorm, p = 2, and an
exponent of 1 would divide by the mean absolute value. It is five lines of plain torch. normpass
looks for reductions and what is computed around them, not for names, so that its forward and its
backward, with the gradient of the exponent, are a kernel each.

Look at the report that is printed first: the rows "power_norm" are in the table "fused", forward
and backward, and `ratio` says how much memory they move against the least that is possible. Below
stand the exponents that training on the digits has found. Needs scikit-learn, which brings the
images.
"""

# %%
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SMALLEST, CLASSES, HELD_OUT = 1e-6, 10, 360

# %% [markdown]
# The norm, and all that there is to it. The report names its regions by the class.


# %%
class PowerNorm(nn.Module):
    """y = x / mean_d((|x| + 1e-6)^p)^(1/p) * weight, with a learned p: *n d -> *n d"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.p = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        mean = (x.abs() + SMALLEST).pow(self.p).mean(-1, keepdim=True)
        return x * mean.pow(-1 / self.p) * self.weight


def classifier(width: int, depth: int) -> nn.Sequential:
    """Images n 64 -> logits n 10."""
    layers: list[nn.Module] = []
    for inputs in (64, *[width] * (depth - 1)):
        layers += [nn.Linear(inputs, width), PowerNorm(width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


# %% [markdown]
# The images, in an order of chance that is always the same, and a step of training on all of them.


# %%
def digits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """1797 images of 64 pixels, between -1 and 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target))
    return torch.tensor(found.data, dtype=dtype)[order] / 8 - 1, torch.tensor(found.target)[order]


class Training:
    """Called, it takes one step and returns the loss. images: the first so many of those that are
    not held out.
    """

    def __init__(
        self,
        compile: Callable[[Any], Any],
        width: int = 512,
        depth: int = 3,
        images: int = 1437,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.images, self.labels = digits(dtype)
        self.seen = slice(HELD_OUT, HELD_OUT + images)
        self.model = classifier(width, depth).to(dtype)
        self.compiled = compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)

    def __call__(self) -> Tensor:
        loss = F.cross_entropy(self.compiled(self.images[self.seen]), self.labels[self.seen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def accuracy(self) -> float:
        """On the images that no step has seen."""
        found = self.compiled(self.images[:HELD_OUT]).argmax(1)
        return (found == self.labels[:HELD_OUT]).double().mean().item()

    def exponents(self) -> list[float]:
        return [norm.p.item() for norm in self.model if isinstance(norm, PowerNorm)]


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    step = Training(compile, options.width)
    print(normpass.explain(step.model, step.images[step.seen]))
    for i in range(options.steps):
        loss = step()
        if i % 20 == 0:
            print(f"step {i}: loss {loss.item():.4f}")
    print(f"accuracy on {HELD_OUT} images that were held out: {step.accuracy():.1%}")
    print("exponents:", ", ".join(f"{p:.3f}" for p in step.exponents()))


# %%
if __name__ == "__main__":
    main()
