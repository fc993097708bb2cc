"""Rules that hold while torch.compile traces: OpOverload.py_impl, put in and taken out again.

The Python dispatcher, which is on while Dynamo and AOTAutograd trace and off in eager mode, asks
an operator's `py_kernels` before its C++ kernels. Three keys get entries:

    Autograd<device>   A norm's forward. Under one level of torch.func.grad, or under none, it is
                       the operator itself: its derivatives are right at first and second order,
                       and its graphs stay as they are. Under forward mode and from the second level
                       on it is a composition of primitives, which is right to any order.
                       And operators whose derivatives are better by the table (table/traced.py).
                       A norm's backward, whose results get a derivative of ours where the tape is
                       to have one: torch.autograd.grad(create_graph=True) in what is traced.
                       Before either, what cuDNN's wrapper says of arguments that it refuses.
    FuncTorchBatched   Operators with a batching rule of ours, instead of functorch's.
    ZeroTensor         What fake tensors must see of tangents that are zero (zero_tensors.py), and,
                       at the mode that records a graph, what it has for them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation import torch_internals as internals
from normpass.decomps.activation.kernels import batched, checked, derived, widened
from normpass.decomps.activation.torch_internals import (
    FUNCTORCH_BATCHED,
    PYTHON,
    ZERO_TENSOR,
    DispatchKey,
    ProxyTorchDispatchMode,
    get_current_dispatch_mode,
    pop_mode_temporarily,
    resolve_key,
)
from normpass.decomps.norms.cudnn_checks import CHECKS
from normpass.decomps.registry import by_op
from normpass.decomps.zero_tensors import recorded as recorded_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from normpass.decomps.activation.kernels import Function
    from normpass.decomps.activation.torch_internals import OpOverload

# Autograd is entered by device, because only then is it known which kernel the rule stands before.
_DEVICES = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1", "Meta")
_efficientzerotensor = torch.ops.aten._efficientzerotensor.default
_ABSENT: Any = object()


@dataclass
class TracingRules:
    """The rules of one installation, with what was there before them."""

    ours: dict[tuple[OpOverload, Any], Function]
    before: dict[tuple[OpOverload, Any], Any]

    @classmethod
    def apply(cls, without: Container[str] = ()) -> TracingRules:
        """without: parts that are left out (torch_internals)."""
        _load_torchs_own()
        rules = cls({}, {})
        try:
            rules._enter_all(without)
        except BaseException:
            rules.revert()
            raise
        return rules

    def _enter_all(self, without: Container[str]) -> None:
        for op, kernel_before in _of_autograd(without).items():
            for key in _autograd_keys():
                self._enter(op, key, kernel_before(_own(op, key)))
        if internals.BATCHING not in without:
            for op, rule in by_op("batching").items():
                self._enter(op, FUNCTORCH_BATCHED, batched(op, rule))
        if internals.ZEROS not in without:
            for op, kernel in by_op("zero_tensor").items():
                self._enter(op, ZERO_TENSOR, kernel)
            self._enter(_efficientzerotensor, ProxyTorchDispatchMode, recorded_zero)

    def _enter(self, op: OpOverload, key: Any, function: Function) -> None:
        table = _table(op, key)
        self.before[op, key] = table.get(key, _ABSENT)
        self.ours[op, key] = function
        _change(op, key, function)

    def revert(self) -> None:
        """Puts back what ours replaced; what somebody else put there since is theirs."""
        global _LAST
        for (op, key), rule in self.ours.items():
            if _table(op, key).get(key) is rule:
                _change(op, key, self.before[op, key])
        _LAST = self


def _of_autograd(without: Container[str]) -> dict[OpOverload, Callable[[Function], Function]]:
    """Operators and, of what the dispatcher would call, the kernel that stands before it."""
    kernels: dict[OpOverload, Callable[[Function], Function]]
    kernels = {op: partial(derived, rule) for op, rule in by_op("autograd").items()}
    if internals.NODES not in without:
        from normpass.decomps.table import traced  # inherits what may be missing

        kernels |= traced.kernels()
    cudnn = torch.ops.aten.cudnn_batch_norm.default
    kernels[cudnn] = _composed(kernels[cudnn], widened)
    for op, check in CHECKS.items():
        kernels[op] = partial(checked, check, kernels.get(op, _as_it_is))
    return kernels


def _composed(
    outer: Callable[[Function], Function], inner: Callable[[Function], Function]
) -> Callable[[Function], Function]:
    return lambda own: outer(inner(own))


def _as_it_is(own: Function) -> Function:
    return own


# The rules that were taken out last: C++ holds no reference to the kernel that it is about to call.
_LAST: TracingRules | None = None


# --- tables that other threads read -------------------------------------------------------------

# Held for one entry, with nothing imported and nothing asked of torch meanwhile.
_CHANGING = threading.Lock()


class _Cache(dict[Any, Any]):
    """An operator's `_dispatch_cache` that takes nothing which is not so any more.

    A thread that traces looks up a kernel at its first call of a key, and enters it here a moment
    later. If the tables change between the two, a plain dictionary would hold the old kernel until
    somebody clears it. Once there it stays: the thread may be as late as it likes.
    """

    def __init__(self, op: OpOverload, entries: Any) -> None:
        super().__init__(entries)
        self.op = op
        self.changed: set[DispatchKey] = set()

    def __setitem__(self, key: DispatchKey, kernel: Any) -> None:
        with _CHANGING:
            self.put(key, _called(self.op, key) if key in self.changed else kernel)

    def put(self, key: DispatchKey, kernel: Any) -> None:
        if kernel is _ABSENT:
            self.pop(key, None)
        else:
            super().__setitem__(key, kernel)


def look_up_again(op: OpOverload) -> None:
    """For an operator whose kernels in torch.library have changed: the dispatcher would go on
    calling one that is gone.
    """
    with _CHANGING:
        cache = _cache(op)
        for key in list(cache):
            cache.changed.add(key)
            cache.put(key, _called(op, key))


def _cache(op: OpOverload) -> _Cache:
    cache = internals.dispatch_cache(op)
    if not isinstance(cache, _Cache):
        cache = _Cache(op, cache)
        internals.set_dispatch_cache(op, cache)
    return cache


def _change(op: OpOverload, key: Any, function: Any) -> None:
    """Enters a kernel, or with _ABSENT removes it, and at once what the dispatcher calls for it.

    The cache is not cleared: two threads that then looked up the same kernel would fail in torch.
    """
    table = _table(op, key)
    with _CHANGING:
        cache = _cache(op)
        if function is _ABSENT:
            del table[key]
        else:
            table[key] = function
        cached = key if isinstance(key, DispatchKey) else PYTHON
        cache.changed.add(cached)
        cache.put(cached, _called(op, cached))


def _called(op: OpOverload, key: DispatchKey) -> Any:
    """What the dispatcher is to call for a key: a kernel, or the key of one in C++."""
    if key == PYTHON:
        return _by_mode(op) if internals.kernels_by_mode(op) else key
    try:
        resolved = resolve_key(op, key)
    except NotImplementedError:
        return _ABSENT
    return internals.kernels_by_key(op).get(resolved, resolved)


def _by_mode(op: OpOverload) -> Function:
    """The operator under the mode that is on. torch's own function for this looks into the table
    twice, and fails if the kernel is taken out between the two.
    """
    below = internals.own_kernel(op, PYTHON)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        rule = internals.kernels_by_mode(op).get(type(get_current_dispatch_mode()))
        if rule is None:
            return below(*args, **kwargs)
        with pop_mode_temporarily() as mode:
            return rule(mode, *args, **kwargs)

    return kernel


# --- what was there -----------------------------------------------------------------------------


def _load_torchs_own() -> None:
    """Inductor's import enters rules of torch's own, for `_own` to find."""
    internals.find("torch._inductor.decomposition")


def _autograd_keys() -> list[DispatchKey]:
    keys = (getattr(DispatchKey, f"Autograd{device}", None) for device in _DEVICES)
    return [key for key in keys if key is not None]


def _table(op: OpOverload, key: Any) -> dict[Any, Any]:
    by_key = isinstance(key, DispatchKey)
    return internals.kernels_by_key(op) if by_key else internals.kernels_by_mode(op)


def _own(op: OpOverload, key: DispatchKey) -> Function:
    """What the dispatcher would call: a rule of torch's own in Python, or a C++ kernel."""
    resolved = resolve_key(op, key)
    return internals.kernels_by_key(op).get(resolved) or internals.own_kernel(op, resolved)
