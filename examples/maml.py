"""MAML on the digits: weights from which a few steps on few images learn to tell new classes apart.

    python examples/maml.py [--backend eager] [--whole] [--steps 200]

A class is a digit, turned by a multiple of 90 degrees, perhaps inverted; a task is to tell five of
them apart after five images of each. The loss after the inner steps is differentiated through
their gradients (Finn et al., "Model-agnostic meta-learning", 2017; their network, their norms by
the batch's own statistics). The loss alone is compiled, or with --whole a task's inner steps too:
the calls of torch.autograd.grad are then traced into the compiled function. Needs scikit-learn.
"""

# %%
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WAYS, SHOTS = 5, 5
INNER_RATE = 0.4

# %% [markdown]
# Tasks, and the network that learns them.


# %%
class Task(NamedTuple):
    """Images to learn from and their classes, and others to be asked about."""

    shots: Tensor
    queries: Tensor
    classes_of_shots: Tensor
    classes_of_queries: Tensor


class Network(nn.Sequential):
    """Four blocks, each of which halves 28 x 28 images: 14, 7, 3, 1."""

    def __init__(self, filters: int) -> None:
        blocks: list[nn.Module] = []
        for channels in (1, filters, filters, filters):
            blocks += [
                nn.Conv2d(channels, filters, 3, padding=1),
                nn.BatchNorm2d(filters, track_running_stats=False),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(filters, WAYS))


def digits() -> list[Tensor]:
    """For each digit its images, n x 1 x 28 x 28, between 0 and 1."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    images = F.interpolate(images, size=(28, 28), mode="bilinear")
    return [images[torch.tensor(found.target == digit)] for digit in range(10)]


def draw_task(images: list[Tensor], queries: int) -> Task:
    """queries: of each class."""
    drawn = []
    for digit in torch.randperm(10)[:WAYS].tolist():
        some = images[digit][torch.randperm(len(images[digit]))[: SHOTS + queries]]
        turns, inverted = torch.randint(4, ()).item(), torch.randint(2, ()).item()
        some = some.rot90(turns, (2, 3))
        drawn.append(1 - some if inverted else some)
    shots, others = torch.stack(drawn).split([SHOTS, queries], 1)
    classes = torch.arange(WAYS)
    return Task(
        shots.flatten(0, 1),
        others.flatten(0, 1),
        classes.repeat_interleave(SHOTS),
        classes.repeat_interleave(queries),
    )


# %% [markdown]
# A step of the outer loop differentiates through the inner steps of some tasks.


# %%
def training(
    compile: Callable[[Any], Any],
    whole: bool = False,
    filters: int = 32,
    tasks: int = 4,
    inner_steps: int = 2,
    queries: int = 5,
) -> Callable[[], Tensor]:
    """A function that takes a step of the outer loop and returns the loss after the inner ones.
    whole: compiles what is done for a task instead of the loss alone.
    """
    torch.manual_seed(0)
    images, network = digits(), Network(filters)
    weights: dict[str, Tensor] = dict(network.named_parameters())
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)

    def loss_of(weights: dict[str, Tensor], images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, weights, (images,)), classes)

    loss = loss_of if whole else compile(loss_of)

    def after_learning(task: Task) -> Tensor:
        learned = weights
        for _ in range(inner_steps):
            error = loss(learned, task.shots, task.classes_of_shots)
            slopes = torch.autograd.grad(error, list(learned.values()), create_graph=True)
            pairs = zip(learned.items(), slopes, strict=True)
            learned = {name: w - INNER_RATE * slope for (name, w), slope in pairs}
        return loss(learned, task.queries, task.classes_of_queries)

    try_out = compile(after_learning) if whole else after_learning

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(tasks):
            error = try_out(draw_task(images, queries)) / tasks
            error.backward()
            total += error.detach()
        optimizer.step()
        return total

    return step


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--whole", action="store_true", help="compile a task's inner steps, too")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)
    torch._dynamo.config.trace_autograd_ops = options.whole

    def compile(function: Any) -> Any:
        eager = options.backend == "eager"
        return function if eager else torch.compile(function, backend=options.backend)

    step = training(compile, options.whole)
    for i in range(options.steps):
        loss = step()
        if i % 10 == 0:
            print(f"step {i}: loss after learning {loss.item():.3f}")


# %%
if __name__ == "__main__":
    main()
