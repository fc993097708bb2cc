"""`normpass bench --vmap`: per-example gradients of batch norm, with the rules and without.

What is compiled is vmap(grad(loss)) with loss = sum(sin(batch_norm(x, weight, bias))): each example
gets gradients of its own of x, weight and bias. The backend is Inductor both times. Stock is
compiled first, while nothing is registered, then the same with the rules registered; both are
compared with float64, and what is wrong is not timed. The rest is called in alternation in one
process.

Memory is the peak of the bytes in tensors that were allocated during a call, outputs included and
inputs not: on a GPU as torch's allocator counts it, on a CPU from the allocations and releases that
torch.profiler records. The resident size of a process would not do: compiling, which comes before,
takes more of it than the call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch.func import grad, vmap
from torch.nn import functional as F

import normpass
from normpass.benchmarks.cases import spell
from normpass.benchmarks.machine import machine
from normpass.benchmarks.measure import (
    Timing,
    interleave,
    keep_freed_memory,
    peak_bytes,
    relative_errors,
    verdict,
)
from normpass.benchmarks.norms import EPS, batch_norm_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rich.console import Console
    from torch import Tensor

    from normpass.benchmarks.norms import Shape

    Function = Callable[..., tuple[Tensor, ...]]

SHAPE: Shape = (8, 16, 64, 28, 28)
REPEATS = 40
NAMES = ("dx", "dweight", "dbias")


def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of one example, x: n c *s. The sine makes the cotangent of the norm, cos(y), vary."""
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS).sin().sum()


# torch.compile keeps its code with a function's code object: what is compiled twice has to be
# written twice.


def stock(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Per-example gradients, for compiling while no rules are registered."""
    return vmap(grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))(x, weight, bias)


def rules(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The same, for compiling with the rules registered."""
    return vmap(grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))(x, weight, bias)


def inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x: v n c *s and one weight and bias: c for all examples. Fixed numbers, nothing uniform."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(shape, generator=generator) + 0.5
    weight, bias = (1 + 0.5 * torch.randn(shape[2], generator=generator) for _ in range(2))
    return x.to(device), weight.to(device), bias.to(device)


def compile_both(args: tuple[Tensor, ...], backend: Any = "inductor") -> dict[str, Function]:
    """Stock first, then with the rules; each is called once, and neither taken from a cache.

    Raises:
        RuntimeError: when the rules are registered already.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    from normpass.decomps.activation import is_registered

    if is_registered():
        raise RuntimeError("stock torch cannot be measured while normpass is registered")
    torch._dynamo.reset()
    made: dict[str, Function] = {}
    no_graphs = inductor_config.patch(fx_graph_cache=False)
    with no_graphs, functorch_config.patch(enable_autograd_cache=False):
        made["stock"] = torch.compile(stock, backend=backend, fullgraph=True)
        made["stock"](*args)
        with normpass.registered():
            made["rules"] = torch.compile(rules, backend=backend, fullgraph=True)
            made["rules"](*args)
    return made


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The gradients in float64 from primitives, example by example."""
    parts = []
    for example in x:
        leaves = [v.detach().double().requires_grad_() for v in (example, weight, bias)]
        parts.append(torch.autograd.grad(batch_norm_reference(*leaves).sin().sum(), leaves))
    stacked = [torch.stack(each) for each in zip(*parts, strict=True)]
    return dict(zip(NAMES, stacked, strict=True))


def check(made: Mapping[str, Function], args: tuple[Tensor, ...]) -> dict[str, str]:
    """Why a function is wrong, by name, judged as all the benchmarks do by eager's own error."""
    right = reference(*args)

    def errors(function: Function) -> dict[str, float]:
        return relative_errors(dict(zip(NAMES, function(*args), strict=True)), right)

    eager = errors(stock)
    # y, whose size tells the verdict how many terms a sum has, has that of dx.
    sized = {**right, "y": right["dx"]}
    verdicts = {
        name: verdict(errors(function), eager, sized, torch.float32)
        for name, function in made.items()
    }
    return {name: reason for name, reason in verdicts.items() if reason}


def result_table(
    shape: Shape, times: Mapping[str, Timing], peaks: Mapping[str, int], repeats: int
) -> Table:
    """A row per variant."""
    title = f"vmap(grad(batch_norm)) {spell(shape)} float32, median of {repeats}"
    table = Table(title=title)
    table.add_column("compiled by Inductor")
    for heading in ("ms", "vs stock", "peak MB", "of stock"):
        table.add_column(heading, justify="right")
    for name, timing in times.items():
        table.add_row(
            "with normpass registered" if name == "rules" else name,
            f"{timing.median * 1e3:.2f}",
            f"{times['stock'].median / timing.median:.2f}x",
            f"{peaks[name] / 1e6:.1f}",
            f"{peaks[name] / peaks['stock']:.2f}",
        )
    return table


def run(
    console: Console,
    device: str,
    repeats: int,
    folder: Path,
    shape: Shape = SHAPE,
    system_allocator: bool = False,
    backend: Any = "inductor",
) -> int:
    """Measure both, print medians, peaks and ratios, save them as JSON; 1 when one is wrong."""
    args = inputs(shape, device)
    made = compile_both(args, backend)
    wrong = check(made, args)
    for name, reason in wrong.items():
        console.print(f"{name} is wrong and not timed: {reason}")
    if wrong:
        return 1
    steps = {name: lambda f=function: f(*args) for name, function in made.items()}
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
    steady = not system_allocator and keep_freed_memory()
    times = interleave(steps, repeats, device)
    console.print(result_table(shape, times, peaks, repeats))
    document = {
        "machine": {**machine(device), "freed_memory_kept": steady},
        "shape": list(shape),
        "repeats": repeats,
        "seconds": {name: vars(timing) for name, timing in times.items()},
        "speedup": times["stock"].median / times["rules"].median,
        "peak_bytes": peaks,
        "memory_ratio": peaks["rules"] / peaks["stock"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{torch.device(device).type}-vmap.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"saved {path}")
    return 0
