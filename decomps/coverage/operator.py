"""What there is of an operator: rules of normpass and of users, decompositions of PyTorch's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps import registry
from normpass.decomps.activation.torch_internals import (
    DispatchKey,
    OpOverload,
    OpOverloadPacket,
    inductor_decompositions,
)
from normpass.decomps.table.rows import row_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def named(name: str) -> list[OpOverload]:
    """Of "aten.mul" all overloads, of "aten.mul.Tensor" this one; "aten::mul" is spelled so too.

    Raises ValueError where there is no such operator.
    """
    found: Any = torch.ops
    for part in name.replace("::", ".").split("."):
        found = getattr(found, part, None)
    if isinstance(found, OpOverloadPacket):
        every = [getattr(found, overload) for overload in found.overloads()]
        return [op for op in every if _has_kernels(op)]
    if not isinstance(found, OpOverload):
        raise ValueError(f"expected an operator, such as aten.renorm; found {name!r}")
    return [found]


def _has_kernels(op: OpOverload) -> bool:
    """Some overloads are of TorchScript alone, such as the sum of two lists."""
    try:
        op.has_kernel_for_dispatch_key(DispatchKey.CPU)
    except RuntimeError:
        return False
    return True


def of_operator(op: OpOverload) -> Iterator[tuple[str, str]]:
    """What it is, and where: file:line, or module and function.

    A decomposition of normpass's stands before one of Inductor's while normpass compiles. The
    derivative that normpass.vjp has is used where derivatives are asked of it, and in compiled code
    where decomps/table/traced.py says so.
    """
    for rule in registry.rules():
        if rule.op is op:
            yield f"{rule.kind}, normpass", rule.place
    if (own := inductor_decompositions.get(op)) is not None:
        function = own.func if isinstance(own, partial) else own
        yield "decomposition, Inductor", f"{function.__module__}: {function.__qualname__}"
    try:
        row_of(op)
    except registry.UnknownRule:
        return
    yield "derivative, normpass.vjp", "derivatives.yaml and the formulas"
