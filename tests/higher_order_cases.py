"""What tests of derivatives of compiled code share: numbers, and all derivatives up to an order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]


# Dynamo's own, where it looks at what it traces, and Inductor's, of what it calls.
IGNORED = [
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be"),
]


def compiled(function: Function, **options: Any) -> Function:
    options = {"inner": "eager", **options}
    return torch.compile(function, backend="normpass", options=options)


def numbers(*shape: int) -> Tensor:
    n = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(n * n + 0.5 * n).reshape(shape).requires_grad_()


X, W = numbers(3, 4), numbers(4, 4)


def results(function: Function, *args: Any) -> list[Tensor]:
    found = function(*args)
    found = found if isinstance(found, tuple | list) else [found]
    return [y for y in found if isinstance(y, Tensor) and y.requires_grad]


def weighted(values: list[Tensor]) -> Tensor:
    """A number of all of them, with a cotangent that is nowhere the same."""
    return sum(((y * numbers(*y.shape).detach()).sum() for y in values), torch.zeros(()))


def derivatives(function: Function, *args: Any, order: int = 2) -> list[Tensor | None]:
    """Of all inputs on the tape, all orders up to this one."""
    leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    values = results(function, *args)
    found: list[Tensor | None] = []
    for k in range(order):
        gradients = torch.autograd.grad(
            weighted(values), leaves, create_graph=k + 1 < order, allow_unused=True
        )
        found += gradients
        values = [torch.sin(g) for g in gradients if g is not None]
    return found


def assert_same(found: Any, right: Any) -> None:
    assert len(found) == len(right)
    for ours, want in zip(found, right, strict=True):
        assert (ours is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)


def model(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w), (4,)).sin()
