"""The gradients of a compiled graph as a graph of their own, compiled when first asked for.

Private, checked on torch 2.11, 2.13 and 2.15: torch._guards.TracingContext, under which AOTAutograd
finds the fake tensors' mode; compile_lock of torch._dynamo.convert_frame; guards and frozen of
ShapeEnv.
"""

from __future__ import annotations

import contextlib
import logging
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

from normpass.backend.higher_order.kept import random_again
from normpass.backend.higher_order.program import Layout, Program, Pullback, record
from normpass.decomps.activation import registered
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from normpass.backend.higher_order.kept import State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Key:
    """What a program is compiled for: which inputs' gradients, which cotangents are on the tape,
    whether the result is, and how many cotangents there are at once (None: they are not batched).
    """

    wanted: tuple[int, ...]
    on_tape: tuple[bool, ...]
    higher: bool
    batch: int | None


@dataclass
class Derivatives:
    """The derivatives of one compiled graph, compiled when they are first asked for.

    compiled: the code, or why there is none.
    """

    program: Program
    layout: Layout
    compiled: dict[Key, Callable[..., Any] | Exception] = field(default_factory=dict)

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
        self,
        wanted: tuple[int, ...],
        inputs: Sequence[Any],
        cotangents: Sequence[Tensor],
        *,
        batched: bool = False,
        random: Sequence[State] | None = None,
    ) -> Sequence[Tensor | None]:
        """The gradients of the wanted inputs.

        batched: cotangents and gradients have one more axis in front. random: the states of the
        generators that the graph drew from, if it drew; uncompiled, it would draw other numbers.

        Raises:
            RuntimeError: if the graph draws and its derivative cannot be compiled.
        """
        higher = torch.is_grad_enabled()
        on_tape = tuple(higher and g.requires_grad for g in cotangents)
        key = Key(wanted, on_tape, higher, len(cotangents[0]) if batched and cotangents else None)
        code = self.code_for(key)
        if not isinstance(code, Exception):
            given = [
                _plain(g, torch.contiguous_format if batched else _format_of(like))
                for g, like in zip(cotangents, self.cotangents, strict=True)
            ]
            with random_again(random, inputs):
                found: Sequence[Tensor | None] = code(*inputs, *given)
            return found
        if random is None:
            uncompiled = Pullback(self.program, self.layout, wanted, batched=batched)
            return uncompiled(*inputs, *cotangents)
        if not batched:
            raise RuntimeError(
                "a further derivative of compiled code that draws random numbers: expected to "
                f"compile it too, which alone draws the same ones again; found {code}"
            ) from code
        rows = [
            self.pull_back(wanted, inputs, row, random=random)
            for row in zip(*cotangents, strict=True)
        ]
        return [
            torch.stack(column) if all(g is not None for g in column) else None
            for column in zip(*rows, strict=True)
        ]

    def code_for(self, key: Key) -> Callable[..., Any] | Exception:
        found = self.compiled.get(key)
        if found is None:
            with compile_lock:  # tracing is for one thread at a time
                found = self.compiled.get(key)
                if found is None:
                    found = self.compiled[key] = self.compile(key)
        return found

    def compile(self, key: Key) -> Callable[..., Any] | Exception:
        try:
            return self._compile(key)
        except _SomeSizesOnly as error:
            log.warning("a further derivative of compiled code runs uncompiled: %s", error)
            return error
        except Exception as error:
            faults.report("compiling a further derivative", "a graph", error, "It runs uncompiled")
            return error

    def _compile(self, key: Key) -> Callable[..., Any]:
        cotangents = self.cotangents
        if key.batch is not None:
            with self.fake_mode:
                cotangents = [g.new_empty(key.batch, *g.shape) for g in cotangents]
        examples = [
            *self.program.examples,
            *(g.detach().requires_grad_(on) for g, on in zip(cotangents, key.on_tape, strict=True)),
        ]
        batched = key.batch is not None
        graph = _calls(Pullback(self.program, self.layout, key.wanted, batched=batched), examples)
        grad_mode = torch.enable_grad if key.higher else torch.no_grad
        with contextlib.ExitStack() as stack:
            stack.enter_context(registered())
            stack.enter_context(grad_mode())
            stack.enter_context(tracing(TracingContext(self.fake_mode)))
            stack.enter_context(self.program.autocast.restored())
            stack.enter_context(_without_guards(self.fake_mode.shape_env))
            return self.program.compile(graph, examples)


class _SomeSizesOnly(RuntimeError):
    pass


@contextlib.contextmanager
def _without_guards(env: Any) -> Iterator[None]:
    """Raises _SomeSizesOnly if what is compiled in the block holds for some sizes only: Dynamo has
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
        raise _SomeSizesOnly(f"expected code for all sizes; found some for {', '.join(new)} only")


def _plain(g: Tensor, layout: torch.memory_format) -> Tensor:
    """A cotangent as compiled code reads it: in memory as it is, and as its example lies."""
    return g.resolve_conj().resolve_neg().contiguous(memory_format=layout)


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
