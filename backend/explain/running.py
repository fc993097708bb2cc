"""Running a function forward and backward beside all that its user does: compiled afresh, with
copies of tensors, and with random generators put back.

Uses of private interfaces here (clone_input, the cache settings, the limits of recompilation) were
checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from normpass.backend.explain.norm_modules import paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


@contextmanager
def apart(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What to call a function with meanwhile: copies of its arguments. Buffers are copies too, and
    nothing that is compiled comes from a cache or goes there.
    """
    from torch._functorch import config as functorch_config

    modules = [m for m in pytree.tree_leaves((fn, args, dict(kwargs))) if isinstance(m, nn.Module)]
    modules += list(paths(fn, args, kwargs).values())
    with ExitStack() as stack:
        stack.enter_context(_random_state(args, kwargs, modules))
        stack.enter_context(_buffers_aside(modules))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(_without_limit())
        yield _copies((tuple(args), dict(kwargs)))


# ---- compiling


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _compiled(backend: Callable[..., Any]) -> Callable[..., Any]:
    """`_call` compiled afresh, beside everything compiled before.

    Dynamo keeps what it compiled with the code object of a frame. A copy of `_call` has one of its
    own, which goes when it goes. Where a graph breaks, frames of the user's are compiled themselves
    and keep an entry for this backend; torch 2.13 and later do not count it against the limit of
    recompilations of the user's own (for earlier ones see `_without_limit`).
    """
    call = FunctionType(_call.__code__.replace(), globals())
    # dynamic=False: shapes seen in an earlier call must not make this one's dynamic. Those that
    # are marked (torch._dynamo.mark_dynamic) stay so.
    keywords: dict[str, Any] = {"backend": backend, "dynamic": False}
    if _can_isolate():
        keywords["isolate_recompiles"] = True
    return torch.compile(call, **keywords)


def _can_isolate() -> bool:
    return "isolate_recompiles" in signature(torch.compile).parameters


def _without_limit() -> AbstractContextManager[Any]:
    """Explains a function however often it was compiled and explained before. The entries of
    explanations still count when the user's own is compiled again.
    """
    if _can_isolate():
        return nullcontext()
    return torch._dynamo.config.patch(
        recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize
    )


# ---- running


@dataclass
class Step:
    """A function compiled with a backend, and one forward and backward of it after the other."""

    compiled: Callable[..., Any]
    since: int = 0

    @classmethod
    def of(cls, fn: Callable[..., Any], arguments: Any, backend: Callable[..., Any]) -> Step:
        """arguments: positional ones and those by name, from `apart`."""
        compiled = _compiled(backend)
        return cls(lambda: compiled(fn, *arguments))

    def forward(self) -> list[Tensor]:
        """All tensors among the results."""
        self.since = _now()
        return list(_tensors(self.compiled(), set()))

    def backward(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor] = ()) -> bool:
        """Runs backward from all outputs that require a gradient, through all that was recorded
        since their forward; whether there was anything.

        cotangents: of `ends(outputs)`; random ones where there are none.
        """
        ends = self.ends(outputs)
        edges = _edges_behind(ends, self.since)
        if not edges:
            return False
        cotangents = cotangents or [torch.randn_like(y) for y in ends]
        # Named edges, because then nothing is added to a `.grad` and no graph of the caller's is
        # entered.
        torch.autograd.grad(ends, edges, cotangents, allow_unused=True)
        return True

    @staticmethod
    def ends(outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that a backward starts from."""
        return [y for y in outputs if y.requires_grad and (y.is_floating_point() or y.is_complex())]


def _edges_behind(outputs: Sequence[Tensor], since: int) -> list[GradientEdge]:
    """Where a backward from these outputs comes to leaves, or to what was recorded before."""
    edges: dict[tuple[Any, int], None] = {}
    seen: set[Any] = set()
    stack = [y.grad_fn for y in outputs if y.grad_fn is not None and not _is_end(y.grad_fn, since)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for parent, index in node.next_functions:
            if parent is None:
                continue
            if _is_end(parent, since):
                edges[parent, index] = None
            else:
                stack.append(parent)
    return [GradientEdge(*edge) for edge in edges]


def _is_end(node: Any, since: int) -> bool:
    return hasattr(node, "variable") or node._sequence_nr() < since


def _now() -> int:
    """The number that autograd gives to what it records next, at the earliest."""
    with torch.inference_mode(False), torch.enable_grad():
        mark = torch.zeros((), requires_grad=True).neg()
    assert mark.grad_fn is not None
    return int(mark.grad_fn._sequence_nr())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in any structure: containers, dataclasses, and objects with attributes."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, nn.Module | type | FunctionType):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inside = [getattr(value, name, None) for name in slots]
        inside += list(getattr(value, "__dict__", {}).values())
    for item in inside:
        yield from _tensors(item, seen)


def _copies(structure: Any) -> Any:
    """Plain tensors become copies of the same layout, leaves of their own; all else stays."""
    from torch._dynamo.utils import clone_input

    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter):
            return value
        if id(value) not in copies:
            twin = clone_input(value)
            twin.grad = None
            copies[id(value)] = twin.requires_grad_(value.requires_grad)
        return copies[id(value)]

    return pytree.tree_map(copy, structure)


@contextmanager
def _buffers_aside(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules have copies of their buffers meanwhile."""
    every = {id(m): m for module in modules for m in module.modules()}
    kept = [(module, dict(module._buffers)) for module in every.values()]
    copies: dict[int, Tensor] = {}
    try:
        for module, buffers in kept:
            for name, buffer in buffers.items():
                if buffer is not None:
                    if id(buffer) not in copies:
                        twin = buffer.detach().clone()
                        copies[id(buffer)] = twin.requires_grad_(buffer.requires_grad)
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, buffers in kept:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def _random_state(
    args: Sequence[Any], kwargs: Mapping[str, Any], modules: Sequence[nn.Module]
) -> Iterator[None]:
    """Puts the random generators back that the run may have used."""
    tensors = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, Tensor)]
    tensors += [p for module in modules for p in module.parameters()]
    devices = sorted({x.device.index or 0 for x in tensors if x.is_cuda})
    state = random.getstate()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
