"""Rules that hold while torch.compile traces: OpOverload.py_impl, put in and taken out again.

The Python dispatcher, which is on while Dynamo and AOTAutograd trace and off in eager mode, asks
an operator's `py_kernels` before its C++ kernels. Two keys get entries:

    Autograd<device>   A norm's forward. Under one level of torch.func.grad, or under none, it is
                       the operator itself: its derivatives are right at first and second order,
                       and its graphs stay as they are. Under forward mode and from the second level
                       on it is a composition of primitives, which is right to any order.
    FuncTorchBatched   Operators with a batching rule of ours, instead of functorch's.

py_kernels, _dispatch_cache, _op_dk and the interpreter stack of torch.func are private; they have
these names in torch 2.11, 2.13 and 2.15 (2.13 was run).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.decomposition  # enters torch's own rules, for `_own` to find
from torch._C import DispatchKey, _functorch
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._ops import resolve_key
from torch.utils._pytree import tree_flatten, tree_unflatten

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
class TracingRules:
    """The rules of one installation, with what was there before them."""

    ours: dict[tuple[OpOverload, DispatchKey], Function]
    before: dict[tuple[OpOverload, DispatchKey], Any]

    @classmethod
    def apply(
        cls,
        compositions: Mapping[OpOverload, Function],
        batching: Mapping[OpOverload, Function],
    ) -> TracingRules:
        rules = cls({}, {})
        for op, composition in compositions.items():
            for key in _KEYS:
                rules._enter(op, key, _derived(composition, _own(op, key)))
        for op, rule in batching.items():
            rules._enter(op, DispatchKey.FuncTorchBatched, batched(rule))
        return rules

    def _enter(self, op: OpOverload, key: DispatchKey, function: Function) -> None:
        self.before[op, key] = op.py_kernels.get(key, _ABSENT)
        self.ours[op, key] = op.py_kernels[key] = function
        op._dispatch_cache.clear()

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


def _derived(composition: Function, own: Function) -> Function:
    def derived(*args: Any, **kwargs: Any) -> Any:
        return (composition if needs_composition() else own)(*args, **kwargs)

    return derived


def needs_composition() -> bool:
    """Whether derivatives are asked for that the operator's own formulas do not give: any in
    forward mode, and those of more than one level.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if _functorch.peek_interpreter_stack() is None:
        return False
    kinds = [i.key() for i in _functorch.get_interpreter_stack() or ()]
    transforms = _functorch.TransformType
    return transforms.Jvp in kinds or kinds.count(transforms.Grad) > 1


def batched(rule: Function) -> Function:
    """A kernel for FuncTorchBatched from a batching rule f(info, in_dims, *args).

    Tensors of the current level of vmap are unwrapped and results wrapped again. The body runs with
    this key excluded, not below the level: so autograd and outer levels still see what it does.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        values, spec = tree_flatten(args)
        pairs = [_unwrap(value, level) for value in values]
        plain = tree_unflatten([value for value, _ in pairs], spec)
        in_dims = tree_unflatten([dim for _, dim in pairs], spec)
        info = VmapInfo(batch_size=interpreter.batch_size(), randomness=interpreter.randomness())
        excluded = torch._C.DispatchKeySet(DispatchKey.FuncTorchBatched)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            outs, out_dims = rule(info, in_dims, *plain, **kwargs)
        if not isinstance(outs, tuple):  # one result, as register_vmap has it
            return _wrap(outs, out_dims, level)
        return tuple(_wrap(out, dim, level) for out, dim in zip(outs, out_dims, strict=True))

    return kernel


def _wrap(out: Any, dim: int | None, level: int) -> Any:
    return out if dim is None else _functorch._add_batch_dim(out, dim, level)


def _unwrap(value: Any, level: int) -> tuple[Any, int | None]:
    """A value below a level of vmap, and its batch dimension there."""
    is_ours = isinstance(value, torch.Tensor) and _functorch.maybe_get_level(value) == level
    if not is_ours or not _functorch.is_batchedtensor(value):
        return value, None
    return _functorch.get_unwrapped(value), _functorch.maybe_get_bdim(value)
