"""Training with differential privacy on the digits, by opacus: a gradient for each image.

    python examples/per_sample_gradients.py [--backend eager] [--mode functorch] [--steps 200]

opacus clips the gradient of each image and adds noise to their sum. Where it gets them from is its
`grad_sample_mode`. With "no_op" it takes ours: `vmap(grad(loss))`, compiled as one function. With
"functorch" it takes `vmap(grad(layer))` of each layer in hooks, and these functions are what to
compile: the hooks would break a compiled model into its layers.

Batches have one size. With Poisson sampling, on which opacus's accounting builds, each new size
would be compiled anew: under vmap, torch compiles convolutions and cross entropy for one size.
Needs opacus and scikit-learn.
"""

# %%
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DIGITS = 10

# %% [markdown]
# The model and its data.


# %%
def classifier(width: int) -> nn.Sequential:
    """Its norms are over one image each: batch norm would mix them, and opacus refuses it."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.SiLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.GroupNorm(8, 2 * width),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, DIGITS),
    )


def digits(dtype: torch.dtype) -> TensorDataset:
    """1797 images of 1 x 8 x 8, between -1 and 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=dtype).unsqueeze(1) / 8 - 1
    return TensorDataset(images, torch.tensor(found.target))


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# %% [markdown]
# A gradient for each image, and a step of private training.


# %%
def per_sample_gradients(model: nn.Module) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """A function of parameters, images and labels that returns each image's gradients and loss."""

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    return vmap(grad_and_value(loss), in_dims=(None, 0, 0))


def training(
    compile: Callable[[Any], Any],
    mode: str = "no_op",
    width: int = 32,
    batch: int = 256,
    noise: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], Tensor]:
    """A function that trains on one batch and returns its loss."""
    torch.manual_seed(0)
    model = classifier(width).to(dtype)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(digits(dtype), batch_size=batch, shuffle=True, drop_last=True),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    batches = endless(loader)

    if mode == "no_op":
        parameters = dict(model.named_parameters())
        gradients = compile(per_sample_gradients(model))

        def loss_with_gradients(images: Tensor, labels: Tensor) -> Tensor:
            values = {name: p.detach() for name, p in parameters.items()}
            found, losses = gradients(values, images, labels)
            for name, p in parameters.items():
                p.grad_sample = found[name]  # type: ignore[attr-defined]
            return losses.mean()

    else:
        for layer in model:
            if hasattr(layer, "ft_compute_sample_grad"):
                layer.ft_compute_sample_grad = compile(layer.ft_compute_sample_grad)

        def loss_with_gradients(images: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(private(images), labels)
            loss.backward()
            return loss.detach()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_with_gradients(*next(batches))
        optimizer.step()
        return loss

    return step


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--mode", default="no_op", choices=("no_op", "functorch"))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    step = training(compile, options.mode)
    for i in range(options.steps):
        loss = step()
        if i % 20 == 0:
            print(f"step {i}: loss {loss.item():.4f}")


# %%
if __name__ == "__main__":
    main()
