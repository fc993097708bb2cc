"""Rules that hold while torch.compile traces: OpOverload.py_impl, put in and taken out again.

The Python dispatcher, which is on while Dynamo and AOTAutograd trace and off in eager mode, asks
an operator's `py_kernels` before its C++ kernels. Three keys get entries:

    Autograd<device>   A norm's forward. Under one level of torch.func.grad, or under none, it is
                       the operator itself: its derivatives are right at first and second order,
                       and its graphs stay as they are. Under forward mode and from the second level
                       on it is a composition of primitives, which is right to any order.
    FuncTorchBatched   Operators with a batching rule of ours, instead of functorch's.
    ZeroTensor         What fake tensors must see of tangents that are zero (zero_tensors.py), and,
                       at the mode that records a graph, what it has for them.

py_kernels, python_key_table, _dispatch_cache and _op_dk are private; they have these names in torch
2.11, 2.13 and 2.15 (all three were run).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.decomposition  # enters torch's own rules, for `_own` to find
from torch._C import DispatchKey
from torch._ops import resolve_key
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from normpass.decomps.activation.kernels import batched, derived
from normpass.decomps.registry import by_op
from normpass.decomps.zero_tensors import recorded

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from normpass.decomps.activation.kernels import Function

    Key = DispatchKey | type[ProxyTorchDispatchMode]

# Autograd is entered by device, because only then is it known which kernel the rule stands before.
_KEYS = tuple(
    getattr(DispatchKey, f"Autograd{device}")
    for device in ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1", "Meta")
)
_efficientzerotensor = torch.ops.aten._efficientzerotensor.default
_ABSENT: Any = object()


@dataclass
class TracingRules:
    """The rules of one installation, with what was there before them."""

    ours: dict[tuple[OpOverload, Key], Function]
    before: dict[tuple[OpOverload, Key], Any]

    @classmethod
    def apply(cls) -> TracingRules:
        rules = cls({}, {})
        for op, composition in by_op("autograd").items():
            for key in _KEYS:
                rules._enter(op, key, derived(composition, _own(op, key)))
        for op, rule in by_op("batching").items():
            rules._enter(op, DispatchKey.FuncTorchBatched, batched(op, rule))
        for op, kernel in by_op("zero_tensor").items():
            rules._enter(op, DispatchKey.ZeroTensor, kernel)
        rules._enter(_efficientzerotensor, ProxyTorchDispatchMode, recorded)
        return rules

    def _enter(self, op: OpOverload, key: Key, function: Function) -> None:
        table = _table(op, key)
        self.before[op, key] = table.get(key, _ABSENT)
        self.ours[op, key] = table[key] = function
        op._dispatch_cache.clear()

    def revert(self) -> None:
        """Puts back what ours replaced; what somebody else put there since is theirs."""
        for (op, key), rule in self.ours.items():
            table = _table(op, key)
            if table.get(key) is not rule:
                continue
            if self.before[op, key] is _ABSENT:
                del table[key]
            else:
                table[key] = self.before[op, key]
            op._dispatch_cache.clear()


def _table(op: OpOverload, key: Key) -> dict[Any, Any]:
    return op.py_kernels if isinstance(key, DispatchKey) else op.python_key_table


def _own(op: OpOverload, key: DispatchKey) -> Function:
    """What the dispatcher would call: a rule of torch's own in Python, or a C++ kernel."""
    resolved = resolve_key(op, key)
    return op.py_kernels.get(resolved) or partial(op._op_dk, resolved)
