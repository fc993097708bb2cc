"""Rules that hold in eager mode: torch.library's kernels before torch's own, put in and taken out.

Kinds of entries, for register(eager=True):

    Autograd           A norm's forward: the operator itself, or under forward mode and from the
                       second level of torch.func.grad on a composition of primitives.
    Autograd           A norm's backward, where a graph of it is kept (create_graph): the operator
                       itself, whose derivative is ours. So a second order costs what it did, and a
                       third is right.
    Autograd           An operator that is differentiated as its decomposition, where a derivative
                       may be asked for.
    FuncTorchBatched   Operators with a batching rule of ours: where a derivative of it may be asked
                       for, in halves, and where running statistics are written. Elsewhere, and that
                       is nearly everywhere, functorch's own rule: it is in C++.

An entry stands before torch's kernel for every device. That kernel is asked for first and called
from ours, through `torch.library.get_kernel` (from torch 2.10 on).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation import torch_internals as internals
from normpass.decomps.activation.kernels import (
    batched,
    positional,
    recorded,
    second_derivative,
    weighted,
    with_constants,
)
from normpass.decomps.activation.levels import may_be_differentiated, needs_composition_of
from normpass.decomps.norms.batch_spellings import VENDORS
from normpass.decomps.registry import by_op

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from normpass.decomps.activation.torch_internals import DispatchKeySet, OpOverload
    from normpass.decomps.registry import Rule

    Function = Callable[..., Any]


@dataclass
class EagerRules:
    """The rules of one installation."""

    library: torch.library.Library
    # C++ holds no reference to a kernel that it runs, and other threads may be in ours when they
    # are taken out: they are kept until the next installation is.
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def apply(cls, without: Container[str] = ()) -> EagerRules:
        """without: parts that are left out (torch_internals)."""
        library = torch.library.Library("aten", "IMPL")
        rules = cls(library)
        try:
            with _quiet():
                for op, kernel, key in _entries(without):
                    rules._enter(op, kernel, key)
        except BaseException:
            rules.revert()
            raise
        return rules

    def _enter(self, op: OpOverload, kernel: Function, key: str) -> None:
        self.library.impl(op, kernel, key, with_keyset=True)
        entered = "AutogradCPU" if key == "Autograd" else key
        self.kept.append(torch.library.get_kernel(op, entered))

    def revert(self) -> None:
        global _LAST
        internals.destroy(self.library)
        _LAST = self


_LAST: EagerRules | None = None


def _entries(without: Container[str]) -> Iterator[tuple[OpOverload, Function, str]]:
    """Operators, kernels and their keys; where somebody has a derivative of an operator of his, in
    place of ours.
    """
    theirs = _of_users(without)
    ours = {op: partial(_forward, op, rule) for op, rule in by_op("autograd").items()}
    for op, rule in by_op("double_backward").items():
        if op.namespace == "aten":  # not the formulas, which are operators of ours
            ours[op] = partial(_backward, op, rule)
    for op, composition in _taken_apart(without).items():
        ours[op] = partial(_if_differentiated, op, composition)
    for op, made in ours.items():
        if op not in theirs:
            yield op, made(), "Autograd"
    if internals.BATCHING not in without:
        for op, rule in by_op("batching").items():
            if op.namespace == "aten" and rule.eager:
                yield op, _batched(op, rule), "FuncTorchBatched"
    for op, kernel in theirs.items():
        yield op, _of_arguments(kernel), "Autograd"
    yield from _of_vendors()


def _of_vendors() -> Iterator[tuple[OpOverload, Function, str]]:
    for op, rule in [*by_op("autograd").items(), *by_op("decomposition").items()]:
        for key in _lacking(op):
            yield op, _of_arguments(rule.function), key


def _lacking(op: OpOverload) -> Iterator[str]:
    """The devices on which a vendor's batch norm has no kernel, or one that says that torch was
    built without the library.
    """
    library = op._schema.name.removeprefix("aten::").partition("_")[0]
    if library in VENDORS:
        if not internals.has_kernel(op.name(), "CPU"):
            yield "CPU"
        if not _has(library):
            yield "CUDA"


def _has(library: str) -> bool:
    if library == "miopen":
        return torch.version.hip is not None
    # A torch built for AMD says that cuDNN is there, and means MIOpen.
    return torch.version.cuda is not None and torch.backends.cudnn.is_available()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns once a process of kernels that replace others: here that is the purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        yield


def _of_users(without: Container[str]) -> dict[OpOverload, Function]:
    if internals.NODES in without:
        return {}
    from normpass.decomps.table.traced import of_users  # inherits what may be missing

    return of_users()


def _taken_apart(without: Container[str]) -> dict[OpOverload, Function]:
    if internals.NODES in without:
        return {}
    from normpass.decomps.table.traced import taken_apart  # inherits what may be missing

    return taken_apart()


def _if_differentiated(op: OpOverload, composition: Function) -> Function:
    own = _own(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if may_be_differentiated((*args, *kwargs.values())):
            return composition(*args, **kwargs)
        return own(keyset, *args, **kwargs)

    return kernel


def _of_arguments(kernel: Function) -> Function:
    return lambda _, *args, **kwargs: kernel(*args, **kwargs)


def _own(op: OpOverload) -> Function:
    # Autograd's kernels are generated once for all devices.
    return torch.library.get_kernel(op, "AutogradCPU").call_boxed


def _forward(op: OpOverload, composition: Rule) -> Function:
    own = _own(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if needs_composition_of((*args, *kwargs.values())):
            return with_constants(composition, composition(*args, **kwargs))
        return own(keyset, *args, **kwargs)

    return kernel


def _backward(op: OpOverload, rule: Function) -> Function:
    own = _own(op)
    node = _differentiated(op, rule)
    enter, given = second_derivative(op, rule), weighted(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not recorded():
            return own(keyset, *args, **kwargs)
        values = given(args, kwargs)
        if not _is_plain(values) and any(map(_requires_grad, values)):
            return node.apply(functools.partial(own, keyset), *values)
        outs = own(keyset, *values)
        enter(outs, values)
        return outs

    return kernel


def _batched(op: OpOverload, rule: Rule) -> Function:
    """functorch's own rule where it is right. It takes what a norm saved for constants, writes
    running statistics into copies, crashes without any in evaluation mode, and lets
    normalized_shape reach into the batch axis.
    """
    ours = batched(op, rule)
    own = _functorchs(op)
    is_right = _is_ordinary(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        values = positional(op, args, kwargs)
        if own is None or not is_right(values) or may_be_differentiated(values):
            return ours(*values)
        return own(keyset, *values)

    return kernel


def _is_ordinary(op: OpOverload) -> Callable[[Sequence[Any]], bool]:
    """Of a call's arguments: whether they have one precision, and the statistics are those of the
    examples themselves.
    """
    names = [argument.name for argument in op._schema.arguments]
    running = [n for n, name in enumerate(names) if name.startswith("running")]
    # Whether they are taken, and where they were kept.
    needed = [n for n, name in enumerate(names) if name.startswith(("train", "save_"))]
    inner = names.index("normalized_shape") if "normalized_shape" in names else None

    def check(values: Sequence[Any]) -> bool:
        return (
            _is_plain(values)
            and all(values[n] is None for n in running)
            and not any(values[n] is None or values[n] is False for n in needed)
            and (inner is None or values[0].dim() >= len(values[inner]))
        )

    return check


def _functorchs(op: OpOverload) -> Function | None:
    """functorch's own kernel, if it is a rule and no loop over examples."""
    if not internals.has_kernel(op.name(), "FuncTorchBatched"):
        return None
    return torch.library.get_kernel(op, "FuncTorchBatched").call_boxed


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_plain(values: Iterable[Any]) -> bool:
    """Whether torch computes with these in their own precision."""
    found = None
    for value in values:
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            if dtype is not found:
                if found is not None or dtype not in _PLAIN:
                    return False
                found = dtype
    return found is not None


_PLAIN = (torch.float32, torch.float64)


def _differentiated(op: OpOverload, rule: Function) -> Any:
    """An autograd.Function: `own` forward, and a rule f(grads, *args) for the way back, whose own
    derivatives autograd finds in its primitives. For halves, which the rule computes in float32.
    """
    names = [argument.name for argument in op._schema.arguments]

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, own: Function, *args: Any) -> Any:
            ctx.rest = [None if isinstance(value, torch.Tensor) else value for value in args]
            ctx.save_for_backward(*(v if isinstance(v, torch.Tensor) else None for v in args))
            ctx.set_materialize_grads(False)
            return own(*args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = zip(ctx.saved_tensors, ctx.rest, strict=True)
            args = [rest if tensor is None else tensor for tensor, rest in saved]
            needed = zip(names, ctx.needs_input_grad[1:], strict=True)
            found = rule(grads, *args, needs=[name for name, needs in needed if needs])
            return None, *map(found.get, names)

    Differentiated.__name__ = Differentiated.__qualname__ = f"{op._schema.name} with a derivative"
    return Differentiated
