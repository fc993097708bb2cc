"""The arguments of a formula as a row of derivatives.yaml gives them: within vjp(op) or jvp(op)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import table_calls
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normpass.decomps.registry import find_op
from normpass.decomps.table.binding import jvp, vjp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch._ops import OpOverload

    from normpass.decomps.registry import Rule


def operator_of(rule: Rule) -> OpOverload | None:
    """The operator whose row a formula is sampled in; None where the record has a function."""
    if not isinstance(rule.of, str):
        return None
    name, _, overload = rule.of.partition(".")
    op = find_op(f"aten.{name}.{overload or 'default'}")
    if op is None:
        raise ValueError(f"{rule.name} is said to be of {rule.of}, which this torch lacks")
    return op


# Operators of a Hermitian matrix, of which they read one triangle: their derivatives are those
# along Hermitian steps.
HERMITIAN = ("aten.linalg_cholesky_ex.default", "aten._linalg_eigh.default")


class _Call(TorchDispatchMode):
    """Notes the arguments of the first call of an operator."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.op = op
        self.args: dict[str, Any] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is self.op and self.args is None:
            names = [a.name for a in func._schema.arguments]
            defaults = {a.name: a.default_value for a in func._schema.arguments}
            self.args = {**defaults, **dict(zip(names, args, strict=False)), **(kwargs or {})}
        return func(*args, **(kwargs or {}))


def arguments(rule: Rule, operands: Mapping[str, Any]) -> dict[str, Any]:
    """What the row of an operator gives a formula, for these arguments of the operator and random
    gradients or tangents.
    """
    op = operator_of(rule)
    assert op is not None
    assert rule.op is not None
    call = table_calls.Call(op, operands)
    results = call.run(operands)
    with _Call(rule.op) as noted:
        if rule.kind == "jvp":
            tangents = {n: _random(operands[n]) for n in call.row.differentiable}
            jvp(op)(tangents, operands, results)
        else:
            vjp(op)(tuple(map(_random, results)), operands, results)
    if noted.args is None:
        raise ValueError(f"the row of {rule.of} does not call {rule.name}")
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), noted.args)


def _random(value: Any) -> Any:
    """Of a result or an argument: a gradient or a tangent for each tensor that has one."""
    return tree_map_only(
        torch.Tensor, lambda t: torch.randn_like(t) if table_calls.is_number(t) else None, value
    )


def check(rule: Rule, operands: Mapping[str, Any]) -> None:
    """The row that calls a formula against PyTorch's, if that has a derivative, and against
    differences of the operator.
    """
    op = operator_of(rule)
    assert op is not None
    call = table_calls.Call(op, operands)
    checked = table_calls.check_jvp if rule.kind == "jvp" else table_calls.check_vjp
    verdict = checked(call)
    # A backward's results are no function of its arguments: there PyTorch alone can tell.
    has_differences = rule.kind != "double_backward"
    unknown = [table_calls.NOT_COUNTED] if has_differences else []
    assert verdict in (table_calls.RIGHT, *unknown), f"{call}: {verdict}"
    if has_differences:
        _check_differences(rule, call)


def _check_differences(rule: Rule, call: table_calls.Call) -> None:
    operands, h = dict(call.args), 1e-5
    results = call.run(operands)
    steps = {n: _random(operands[n]) for n in call.row.differentiable}
    if str(call.op) in HERMITIAN:
        steps = {n: step + step.mH for n, step in steps.items()}

    def moved(sign: int) -> list[Any]:
        at = {n: _along(operands[n], step, sign * h) for n, step in steps.items()}
        return tree_leaves(call.run({**operands, **at}))

    change = [
        (a - b) / (2 * h) if table_calls.is_number(a) else None
        for a, b in zip(moved(1), moved(-1), strict=True)
    ]
    if rule.kind == "jvp":
        found = tree_leaves(jvp(call.op)(steps, operands, results))
        for f, c in zip(found, change, strict=True):
            if f is not None:
                assert_close(f, c, rtol=1e-6, atol=1e-7)
        return
    constant = call.row.is_constant(call.row.known(operands, results))
    grads = tuple(None if none else _random(y) for y, none in zip(results, constant, strict=True))
    gradients = vjp(call.op)(grads, operands, results)
    pairs = [(gradients[n], steps[n]) for n in gradients]
    found = _paired([g for g, _ in pairs], [s for _, s in pairs])
    assert_close(found, _paired(list(grads), change), rtol=1e-6, atol=1e-7)


def _along(value: Any, step: Any, h: float) -> Any:
    left = iter(tree_leaves(step))

    def move(t: Tensor) -> Tensor:
        s = next(left)
        return t if s is None else t + h * s

    return tree_map_only(torch.Tensor, move, value)


def _paired(gradients: list[Any], steps: list[Any]) -> Tensor:
    pairs = zip(tree_leaves(gradients), tree_leaves(steps), strict=True)
    return sum((g.conj() * s).sum().real for g, s in pairs if g is not None and s is not None)  # type: ignore[return-value]
