"""`normpass bench --ensembles`: gradients of many models, or of a model for each example.

    ensemble      vmap(grad(loss)) over models of one form, each with its own weights
    per sample    vmap(grad(loss)) over examples, as differentially private training takes them

in eager mode, compiled by stock Inductor, and by normpass with the rules registered. All gradients
are compared with eager's, what differs is not timed, and the rest is timed in alternation. Memory
is counted as by `normpass bench --vmap`.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

import normpass
from normpass.benchmarks.machine import machine
from normpass.benchmarks.measure import Timing, interleave, keep_freed_memory, peak_bytes, spread
from normpass.benchmarks.zoo_own import ResNet, ViT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    Gradients = dict[str, Tensor]
    Program = Callable[[], tuple[Callable[..., Gradients], tuple[Any, ...]]]

REPEATS = 15
CLASSES = 10
# Of float32 gradients as one vector: where a ReLU's input is rounded to the other side, they jump.
NEAR = 5e-3

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "BatchNorm": partial(nn.BatchNorm2d, track_running_stats=False),
    "GroupNorm": partial(nn.GroupNorm, 4),
}


def conv_net(norm: str, width: int) -> nn.Module:
    """Three convolutions with norms: n 3 h w -> n 10."""
    layers: list[nn.Module] = []
    before = 3
    for channels, stride in ((width, 1), (width, 1), (2 * width, 2)):
        convolution = nn.Conv2d(before, channels, 3, padding=1, stride=stride)
        layers += [convolution, NORMS[norm](channels), nn.ReLU()]
        before = channels
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)
    return nn.Sequential(*layers, *head)


def with_group_norm(module: nn.Module) -> nn.Module:
    """The same with GroupNorm in place of BatchNorm, which mixes examples."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, nn.GroupNorm(8, child.num_features))
        else:
            with_group_norm(child)
    return module


def _batch(size: int, pixels: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, pixels, pixels), torch.randint(CLASSES, (size,))


def ensemble(
    norm: str, width: int, models: int = 4, batch: int = 32, pixels: int = 32
) -> tuple[Callable[..., Gradients], tuple[Any, ...]]:
    """A function of the weights of all models, images and labels, and its arguments."""
    torch.manual_seed(0)
    nets = [conv_net(norm, width) for _ in range(models)]
    weights, _ = stack_module_state(nets)
    base = deepcopy(nets[0]).to("meta")

    def loss(weights: Gradients, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(base, weights, (images,)), labels)

    values = {name: weight.detach() for name, weight in weights.items()}
    return vmap(grad(loss), (0, None, None)), (values, *_batch(batch, pixels))


