"""What the rules cost in eager mode: CPU time of small nets' derivatives with register(eager=True).

    python -m normpass.benchmarks.eager_rules [--rounds 15]

One thread, float32; rounds with the rules and without alternate, and the ratio is the median of the
rounds' ratios. Nets are small, so that what a call costs is what is seen; a training step has the
size of a small transformer's layer, where nothing of it is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

WIDTH, BATCH = 64, 32


def net(norm: Callable[[int], nn.Module], width: int = WIDTH) -> nn.Sequential:
    from torch import nn

    half = [nn.Linear(width, width), norm(width), nn.GELU()]
    more = [nn.Linear(width, width), norm(width), nn.GELU()]
    return nn.Sequential(*half, *more, nn.Linear(width, 1))


def training(norm: Callable[[int], nn.Module]) -> Callable[[], Any]:
    import torch

    model, x = net(norm, 512), torch.randn(256, 512)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def tangent(norm: Callable[[int], nn.Module], *, recorded: bool = False) -> Callable[[], Any]:
    """torch.func.jvp. recorded: of parameters that require gradients, so that somebody may ask for
    one of the tangent, which PyTorch gets wrong.
    """
    import torch

    model, x = net(norm).requires_grad_(recorded), torch.randn(BATCH, WIDTH)
    return lambda: torch.func.jvp(model, (x,), (x,))


def hessian_vector(norm: Callable[[int], nn.Module]) -> Callable[[], Any]:
    """Of the loss in the parameters, by the tape twice."""
    import torch

    model, x = net(norm), torch.randn(BATCH, WIDTH)
    parameters = list(model.parameters())
    v = [torch.randn_like(p) for p in parameters]

    def step() -> None:
        loss = model(x).square().mean()
        g = torch.autograd.grad(loss, parameters, create_graph=True)
        torch.autograd.grad(g, parameters, v)

    return step


def double_backward(norm: Callable[[int], nn.Module]) -> Callable[[], Any]:
    """A gradient penalty and its gradient."""
    import torch

    model, x = net(norm), torch.randn(BATCH, WIDTH)

    def step() -> None:
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        g.square().sum().backward()
        model.zero_grad()

    return step


def per_sample(norm: Callable[[int], nn.Module]) -> Callable[[], Any]:
    """vmap(grad): a gradient of the parameters for each example."""
    import torch
    from torch.func import functional_call, grad, vmap

    model, x = net(norm), torch.randn(BATCH, 8, WIDTH)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Any], x: Any) -> Any:
        return functional_call(model, parameters, (x,)).square().sum()

    step = vmap(grad(loss), in_dims=(None, 0))
    return lambda: step(parameters, x)


WHAT: dict[str, Callable[[Callable[[int], nn.Module]], Callable[[], Any]]] = {
    "training step": training,
    "jvp": tangent,
    "jvp on the tape": partial(tangent, recorded=True),
    "Hessian-vector product": hessian_vector,
    "double backward": double_backward,
    "vmap(grad)": per_sample,
}


def cases() -> dict[str, Callable[[], Any]]:
    from torch import nn

    norms: dict[str, Callable[[int], nn.Module]] = {
        "layer norm": nn.LayerNorm,
        "batch norm": partial(nn.BatchNorm1d, track_running_stats=False),
    }
    return {
        f"{what}, {name}": make(norm) for what, make in WHAT.items() for name, norm in norms.items()
    }


def seconds(step: Callable[[], Any], times: int) -> float:
    """CPU time of a step."""
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start) / times


def measure(step: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Seconds a step without the rules and with them, and the median ratio of the two."""
    from normpass.decomps.activation import registered

    with registered(eager=True):
        seconds(step, 20)
    times = max(5, int(0.1 / seconds(step, 20)))
    stock, ours = [], []
    for _ in range(rounds):
        stock.append(seconds(step, times))
        with registered(eager=True):
            step()
            ours.append(seconds(step, times))
    ratios = [b / a for a, b in zip(stock, ours, strict=True)]
    return statistics.median(stock), statistics.median(ours), statistics.median(ratios)


def main() -> None:
    """Prints a line for each case."""
    import torch

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, step in cases().items():
        stock, ours, ratio = measure(step, rounds)
        print(f"{name:34} {stock * 1e6:7.0f} us -> {ours * 1e6:7.0f} us   {ratio:.2f}x", flush=True)


if __name__ == "__main__":
    main()
