"""Right or wrong: what a variant returns against float64, computed from primitives.

The reference is computed in parts along the axis that a norm shares nothing along, so that float64
needs room for a part of the tensors and for the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normpass.benchmarks.gpu_cases import DTYPES, VMAPPED
from normpass.benchmarks.measure import relative_errors, verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.benchmarks.gpu_cases import GpuCase

    Tensors = Mapping[str, Tensor]

# Elements of a part. A double backward holds some forty tensors of them in float64.
PART = 2**24
ROOMY = ("x", "dy", "ddx")


def reference(case: GpuCase, tensors: Tensors) -> dict[str, Tensor]:
    """The outputs of a case's program in float64, by name."""
    if case.phase != "vmapped":
        return _in_parts(case, tensors)
    examples = [
        _in_parts(case, {**tensors, "x": x, "dy": dy})
        for x, dy in zip(*(tensors[name].chunk(VMAPPED) for name in ("x", "dy")), strict=True)
    ]
    return {name: torch.stack([each[name] for each in examples]) for name in case.outputs}


def _in_parts(case: GpuCase, tensors: Tensors) -> dict[str, Tensor]:
    """Parts side by side again; gradients of parameters that the parts share are added up."""
    apart, spec = case.spec.apart, case.spec
    shared = apart != spec.channels
    found = [_of_part(case, part) for part in _parts(case, tensors)]
    joined = {}
    for name in case.outputs:
        values = [each[name] for each in found]
        if values[0].dim() == 1 and shared:
            joined[name] = torch.stack(values).sum(0)
        else:
            joined[name] = torch.cat(values, apart if values[0].dim() > 1 else 0)
    return joined


def _parts(case: GpuCase, tensors: Tensors) -> Iterator[dict[str, Tensor]]:
    x, apart = tensors["x"], case.spec.apart
    length = x.shape[apart]
    each = max(1, min(length, PART * length // max(1, x.numel())))
    for start in range(0, length, each):
        count = min(each, length - start)
        yield {
            name: value.narrow(apart, start, count)
            if name in ROOMY
            else (value.narrow(0, start, count) if apart == case.spec.channels else value)
            for name, value in tensors.items()
        }


def _of_part(case: GpuCase, tensors: Tensors) -> dict[str, Tensor]:
    """The outputs of one part, or of one example."""
    wide = {name: value.detach().double() for name, value in tensors.items()}
    inputs = [wide[name].requires_grad_() for name in ("x", "weight", "bias") if name in wide]
    y = case.spec.reference(*inputs)
    if case.phase == "forward":
        return {"y": y.detach()}
    dy = wide["dy"].requires_grad_()
    twice = case.phase == "double backward"
    gradients = torch.autograd.grad(y, inputs, dy, create_graph=twice)
    if twice:
        gradients = torch.autograd.grad(gradients[0], [inputs[0], dy, inputs[1]], wide["ddx"])
    values = (y.detach(), *gradients) if case.phase == "both" else gradients
    return dict(zip(case.outputs, values, strict=True))


def errors_of(
    case: GpuCase, outputs: Sequence[Tensor], right: Mapping[str, Tensor]
) -> dict[str, float]:
    """max |got - right| / max |right|, by name; infinite where one is not finite or misshapen."""
    named = dict(zip(case.outputs, outputs, strict=True))
    return relative_errors(named, right)


def wrong(
    case: GpuCase,
    errors: Mapping[str, float],
    eager: Mapping[str, float] | None,
    right: Mapping[str, Tensor],
) -> str | None:
    """Why outputs are wrong, None when they are right: judged by eager's error as all the
    benchmarks do, or, where eager could not do the case, by rounding alone.
    """
    sized = {**right, "y": torch.empty(case.shape, device="meta")}
    return verdict(errors, eager or dict.fromkeys(errors, 0.0), sized, DTYPES[case.dtype])


def poison(like: Tensor) -> None:
    """Leaves NaN in memory that is given out next, so that what is not written is seen."""
    for _ in range(2):
        torch.full_like(like, torch.nan)
