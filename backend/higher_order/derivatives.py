"""The gradients of a compiled graph as a graph of their own, compiled when first asked for.

Private, checked on torch 2.11, 2.13 and 2.15: torch._guards.TracingContext, under which AOTAutograd
finds the fake tensors' mode; compile_lock of torch._dynamo.convert_frame; guards and frozen of
ShapeEnv.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule

from normpass.backend.higher_order.program import Layout, Program, Pullback, record
from normpass.decomps.activation import registered
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class Key:
    """What a program is compiled for: which inputs' gradients, which cotangents are on the tape,
    and whether the result is.
    """

    wanted: tuple[int, ...]
    on_tape: tuple[bool, ...]
    higher: bool


@dataclass
class Derivatives:
    """The derivatives of one compiled graph, compiled when they are first asked for."""

    program: Program
    layout: Layout
    compiled: dict[Key, Callable[..., Any]] = field(default_factory=dict)

    @cached_property
    def cotangents(self) -> list[Tensor]:
        """An example of each cotangent, as a fake tensor that lies as its result does."""
        with self.fake_mode, torch.no_grad():
            run = record(self.program, self.program.examples, self.layout)
            return [torch.empty_like(y.detach(), memory_format=_format_of(y)) for y in run.results]

    @cached_property
    def fake_mode(self) -> Any:
        """Dynamo's own, in which the examples were made."""
        return next(x.fake_mode for x in self.program.examples if isinstance(x, FakeTensor))

    def pull_back(
        self, wanted: tuple[int, ...], inputs: Sequence[Any], cotangents: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The gradients of the wanted inputs."""
        higher = torch.is_grad_enabled()
        key = Key(wanted, tuple(higher and g.requires_grad for g in cotangents), higher)
        given = [
            g.contiguous(memory_format=_format_of(like))
            for g, like in zip(cotangents, self.cotangents, strict=True)
        ]
        result: Sequence[Tensor | None] = self.callable_for(key)(*inputs, *given)
        return result

    def callable_for(self, key: Key) -> Callable[..., Any]:
        found = self.compiled.get(key)
        if found is None:
            with compile_lock:  # tracing is for one thread at a time
                found = self.compiled.get(key)
                if found is None:
                    found = self.compiled[key] = self.compile(key)
        return found

    def compile(self, key: Key) -> Callable[..., Any]:
        pullback = Pullback(self.program, self.layout, key.wanted)
        try:
            return self._compile(pullback, key)
        except Exception as error:
            faults.report(
                "compiling a second derivative", "a graph", error, "It runs in eager mode"
            )
            return pullback

    def _compile(self, pullback: Pullback, key: Key) -> Callable[..., Any]:
        cotangents = [
            g.detach().requires_grad_(on_tape)
            for g, on_tape in zip(self.cotangents, key.on_tape, strict=True)
        ]
        graph = _calls(pullback, [*self.program.examples, *cotangents])
        grad_mode = torch.enable_grad if key.higher else torch.no_grad
        with contextlib.ExitStack() as stack:
            stack.enter_context(registered())
            stack.enter_context(grad_mode())
            stack.enter_context(tracing(TracingContext(self.fake_mode)))
            stack.enter_context(self.program.autocast.restored())
            stack.enter_context(_without_guards(self.fake_mode.shape_env))
            return self.program.compile(graph, [*self.program.examples, *cotangents])


@contextlib.contextmanager
def _without_guards(env: Any) -> Iterator[None]:
    """Raises RuntimeError if what is compiled in the block holds for some sizes only: Dynamo has
    done with its guards, and would not notice other sizes.
    """
    if env is None:
        yield
        return
    before, frozen = len(env.guards), env.frozen
    env.frozen = False
    try:
        yield
    finally:
        env.frozen = frozen
    if new := [str(guard.expr) for guard in env.guards[before:]]:
        raise RuntimeError(f"expected code for all sizes; found some for {', '.join(new)} only")


def _format_of(x: Tensor) -> torch.memory_format:
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.ndim == dims and x.is_contiguous(memory_format=layout) and not x.is_contiguous():
            return layout
    return torch.contiguous_format


def _calls(pullback: Pullback, examples: Sequence[Any]) -> GraphModule:
    """A graph that does nothing but call it."""

    def gradients(*values: Any) -> tuple[Tensor | None, ...]:
        return pullback(*values)

    graph = Graph()
    inputs = []
    for i, example in enumerate(examples):
        inputs.append(graph.placeholder(f"input_{i}"))
        inputs[-1].meta["example_value"] = example
    call = graph.call_function(gradients, tuple(inputs))
    each = [graph.call_function(operator.getitem, (call, i)) for i in range(len(pullback.wanted))]
    graph.output(tuple(each))
    return GraphModule(torch.nn.Module(), graph)