def per_sample(
    make: Callable[[], nn.Module], batch: int, pixels: int
) -> tuple[Callable[..., Gradients], tuple[Any, ...]]:
    """The same of one model's weights, over the images."""
    torch.manual_seed(0)
    net = make()

    def loss(weights: Gradients, image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(net, weights, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    values = {name: weight.detach() for name, weight in net.named_parameters()}
    return vmap(grad(loss), (None, 0, 0)), (values, *_batch(batch, pixels))


PROGRAMS: dict[str, Program] = {
    "ensemble, BatchNorm, 16": partial(ensemble, "BatchNorm", 16),
    "ensemble, BatchNorm, 32": partial(ensemble, "BatchNorm", 32),
    "ensemble, GroupNorm, 16": partial(ensemble, "GroupNorm", 16),
    "ensemble, GroupNorm, 32": partial(ensemble, "GroupNorm", 32),
    "per sample, GroupNorm, 16": partial(
        per_sample, partial(conv_net, "GroupNorm", 16), batch=32, pixels=32
    ),
    "per sample, GroupNorm, 32": partial(
        per_sample, partial(conv_net, "GroupNorm", 32), batch=32, pixels=32
    ),
    "per sample, ResNet": partial(
        per_sample, lambda: with_group_norm(ResNet(64)), batch=8, pixels=112
    ),
    "per sample, ViT": partial(per_sample, partial(ViT, 64, 192, 4), batch=16, pixels=64),
}


@dataclass
class Result:
    """times, peaks: of a call, by way. failed: why there are none."""

    times: dict[str, Timing] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def speedup(self) -> float | None:
        """Over the better of eager mode and stock Inductor."""
        medians = {way: timing.median for way, timing in self.times.items()}
        return _least_of_others(medians)

    def memory(self) -> float | None:
        """Their smaller peak, in units of ours."""
        return _least_of_others(self.peaks)


def _least_of_others(found: Mapping[str, float]) -> float | None:
    others = [found[way] for way in ("eager", "inductor") if way in found]
    return min(others) / found["normpass"] if others and "normpass" in found else None


def compile_all(program: Program) -> tuple[dict[str, Callable[..., Gradients]], tuple[Any, ...]]:
    """The three ways, each called once, and the arguments.

    Raises:
        RuntimeError: when the rules are registered already.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    from normpass.decomps.activation import is_registered

    if is_registered():
        raise RuntimeError("stock torch cannot be measured while normpass is registered")
    torch._dynamo.reset()
    eager, args = program()
    made = {"eager": eager}
    no_graphs = inductor_config.patch(fx_graph_cache=False)
    with no_graphs, functorch_config.patch(enable_autograd_cache=False):
        made["inductor"] = torch.compile(program()[0], backend="inductor", fullgraph=True)
        made["inductor"](*args)
        torch._dynamo.reset()  # one code object, and the rules are others now
        with normpass.registered():
            made["normpass"] = torch.compile(program()[0], backend="normpass", fullgraph=True)
            made["normpass"](*args)
    return made, args


def difference(found: Gradients, right: Gradients) -> float:
    """The distance of the gradients as one vector, relative to its length."""
    away = sum(float((found[name] - value).square().sum()) for name, value in right.items())
    return (away / sum(float(value.square().sum()) for value in right.values())) ** 0.5


def measure(program: Program, repeats: int) -> Result:
    """Times and peaks of what agrees with eager."""
    made, args = compile_all(program)
    right, result = made["eager"](*args), Result()
    for way, function in list(made.items()):
        error = difference(function(*args), right)
        if not error <= NEAR:
            result.failed[way] = f"{error:.1e} away from eager's, at most {NEAR:.0e} is right"
            del made[way]
    steps = {way: lambda f=function: f(*args) for way, function in made.items()}
    result.peaks = {way: peak_bytes(step, "cpu") for way, step in steps.items()}
    result.times = interleave(steps, repeats, "cpu", calls_each=1)
    return result


def result_table(results: Mapping[str, Result]) -> Table:
    """A row per program."""
    table = Table(
        title="gradients by vmap(grad(loss)), medians in ms, half the interquartile range"
    )
    table.add_column("program", no_wrap=True)
    ways = ("eager", "inductor", "normpass")
    for heading in (*ways, "vs the better", "peak MB", "of the smaller"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, result in results.items():
        cells = [spread(result.times[way]) if way in result.times else "wrong" for way in ways]
        time, memory = result.speedup(), result.memory()
        cells += ["-" if time is None else f"{time:.2f}x"]
        peak = result.peaks.get("normpass")
        cells += ["-" if peak is None else f"{peak / 1e6:.0f}"]
        cells += ["-" if memory is None else f"{1 / memory:.2f}"]
        table.add_row(label, *cells)
    return table


def run(
    console: Console, repeats: int, folder: Path, names: Sequence[str] = (), steady: bool = True
) -> int:
    """Measures the programs, prints medians and ratios, saves them; 1 when ours is wrong."""
    steady = steady and keep_freed_memory()
    results = {label: measure(PROGRAMS[label], repeats) for label in names or PROGRAMS}
    for label, result in results.items():
        for way, reason in result.failed.items():
            console.print(f"{label}: {way} is wrong and not timed: {reason}", markup=False)
    console.print(result_table(results))
    document = {
        "machine": {**machine("cpu"), "freed_memory_kept": steady},
        "repeats": repeats,
        "programs": {
            label: {
                "seconds": {way: vars(timing) for way, timing in result.times.items()},
                "peak_bytes": result.peaks,
                "wrong": result.failed,
                "speedup_over_the_better": result.speedup(),
            }
            for label, result in results.items()
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cpu-ensembles.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"saved {path}")
    return 1 if any("normpass" in result.failed for result in results.values()) else 0
