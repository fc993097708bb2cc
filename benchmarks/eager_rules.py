"""What the rules cost in eager mode: CPU time of small nets' derivatives with register(eager=True).

    python -m normpass.benchmarks.eager_rules [--rounds 15]

One thread, float32; rounds with the rules and without alternate, and the ratio is the median of the
rounds' ratios. Nets are small, so that what a call costs is what is seen: at the size of a
transformer's layer nothing of it is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

WIDTH, BATCH = 64, 32


def net(norm: Callable[[], nn.Module]) -> nn.Sequential:
    from torch import nn

    half = [nn.Linear(WIDTH, WIDTH), norm(), nn.GELU()]
    return nn.Sequential(*half, nn.Linear(WIDTH, WIDTH), norm(), nn.GELU(), nn.Linear(WIDTH, 1))


def double_backward(norm: Callable[[], nn.Module]) -> Callable[[], Any]:
    """A gradient penalty and its gradient."""
    import torch

    model, x = net(norm), torch.randn(BATCH, WIDTH)

    def step() -> None:
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        g.square().sum().backward()
        model.zero_grad()

    return step


def per_sample(norm: Callable[[], nn.Module]) -> Callable[[], Any]:
    """vmap(grad): a gradient of the parameters for each example."""
    import torch
    from torch.func import functional_call, grad, vmap

    model, x = net(norm), torch.randn(BATCH, 8, WIDTH)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Any], x: Any) -> Any:
        return functional_call(model, parameters, (x,)).square().sum()

    step = vmap(grad(loss), in_dims=(None, 0))
    return lambda: step(parameters, x)


def cases() -> dict[str, Callable[[], Any]]:
    from torch import nn

    def layer() -> nn.Module:
        return nn.LayerNorm(WIDTH)

    def batch() -> nn.Module:
        return nn.BatchNorm1d(WIDTH, track_running_stats=False)

    return {
        "double backward, layer norm": double_backward(layer),
        "double backward, batch norm": double_backward(batch),
        "vmap(grad), layer norm": per_sample(layer),
        "vmap(grad), batch norm": per_sample(batch),
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
        print(f"{name:30} {stock * 1e6:7.0f} us -> {ours * 1e6:7.0f} us   {ratio:.2f}x", flush=True)


if __name__ == "__main__":
    main()
