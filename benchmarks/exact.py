"""What comparing with float64 takes: float64 throughout, and no random numbers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class InDouble(TorchFunctionMode):
    """float64 wherever a program asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [_in_double(each) for each in args]
        return func(*args, **{name: _in_double(each) for name, each in (kwargs or {}).items()})


def _in_double(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def in_double() -> Iterator[None]:
    """Models compute in float64 what they compute in float32 whatever they are given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout in the block: that of nn.Dropout, and what modules read from attributes of theirs
    or of their configuration and hand to a function, such as `attention_dropout`.
    """
    changed: list[tuple[dict[str, Any], str, float]] = []
    for module in model.modules():
        owners = [vars(module), getattr(getattr(module, "config", None), "__dict__", {})]
        for owner in owners:
            for name, value in owner.items():
                dropout = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
                if dropout and isinstance(value, float) and value:
                    changed.append((owner, name, value))
    for owner, name, _ in changed:
        owner[name] = 0.0
    try:
        yield
    finally:
        for owner, name, value in changed:
            owner[name] = value
