"""Rules that hold while torch.compile traces: OpOverload.py_impl, put in and taken out again.

The Python dispatcher, which is on while Dynamo and AOTAutograd trace and off in eager mode, asks an
operator's `py_kernels` before its C++ kernels. A norm's forward is entered there for autograd: under
one level of torch.func.grad, or under none, it is the operator itself, whose derivatives are right
at first and second order and whose graphs stay as they are; under forward mode and from the second
level on it is the composition that its decomposition is, which is right to any order.

py_kernels, _dispatch_cache, _op_dk and peek_interpreter_stack are private; they have these names in
torch 2.11, 2.13 and 2.15 (2.13 was run).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._ops import OpOverload

    Function = Callable[..., Any]

_AUTOGRAD_KEYS = tuple(
    getattr(DispatchKey, f"Autograd{device}")
    for device in ("CPU", "CUDA", "XPU", "MPS", "HPU", "XLA", "PrivateUse1", "Meta", "Other")
    if hasattr(DispatchKey, f"Autograd{device}")
)
_ABSENT: Any = object()


@dataclass
class AutogradRules:
    """The rules of one installation, with what was there before them."""

    ours: dict[OpOverload, Function]
    before: dict[OpOverload, Any]

    @classmethod
    def apply(cls, table: Mapping[OpOverload, Function]) -> AutogradRules:
        ours, before = {}, {}
        for op, composition in table.items():
            before[op] = op.py_kernels.pop(DispatchKey.Autograd, _ABSENT)
            ours[op] = _rule(op, composition, before[op])
            op.py_kernels[DispatchKey.Autograd] = ours[op]
            op._dispatch_cache.clear()
        return cls(ours, before)

    def revert(self) -> None:
        """Puts back what ours replaced; what somebody else put there since is theirs."""
        for op, rule in self.ours.items():
            if op.py_kernels.get(DispatchKey.Autograd) is not rule:
                continue
            del op.py_kernels[DispatchKey.Autograd]
            if self.before[op] is not _ABSENT:
                op.py_kernels[DispatchKey.Autograd] = self.before[op]
            op._dispatch_cache.clear()


def _rule(op: OpOverload, composition: Function, before: Any) -> Function:
    def rule(*args: Any, **kwargs: Any) -> Any:
        if needs_composition():
            return composition(*args, **kwargs)
        if before is not _ABSENT:
            return before(*args, **kwargs)
        return op._op_dk(_autograd_key(args), *args, **kwargs)

    return rule


def needs_composition() -> bool:
    """Whether derivatives are asked for that the operator's own formulas do not give: any in forward
    mode, and those of more than one level.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    kinds = [i.key() for i in torch._C._functorch.get_interpreter_stack() or ()]
    transforms = torch._C._functorch.TransformType
    return transforms.Jvp in kinds or kinds.count(transforms.Grad) > 1


def _autograd_key(args: tuple[Any, ...]) -> DispatchKey:
    """The key under which the dispatcher would find the operator's own autograd kernel."""
    tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
    keys = [torch._C._dispatch_keys(tensor) for tensor in tensors]
    return next((key for key in _AUTOGRAD_KEYS if any(s.has(key) for s in keys)), DispatchKey.AutogradOther)
