"""The gradients of a compiled graph as a graph of their own, compiled when first asked for.

Private, checked on torch 2.11, 2.13 and 2.15: torch._guards.TracingContext, under which AOTAutograd
finds the fake tensors' mode; compile_lock of torch._dynamo.convert_frame;
torch._dispatch.python.enable_python_dispatcher; torch.compiler._is_compiling_flag.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch.fx import Graph, GraphModule

from normpass.backend.higher_order import sizes
from normpass.backend.higher_order.kept import random_again
from normpass.backend.higher_order.program import Key, Layout, Program, Pullback, record
from normpass.backend.higher_order.sizes import SomeSizesOnly
from normpass.decomps.activation import registered
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from normpass.backend.higher_order.kept import State

log = logging.getLogger(__name__)
# As often as Dynamo compiles one frame.
MOST_SIZES = 8


@dataclass
class Derivatives:
    """The derivatives of one compiled graph, compiled when they are first asked for.

    forward: what compiles a forward that hands over. compiled: the code, or why there is none.
    by_sizes: those of one graph whose sizes vary, for each that came, where no code holds for all.
    has_warned: whether there was a warning that more came.
    """

    program: Program
    layout: Layout
    forward: Callable[[], Callable[..., Any] | None] = lambda: None
    compiled: dict[Key, Callable[..., Any] | Exception] = field(default_factory=dict)
    by_sizes: dict[Hashable, Derivatives] = field(default_factory=dict)
    has_warned: bool = False

    @cached_property
    def cotangents(self) -> list[Tensor]:
        """An example of each cotangent, as a fake tensor that lies as its result does.

        Raises:
            SomeSizesOnly: if they are known for some sizes only.
        """
        results = self._results
        with self.program.fake_mode:
            return [torch.empty_like(y, memory_format=_format_of(y)) for y in results]

    @cached_property
    def handed(self) -> list[Tensor]:
        """An example of each value that the forward hands over."""
        return [self._results[k].requires_grad_() for k in self.layout.handed]

    @cached_property
    def _results(self) -> list[Tensor]:
        # The graph may call autograd itself.
        with sizes.traced(self.program), torch.enable_grad():
            run = record(self.program, self.program.examples, self.layout)
            return [y.detach() for y in run.results]

    def pull_back(
        self,
        wanted: tuple[int, ...],
        inputs: Sequence[Any],
        cotangents: Sequence[Tensor | None],
        *,
        handed: Sequence[Tensor] = (),
        batched: bool = False,
        random: Sequence[State] | None = None,
    ) -> Sequence[Tensor | None]:
        """The gradients of the wanted inputs.

        cotangents: None for one that is zero. handed: what the forward has handed over. batched:
        cotangents and gradients have one more axis in front. random: the states of the generators
        that the graph drew from, if it drew; uncompiled, it would draw other numbers.

        Raises:
            RuntimeError: if the graph draws and its derivative cannot be compiled.
        """
        higher = torch.is_grad_enabled()
        there = [g for g in cotangents if g is not None]
        on_tape = tuple(None if g is None else higher and g.requires_grad for g in cotangents)
        key = Key(
            wanted,
            on_tape,
            higher,
            len(there[0]) if batched and there else None,
            random is not None,
        )
        if higher and not batched and random is None and (forward := self.forward()):
            # A call of before it was compiled: it runs once more.
            again = replace(self.program, code=forward)
            return Pullback(again, self.layout, key)(*inputs, *there)
        code = self.code_for(key)
        if isinstance(code, SomeSizesOnly) and (other := self.for_sizes_of(inputs)):
            return other.pull_back(
                wanted, inputs, cotangents, handed=handed, batched=batched, random=random
            )
        if not isinstance(code, Exception):
            given = [
                _plain(g, torch.contiguous_format if batched else _format_of(like))
                for g, like in zip(cotangents, self.cotangents, strict=True)
                if g is not None
            ]
            with random_again(random, inputs):
                found: Sequence[Tensor | None] = code(*inputs, *handed, *given)
            return found[: len(wanted)]
        if random is None:
            with _by_the_rules():
                return Pullback(self.program, self.layout, key)(*inputs, *handed, *there)
        if not batched:
            raise RuntimeError(
                "a further derivative of compiled code that draws random numbers: expected to "
                f"compile it too, which alone draws the same ones again; found {code}"
            ) from code
        rows = [
            self.pull_back(wanted, inputs, row, handed=handed, random=random)
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

    def for_sizes_of(self, inputs: Sequence[Any]) -> Derivatives | None:
        """Those of the same graph for the sizes of these inputs alone, up to MOST_SIZES."""
        known = sizes.of(inputs)
        with compile_lock:
            if known not in self.by_sizes:
                if len(self.by_sizes) == MOST_SIZES:
                    if not self.has_warned:
                        log.warning(
                            "a further derivative of compiled code runs uncompiled: a formula "
                            "takes sizes for known; expected at most %s of them, found more "
                            "(normpass why too-many-sizes)",
                            MOST_SIZES,
                        )
                    self.has_warned = True
                    return None
                program = sizes.known(self.program, inputs)
                self.by_sizes[known] = Derivatives(program, self.layout, self.forward)
            return self.by_sizes[known]

    def compile(self, key: Key) -> Callable[..., Any] | Exception:
        try:
            return self._compile(key)
        except SomeSizesOnly as error:
            log.info("a further derivative of compiled code is compiled for each size: %s", error)
            return error
        except NotImplementedError as error:  # eager mode has no such derivative either
            log.info("a further derivative of compiled code runs uncompiled: %s", error)
            return error
        except Exception as error:
            faults.report("compiling a further derivative", "a graph", error, "It runs uncompiled")
            return error

    def _compile(self, key: Key) -> Callable[..., Any]:
        cotangents = self.cotangents
        if key.batch is not None:
            with self.program.fake_mode:
                cotangents = [g.new_empty(key.batch, *g.shape) for g in cotangents]
        given = zip(cotangents, key.on_tape, strict=True)
        examples = [
            *self.program.examples,
            *self.handed,
            *(g.detach().requires_grad_(on) for g, on in given if on is not None),
        ]
        graph = _calls(Pullback(self.program, self.layout, key), examples)
        return compiled(self.program, graph, examples, higher=key.higher)


def compiled(
    program: Program, graph: GraphModule, examples: Sequence[Any], *, higher: bool
) -> Callable[..., Any]:
    """Compiles a graph for a program's derivatives, as the program itself was.

    higher: whether its results are on the tape.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_is_compiling())
        stack.enter_context(registered())
        stack.enter_context(torch.set_grad_enabled(higher))
        stack.enter_context(tracing(TracingContext(program.fake_mode)))
        stack.enter_context(program.autocast.restored())
        stack.enter_context(sizes.without_guards(program.fake_mode.shape_env))
        return program.compile(graph, examples)


@contextlib.contextmanager
def _is_compiling() -> Iterator[None]:
    """A block in which torch.compiler.is_compiling() holds, as it does while Dynamo compiles: where
    it does not, a graph that one thread traces has compiled code that another one calls be refused,
    as if it were what is traced. Inside of compile_lock.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _by_the_rules() -> Iterator[None]:
    """A block in which what runs uncompiled has the derivatives that compiled code has: from the
    third order on eager mode's are wrong for norms. The rules are looked up in this thread alone.
    """
    with registered(), enable_python_dispatcher():
        yield


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
    each = [graph.call_function(operator.getitem, (call, i)) for i in range(pullback.results)]
    graph.output(tuple(each))
    return GraphModule(torch.nn.Module(), graph)
