"""Rules that hold while torch.compile traces: OpOverload.py_impl, put in and taken out again.

The Python dispatcher, which is on while Dynamo and AOTAutograd trace and off in eager mode, asks
an operator's `py_kernels` before its C++ kernels. A norm's forward is entered there for autograd.
Under one level of torch.func.grad, or under none, it is the operator itself: its derivatives are
right at first and second order, and its graphs stay as they are. Under forward mode and from the
second level on it is a composition of primitives, which is right to any order.

py_kernels, _dispatch_cache, _op_dk and peek_interpreter_stack are private; they have these names in
torch 2.11, 2.13 and 2.15 (2.13 was run).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey
from torch._ops import resolve_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._ops import OpOverload

    Function = Callable[..., Any]

# Autograd is entered by device, because only then is it known which kernel the rule stands before.
_KEYS = tuple(
    getattr(DispatchKey, f"Autograd{device}")
    for device in ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1", "Meta")
)
_ABSENT: Any = object()


@dataclass
class AutogradRules:
    """The rules of one installation, with what was there before them."""

    ours: dict[tuple[OpOverload, DispatchKey], Function]
    before: dict[tuple[OpOverload, DispatchKey], Any]

    @classmethod
    def apply(cls, table: Mapping[OpOverload, Function]) -> AutogradRules:
        rules = cls({}, {})
        for op, composition in table.items():
            for key in _KEYS:
                rules.before[op, key] = op.py_kernels.get(key, _ABSENT)
                rules.ours[op, key] = _rule(composition, _own(op, key))
                op.py_kernels[key] = rules.ours[op, key]
            op._dispatch_cache.clear()
        return rules

    def revert(self) -> None:
        """Puts back what ours replaced; what somebody else put there since is theirs."""
        for (op, key), rule in self.ours.items():
            if op.py_kernels.get(key) is not rule:
                continue
            if self.before[op, key] is _ABSENT:
                del op.py_kernels[key]
            else:
                op.py_kernels[key] = self.before[op, key]
            op._dispatch_cache.clear()


def _own(op: OpOverload, key: DispatchKey) -> Function:
    """What the dispatcher would call: a rule of torch's own in Python, or a C++ kernel."""
    resolved = resolve_key(op, key)
    return op.py_kernels.get(resolved) or partial(op._op_dk, resolved)


def _rule(composition: Function, own: Function) -> Function:
    def rule(*args: Any, **kwargs: Any) -> Any:
        return (composition if needs_composition() else own)(*args, **kwargs)

    return rule


def needs_composition() -> bool:
    """Whether derivatives are asked for that the operator's own formulas do not give: any in
    forward mode, and those of more than one level.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    kinds = [i.key() for i in torch._C._functorch.get_interpreter_stack() or ()]
    transforms = torch._C._functorch.TransformType
    return transforms.Jvp in kinds or kinds.count(transforms.Grad) > 1
