"""A training step, eager or compiled, and how right its loss and gradients are.

A step is forward, loss and backward; the loss is compiled with the model. Gradients are given back
as new tensors: none is accumulated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normpass.benchmarks.exact import in_double
from normpass.benchmarks.zoo import Made

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from normpass.benchmarks.zoo import Loss

Step = Callable[[], tuple[Tensor, tuple[Tensor | None, ...]]]
# Gradients that are zero in exact arithmetic, as of a key's bias, are all rounding: errors are
# measured against no less than this part of the largest gradient.
SMALLEST = 1e-3
# How far eager's gradients may be from float64: beyond this there is nothing to compare with. A
# ResNet, whose ReLUs see rounding, has 7e-2 in float32 (9e-6 with SiLU), a tiny MobileNet 1.8 in
# bfloat16.
EAGER_LIMIT = {torch.float32: 0.2, torch.bfloat16: 4.0}
MOVED_RUNS = 8


def _call(loss: Loss, module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return loss(module, **inputs)


def step_of(
    loss: Loss, made: Made, backend: Any = None, options: dict[str, Any] | None = None
) -> Step:
    """A function that does one step; compiled at its first call, unless the backend is None.

    torch.compile keeps its code with a function's code object: each gets one of its own.
    """
    call: Any = _call
    if backend is not None:
        call = FunctionType(_call.__code__.replace(), globals())
        call = torch.compile(call, backend=backend, options=options)
    parameters = [p for p in made.module.parameters() if p.requires_grad]

    def step() -> tuple[Tensor, tuple[Tensor | None, ...]]:
        found = call(loss, made.module, made.inputs)
        return found.detach(), torch.autograd.grad(found, parameters, allow_unused=True)

    return step


def draws_numbers(step: Step, device: str) -> bool:
    """Whether a step moves the random generator of its device."""
    cuda = torch.device(device).type == "cuda"

    def state() -> Tensor:
        return torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()

    before = state()
    step()
    return not torch.equal(before, state())


def gradients(made: Made, step: Step) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter that takes part, by name."""
    loss, grads = step()
    names = [name for name, p in made.module.named_parameters() if p.requires_grad]
    return {"loss": loss} | {
        name: grad for name, grad in zip(names, grads, strict=True) if grad is not None
    }


def oracle(loss: Loss, made: Made) -> dict[str, Tensor]:
    """Loss and gradients of the same numbers in float64, by eager mode."""

    def double(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if floating else value

    with in_double():
        exact = Made(
            copy.deepcopy(made.module).double(),
            {name: double(value) for name, value in made.inputs.items()},
        )
        return gradients(exact, step_of(loss, exact))


def rounding_errors(loss: Loss, made: Made, exact: Mapping[str, Tensor]) -> dict[str, float]:
    """How far eager mode is from float64 in this dtype: the most of some runs.

    All but the first have weights that are moved by up to a unit in the last place. Where a ReLU's
    input is near zero, rounding decides whether there is a gradient, and each run decides anew.
    """
    most = relative_errors(gradients(made, step_of(loss, made)), exact)
    generator = torch.Generator().manual_seed(0)
    for _ in range(MOVED_RUNS):
        moved = Made(copy.deepcopy(made.module), made.inputs)
        with torch.no_grad():
            for p in moved.module.parameters():
                part = 2 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 1
                p.copy_(p.double() * (1 + torch.finfo(p.dtype).eps * part.to(p.device)))
        errors = relative_errors(gradients(moved, step_of(loss, moved)), exact)
        most = {name: max(error, errors[name]) for name, error in most.items()}
    return most


def relative_errors(got: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """max |got - right| / max |right| of the loss and of each gradient, by name.

    A gradient that should be there and is not is infinitely wrong, and so is one that is not
    finite. One of zeros may stand for none: compiled code returns them.
    """
    sizes = {name: float(value.abs().max()) for name, value in right.items()}
    least = smallest(right)
    errors = {}
    for name in {**right, **got}:
        have, want = got.get(name), right.get(name)
        if have is None or want is None:
            there = want if have is None else have
            errors[name] = float("inf") if there is not None and there.any() else 0.0
        elif have.shape != want.shape or not have.isfinite().all():
            errors[name] = float("inf")
        else:
            scale = sizes[name] if name == "loss" else max(sizes[name], least)
            errors[name] = float((have.double() - want).abs().max()) / scale
    return errors


def judge(
    errors: Mapping[str, float],
    eager: Mapping[str, float],
    right: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> str | None:
    """Why a step is wrong, None when it is right.

    Right is: no further from float64 than four times eager's error, or than four units in the last
    place; of float32 sixteen, because sums over all rows are taken in it, in any order. Eager may
    be close in one gradient by chance, because it has few elements or because no ReLU in its way
    met a number near zero. Its error is taken to be as large as in its worst gradient, of those
    that are not all rounding.
    """
    least = smallest(right)
    sizes = {name: float(value.abs().max()) for name, value in right.items() if name != "loss"}
    typical = max(eager[name] for name, size in sizes.items() if size >= least)
    if not typical <= EAGER_LIMIT[dtype]:
        return f"eager's own gradients are {typical:.1e} away from float64"
    rounding = max(torch.finfo(dtype).eps, 4 * torch.finfo(torch.float32).eps)
    for name, error in errors.items():
        own = eager["loss"] if name == "loss" else max(eager.get(name, 0.0), typical)
        limit = 4 * max(own, rounding)
        if not error <= limit:
            return f"{name} is {error:.1e} away from float64, at most {limit:.1e} is right"
    return None


def smallest(right: Mapping[str, Tensor]) -> float:
    """The size of a gradient below which it may be all rounding."""
    return SMALLEST * max(float(v.abs().max()) for name, v in right.items() if name != "loss")


def worst(errors: Mapping[str, float]) -> dict[str, Any]:
    """The error of the loss, and the largest of a gradient with its name."""
    name = max((name for name in errors if name != "loss"), key=errors.__getitem__)
    return {"loss": errors["loss"], "gradient": errors[name], "of": name}
