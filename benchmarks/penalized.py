"""The demo's fourth row: a classifier whose gradients at its images are held short.

The loss on gradients makes training take second derivatives, which stock torch.compile cannot
(Drucker and LeCun, "Improving generalization performance using double backpropagation", 1992).
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normpass.benchmarks.models import CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.benchmarks.models import Digits

NAME, NORM = "penalty", "nn.LayerNorm"
WIDTH, WEIGHT = 512, 10.0


def build(device: str = "cpu", seed: int = 0) -> nn.Module:
    """n 1 8 8 -> n 10, with the weights of that seed."""
    torch.manual_seed(seed)
    hidden = [
        layer
        for d, h in itertools.pairwise([64, WIDTH, WIDTH])
        for layer in (nn.Linear(d, h), nn.LayerNorm(h), nn.SiLU())
    ]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(WIDTH, CLASSES)).to(device)


def loss_of(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
    """The mean loss over a batch with its penalty."""
    images = images.detach().requires_grad_()
    loss = F.cross_entropy(model(images), labels)
    (slope,) = torch.autograd.grad(loss, images, create_graph=True)
    return loss + WEIGHT * len(images) * slope.square().sum()


def hessian_seconds(
    models: Sequence[Callable[[Tensor], Tensor]], data: Digits, rounds: int = 9
) -> list[float]:
    """What the Hessian of a loss in an image's pixels costs, 64 x 64: medians, of calls in turn."""
    image, label = data.images[:1], data.labels[:1]
    times: list[list[float]] = [[] for _ in models]
    for round_ in range(rounds + 3):  # the first ones compile
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            torch.autograd.functional.hessian(
                lambda x, model=model: F.cross_entropy(model(x), label), image, vectorize=True
            )
            if round_ >= 3:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]
