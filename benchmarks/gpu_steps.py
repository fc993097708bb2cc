"""Whole training steps on a GPU: forward, loss, backward and a fused AdamW, in bfloat16 autocast.

Eager mode, stock Inductor and normpass share one module, so one set of weights, and are timed in
alternation; Inductor is timed twice, which shows the noise. Before that each one's gradients are
compared with those of float32 without autocast.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normpass.backend.explain import record
from normpass.benchmarks.gpu_measure import no_graph_caches, said
from normpass.benchmarks.gpu_variants import EAGER, NORMPASS, OURS, STOCK
from normpass.benchmarks.measure import interleave, peak_bytes
from normpass.benchmarks.steps import CONTROL, stock_as_it_is, what_became
from normpass.benchmarks.zoo import FORMATS, Made

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from normpass.benchmarks.gpu_clock import Place
    from normpass.benchmarks.zoo import Loss, Model

    Step = Callable[[], Tensor]
    Call = Callable[..., Tensor]

REPEATS = 15
WARM_UP = 3
# Small enough that hundreds of steps on the same batch leave the weights about where they were.
LEARNING_RATE = 1e-6
# How far a variant's gradients may be from float32's: times eager's distance, and a little.
TIMES_EAGER, A_LITTLE = 2.0, 1e-3


def _call(loss: Loss, module: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    return loss(module, **inputs)


def backends(place: Place) -> dict[str, dict[str, Any] | None]:
    """What torch.compile is given, by variant; None for eager mode."""
    forced = {} if place.is_gpu else {"least_bytes": 0}
    ours = {
        name: {"backend": "normpass", "options": {**options, **forced}}
        for name, options in NORMPASS.items()
    }
    return {EAGER: None, STOCK: {"backend": "inductor"}, **ours}


def built(model: Model, place: Place, *, tiny: bool) -> Made:
    """On the device, with float32 weights, in the model's memory format."""
    module, inputs = model.build(tiny=tiny)
    layout = FORMATS[model.formats[0]]

    def placed(value: Tensor) -> Tensor:
        value = value.to(place.device)
        return value.contiguous(memory_format=layout) if value.dim() == 4 else value

    module = module.to(place.device).to(memory_format=layout)  # type: ignore[call-overload]
    return Made(module, {name: placed(value) for name, value in inputs.items()})


class Trainer:
    """One variant of a model's training step."""

    def __init__(self, model: Model, made: Made, place: Place, how: dict[str, Any] | None) -> None:
        self.loss, self.made, self.kind = model.loss, made, torch.device(place.device).type
        # torch.compile keeps its code with a function's code object: each gets one of its own.
        self.call: Call = FunctionType(_call.__code__.replace(), globals())
        if how is not None:
            self.call = torch.compile(self.call, dynamic=False, **how)

    def backward(self, *, autocast: bool = True) -> Tensor:
        """Leaves gradients at the parameters; returns the loss."""
        self.made.module.zero_grad(set_to_none=True)
        with torch.autocast(self.kind, torch.bfloat16, enabled=autocast):
            loss = self.call(self.loss, self.made.module, self.made.inputs)
        loss.backward()
        return loss.detach()

    def step_of(self, optimizer: torch.optim.Optimizer) -> Step:
        """What is timed."""

        def step() -> Tensor:
            loss = self.backward()
            optimizer.step()
            return loss

        return step

    def gradients(self, *, autocast: bool = True) -> list[Tensor]:
        """The loss and every gradient."""
        loss = self.backward(autocast=autocast)
        found = (p.grad for p in self.made.module.parameters())
        return [loss, *(grad.detach().clone() for grad in found if grad is not None)]


def distance(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """|found - right| / |right| of all gradients as one vector; infinite if one is not finite."""
    if len(found) != len(right):
        return math.inf
    pairs = [*zip(found[1:], right[1:], strict=True)]
    off = sum(float((have.double() - want.double()).square().sum()) for have, want in pairs)
    size = sum(float(want.double().square().sum()) for _, want in pairs)
    value = math.sqrt(off / size) if size else math.inf
    return value if math.isfinite(value) and bool(found[0].isfinite()) else math.inf


def measure_model(
    model: Model, place: Place, repeats: int = REPEATS, *, tiny: bool = False
) -> dict[str, Any]:
    """Check and time a model; what fails or is wrong is recorded and not timed."""
    torch._dynamo.reset()
    made = built(model, place, tiny=tiny)
    found: dict[str, Any] = {"model": model.name, "format": model.formats[0], "tiny": tiny}
    found |= {"sizes": {**model.sizes, **(model.tiny if tiny else {})}}
    found |= {"failed": {}, "wrong": {}, "errors": {}, "decisions": {}}
    with no_graph_caches():
        trainers = checked(found, model, made, place)
    optimizer = torch.optim.AdamW(made.module.parameters(), lr=LEARNING_RATE, fused=True)
    steps = {name: trainer.step_of(optimizer) for name, trainer in trainers.items()}
    return found | timed(steps, place, repeats)


def checked(found: dict[str, Any], model: Model, made: Made, place: Place) -> dict[str, Trainer]:
    """The variants whose gradients are right."""
    trainers: dict[str, Trainer] = {}
    right = Trainer(model, made, place, None).gradients(autocast=False)
    for name, how in backends(place).items():
        try:
            with stock_as_it_is(name), record.listen() as heard:
                trainer = Trainer(model, made, place, how)
                error = distance(trainer.gradients(), right)
        except Exception as failure:  # of any type: the others are measured still
            found["failed"][name] = said(failure)
            continue
        found["errors"][name] = error
        if name in NORMPASS:
            found["decisions"][name] = what_became(heard)
        limit = TIMES_EAGER * found["errors"].get(EAGER, 0.0) + A_LITTLE
        if error <= limit:
            trainers[name] = trainer
        else:
            found["wrong"][name] = (
                f"its gradients are {error:.1e} away from float32's, at most {limit:.1e} is right"
            )
    return trainers


def timed(steps: Mapping[str, Step], place: Place, repeats: int) -> dict[str, Any]:
    """Peak memory and times. A step is as users see it: the host is not ahead at its start."""
    entries = dict(steps)
    for step in entries.values():
        for _ in range(WARM_UP):
            step()
    peaks = {name: peak_bytes(step, place.device) for name, step in steps.items()}
    if STOCK in steps:
        entries[CONTROL] = steps[STOCK]
    calls = 3 if place.is_gpu else 1
    times = interleave(entries, repeats, place.device, calls_each=calls) if entries else {}
    seconds = {name: vars(timing) for name, timing in times.items()}
    return {"seconds": seconds, "peak_bytes": peaks, **ratios(seconds, peaks)}


def ratios(seconds: Mapping[str, Mapping[str, float]], peaks: Mapping[str, int]) -> dict[str, Any]:
    """How often faster normpass is, and the part of Inductor's memory that it takes."""
    median = {name: timing["median"] for name, timing in seconds.items()}
    ours, stock = median.get(OURS), median.get(STOCK)
    if not ours or not stock:
        return {}
    return {
        "speedup_over_inductor": stock / ours,
        "speedup_over_eager": median[EAGER] / ours if EAGER in median else None,
        "inductor_over_itself": median[CONTROL] / stock,
        "memory_ratio": peaks[OURS] / peaks[STOCK],
    }
