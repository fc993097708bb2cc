"""`normpass bench --ensembles`: gradients of many models, or of a model for each example.

    ensemble      vmap(grad(loss)) over models of one form, each with its own weights
    per sample    vmap(grad(loss)) over examples, as differentially private training takes them
    norm          vmap(grad(sum(sin(norm)))) over batches of examples: of it and its weights

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
from normpass.benchmarks.zoo_own import ResNet, ViT, gpt

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


class UNet(nn.Module):
    """Two levels with skips, norms over groups: n 3 h w -> n 3 h w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.level(3, width), self.level(width, 2 * width)])
        self.middle = self.level(2 * width, 2 * width)
        self.up = nn.ModuleList([self.level(4 * width, width), self.level(2 * width, width)])
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def level(before: int, after: int) -> nn.Module:
        """Two convolutions with norms: n c h w -> n k h w."""
        layers: list[nn.Module] = []
        for channels in (before, after):
            convolution = nn.Conv2d(channels, after, 3, padding=1)
            layers += [convolution, nn.GroupNorm(8, after), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """n 3 h w -> n 3 h w"""
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skips.pop()], 1)
            x = level(x)
        return self.head(x)


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
    return _over_examples(make, F.cross_entropy, lambda: _batch(batch, pixels))


def of_images(
    make: Callable[[], nn.Module], batch: int, pixels: int
) -> tuple[Callable[..., Gradients], tuple[Any, ...]]:
    """Of a model whose results are images, each to be another."""
    return _over_examples(
        make, F.mse_loss, lambda: torch.randn(2, batch, 3, pixels, pixels).unbind()
    )


def of_words(
    vocabulary: int, width: int, depth: int, batch: int, tokens: int
) -> tuple[Callable[..., Gradients], tuple[Any, ...]]:
    """Of a small GPT, each word of a text to be predicted."""

    def loss(logits: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(logits[0, :-1], words[0, 1:])

    def examples() -> tuple[Tensor, Tensor]:
        words = torch.randint(vocabulary, (batch, tokens))
        return words, words

    return _over_examples(lambda: gpt(1, 1, vocabulary, width, depth).module, loss, examples)


def _over_examples(
    make: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    examples: Callable[[], Sequence[Tensor]],
) -> tuple[Callable[..., Gradients], tuple[Any, ...]]:
    """loss: of results and targets, for one example each. examples: makes inputs and targets."""
    torch.manual_seed(0)
    net = make()

    def of_one(weights: Gradients, x: Tensor, target: Tensor) -> Tensor:
        return loss(functional_call(net, weights, (x.unsqueeze(0),)), target.unsqueeze(0))

    values = {name: weight.detach() for name, weight in net.named_parameters()}
    return vmap(grad(of_one), (None, 0, 0)), (values, *examples())


def of_norm(
    norm: Callable[..., Tensor], *shape: int, channels: int
) -> tuple[Callable[..., Gradients], tuple[Any, ...]]:
    """A norm of v examples, each of the shape's other axes, that share a weight and a bias."""
    torch.manual_seed(0)
    weight, bias = 1 + 0.1 * torch.randn(channels), 0.1 * torch.randn(channels)
    values = {"x": torch.randn(shape), "weight": weight, "bias": bias}
    dims = {"x": 0, "weight": None, "bias": None}

    def loss(values: Gradients) -> Tensor:
        return norm(values["x"], values["weight"], values["bias"]).sin().sum()

    return vmap(grad(loss), (dims,)), (values,)


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
    "per sample, GPT": partial(of_words, 2000, 192, 4, batch=8, tokens=128),
    "per sample, U-Net": partial(of_images, partial(UNet, 32), batch=8, pixels=64),
    "norm, LayerNorm": partial(
        of_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), 8, 512, 768, channels=768
    ),
    "norm, RMSNorm": partial(
        of_norm, lambda x, w, b: F.rms_norm(x, w.shape, w) + b, 8, 512, 768, channels=768
    ),
    "norm, GroupNorm": partial(
        of_norm, lambda x, w, b: F.group_norm(x, 8, w, b), 8, 16, 64, 28, 28, channels=64
    ),
    "norm, BatchNorm": partial(
        of_norm,
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        *(8, 16, 64, 28, 28),
        channels=64,
    ),
    "norm, InstanceNorm": partial(
        of_norm,
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
        *(8, 16, 64, 28, 28),
        channels=64,
    ),
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
    result.times = interleave(steps, repeats, "cpu")
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
