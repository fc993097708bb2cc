"""WGAN-GP on the digits: a critic whose gradients at its inputs are held at length one.

    python examples/wgan_gp.py [--backend eager] [--norm layer] [--whole] [--steps 500]

The penalty is a loss on gradients, so that a training step takes the critic's second derivatives
(Gulrajani et al., "Improved Training of Wasserstein GANs", 2017). The critic and the generator are
compiled, or with --whole the critic's loss in place of the critic: the call of torch.autograd.grad
is then traced into the compiled function. Needs scikit-learn.
"""

# %%
from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LATENT, PENALTY, CRITIC_STEPS = 32, 10.0, 5

# %% [markdown]
# The two networks.


# %%
class Critic(nn.Module):
    """norm: "group" between convolutions, or "layer" between linear layers."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        if norm == "group":
            self.body = nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1),
                nn.GroupNorm(4, 32),
                nn.SiLU(),
                nn.Conv2d(32, 64, 3, padding=1, stride=2),
                nn.GroupNorm(8, 64),
                nn.SiLU(),
                nn.Flatten(),
                nn.Linear(64 * 4 * 4, 1),
            )
        else:
            hidden = [nn.Linear(256, 256), nn.LayerNorm(256), nn.SiLU()]
            self.body = nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 256),
                nn.LayerNorm(256),
                nn.SiLU(),
                *hidden,
                nn.Linear(256, 1),
            )

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images).squeeze(1)


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(LATENT, 256),
            nn.LayerNorm(256),
            nn.SiLU(),
            nn.Linear(256, 64),
            nn.Unflatten(1, (1, 8, 8)),
        )


# %% [markdown]
# The images, and the critic's loss with its penalty.


# %%
def digits(dtype: torch.dtype) -> Tensor:
    """1797 x 1 x 8 x 8, between -1 and 1."""
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().images, dtype=dtype).unsqueeze(1) / 8 - 1


def somewhere_between(real: Tensor, fake: Tensor) -> Tensor:
    """For each pair of images a random one on the line between them, to take a gradient at."""
    t = torch.rand(len(real), 1, 1, 1, dtype=real.dtype)
    return torch.lerp(real, fake, t).requires_grad_()


def loss_of(
    score: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor, between: Tensor
) -> Tensor:
    """How little apart the critic scores the two, and how far its gradients are from length one."""
    distance = score(real).mean() - score(fake).mean()
    (slope,) = torch.autograd.grad(score(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return PENALTY * penalty - distance


# %% [markdown]
# A step: five times the critic, once the generator.


# %%
def training(
    compile: Callable[[Any], Any],
    norm: str = "group",
    whole: bool = False,
    batch: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], Tensor]:
    """A function that trains the generator once and the critic five times; it returns the
    critic's last loss. whole: compiles the critic's loss instead of the critic.
    """
    torch.manual_seed(0)
    images = digits(dtype)
    critic, generator = Critic(norm).to(dtype), Generator().to(dtype)
    for_critic = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.9))
    for_generator = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.9))
    score, generate = compile(critic), compile(generator)
    critics_loss = compile(partial(loss_of, critic)) if whole else partial(loss_of, score)

    def noise() -> Tensor:
        return torch.randn(batch, LATENT, dtype=dtype)

    def step() -> Tensor:
        for _ in range(CRITIC_STEPS):
            real = images[torch.randint(len(images), (batch,))]
            with torch.no_grad():
                fake = generate(noise())
            loss = critics_loss(real, fake, somewhere_between(real, fake))
            for_critic.zero_grad()
            loss.backward()
            for_critic.step()
        for_generator.zero_grad()
        (-score(generate(noise())).mean()).backward()
        for_generator.step()
        return loss.detach()

    return step


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--norm", default="group", choices=("group", "layer"))
    parser.add_argument("--whole", action="store_true", help="compile the critic's loss")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(argv)
    torch._dynamo.config.trace_autograd_ops = options.whole

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    step = training(compile, options.norm, options.whole)
    for i in range(options.steps):
        loss = step()
        if i % 50 == 0:
            print(f"step {i}: the critic's loss {loss.item():.4f}")


# %%
if __name__ == "__main__":
    main()
