"""Rules that hold in eager mode: torch.library's kernels before torch's own, put in and taken out.

Three kinds of entries, for register(eager=True):

    Autograd           A norm's forward: the operator itself, or under forward mode and from the
                       second level of torch.func.grad on a composition of primitives.
    Autograd           A norm's backward, where a graph of it is kept (create_graph): the operator
                       itself, whose derivative is ours. So a second order costs what it did, and a
                       third is right.
    FuncTorchBatched   Operators with a batching rule of ours, instead of functorch's.

An entry stands before torch's kernel for every device. That kernel is asked for first and called
from ours, through `torch.library.get_kernel` (from torch 2.10 on).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation import torch_internals as internals
from normpass.decomps.activation.kernels import batched, positional, with_constants
from normpass.decomps.activation.levels import in_forward_mode, in_transform, needs_composition_of
from normpass.decomps.registry import by_op
from normpass.decomps.table.traced import of_users

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from torch import Tensor

    from normpass.decomps.activation.torch_internals import DispatchKeySet, OpOverload
    from normpass.decomps.registry import Rule

    Function = Callable[..., Any]


@dataclass
class EagerRules:
    """The rules of one installation."""

    library: torch.library.Library

    @classmethod
    def apply(cls, without: Container[str] = ()) -> EagerRules:
        """without: parts that are left out (torch_internals)."""
        library = torch.library.Library("aten", "IMPL")
        rules = cls(library)
        try:
            with _quiet():
                theirs = {} if internals.NODES in without else of_users()
                for op, composition in by_op("autograd").items():
                    if op not in theirs:
                        library.impl(op, _forward(op, composition), "Autograd", with_keyset=True)
                for op, rule in by_op("double_backward").items():
                    # not the formulas, which are operators of ours
                    if op.namespace == "aten" and op not in theirs:
                        library.impl(op, _backward(op, rule), "Autograd", with_keyset=True)
                if internals.BATCHING not in without:
                    for op, rule in by_op("batching").items():
                        if op.namespace == "aten":
                            library.impl(op, batched(op, rule), "FuncTorchBatched")
                for op, kernel in theirs.items():
                    library.impl(op, kernel, "Autograd")
        except BaseException:
            rules.revert()
            raise
        return rules

    def revert(self) -> None:
        internals.destroy(self.library)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns once a process of kernels that replace others: here that is the purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        yield


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

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # The node has no forward mode, the operator has: it is decomposed there.
        if in_forward_mode() or in_transform() or not torch.is_grad_enabled():
            return own(keyset, *args, **kwargs)
        if not _requires_grad(args, kwargs):
            return own(keyset, *args, **kwargs)
        return node.apply(functools.partial(own, keyset), *positional(op, args, kwargs))

    return kernel


def _requires_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _differentiated(op: OpOverload, rule: Function) -> Any:
    """An autograd.Function: `own` forward, and a rule f(grads, *args) for the way back, whose own
    derivatives autograd finds in its primitives. Where nobody asks for those, torch's derivative of
    `own` is right too, and takes a third of the time.
    """
    names = [argument.name for argument in op._schema.arguments]

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, own: Function, *args: Any) -> Any:
            tensors = [value if isinstance(value, torch.Tensor) else None for value in args]
            ctx.rest = [None if isinstance(value, torch.Tensor) else value for value in args]
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)
            ctx.leaves = list(map(_leaf, args)) if _is_plain(tensors) else None
            if ctx.leaves is None:
                return own(*args)
            with torch.enable_grad():
                ctx.outs = own(*ctx.leaves)
            return tuple(out if out is None else out.detach() for out in ctx.outs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = zip(ctx.saved_tensors, ctx.rest, strict=True)
            args = [rest if tensor is None else tensor for tensor, rest in saved]
            if ctx.leaves is not None and not torch.is_grad_enabled() and not in_transform():
                return None, *_gradients(ctx.outs, ctx.leaves, grads, ctx.needs_input_grad[1:])
            needed = zip(names, ctx.needs_input_grad[1:], strict=True)
            found = rule(grads, *args, needs=[name for name, needs in needed if needs])
            return None, *map(found.get, names)

    Differentiated.__name__ = Differentiated.__qualname__ = f"{op._schema.name} with a derivative"
    return Differentiated


def _is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether torch computes with these in their own precision."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes in ({torch.float32}, {torch.float64})


def _leaf(value: Any) -> Any:
    """A tensor as the beginning of a graph of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _gradients(
    outs: Iterable[Tensor | None],
    leaves: Iterable[Any],
    grads: Iterable[Tensor | None],
    needed: Iterable[bool],
) -> list[Tensor | None]:
    """For each leaf its gradient, where it is needed."""
    needs = list(needed)
    pairs = zip(outs, grads, strict=True)
    given = [(out, g) for out, g in pairs if out is not None and g is not None]
    xs = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in given],
            xs,
            [g for _, g in given],
            retain_graph=True,
            allow_unused=True,
        )
        if given
        else [None] * len(xs)
    )
    return [next(found) if need else None for need in needs]
