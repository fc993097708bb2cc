"""The memory of one step, as it is measured: bytes alive over the forward and the backward, with
normpass and with stock Inductor, and what each keeps from the one for the other.

What is alive before the step (parameters, arguments) is not counted. Uses of private interfaces
here (the profiler's kineto_results) were checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.explain import stock
from normpass.backend.explain.listing import Line, listing
from normpass.backend.explain.norm_modules import canonical
from normpass.backend.explain.words import failure
from normpass.passes.names import is_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.fx import GraphModule

    from normpass.backend.explain.running import Step

FORWARD, BACKWARD = "normpass.explain: forward", "normpass.explain: backward"


@dataclass(frozen=True)
class Timeline:
    """Bytes alive above what was alive before. forward, backward: (when, bytes) after every change,
    when from 0 to 1, the beginning and the end of the phase. A phase that was not run is empty.
    """

    forward: tuple[tuple[float, int], ...]
    backward: tuple[tuple[float, int], ...]

    @property
    def peak(self) -> int:
        return max((alive for _, alive in (*self.forward, *self.backward)), default=0)

    @property
    def after_forward(self) -> int:
        return self.forward[-1][1] if self.forward else 0


@dataclass(frozen=True)
class Saved:
    """A tensor that the forward keeps for the backward. name: of its node; of what it is a view of,
    if it is one. type: dtype[shape]. module: a dotted path, or file:line. nbytes: what it takes.
    is_input: whether it is an argument or a parameter, which is there anyway.
    """

    name: str
    type: str
    module: str
    nbytes: int
    is_input: bool


@dataclass(frozen=True)
class Side:
    """One compiler's memory."""

    timeline: Timeline
    saved: tuple[Saved, ...]

    @property
    def saved_bytes(self) -> int:
        """Without what is there anyway."""
        return sum(tensor.nbytes for tensor in self.saved if not tensor.is_input)


@dataclass(frozen=True)
class Memory:
    """A step's memory with normpass and with stock Inductor."""

    ours: Side
    stock: Side


Graphs = list[tuple[str, "Sequence[Line]"]]


def measured(
    ours: Step,
    graphs: Graphs,
    again: Callable[[Callable[..., Any]], Step],
    settings: Mapping[str, Any],
    path_of: Mapping[int, str],
) -> Memory | str:
    """The memory of a step, or why it could not be measured.

    ours: has been run once. graphs: its forward and backward graphs, (phase, lines). again: the
    step with another backend. settings: of torch._inductor.config, for both. path_of: a module's
    path, by its id.
    """
    try:
        mine = Side(timeline(ours), tuple(saved(graphs)))
        stock_graphs: Graphs = []
        other = again(_recording(stock_graphs, settings, path_of))
        other.backward(other.forward())
        return Memory(mine, Side(timeline(other), tuple(saved(stock_graphs))))
    except Exception as error:  # of whatever kind: the report is there without
        return failure(error)


def _recording(
    seen: Graphs, settings: Mapping[str, Any], path_of: Mapping[int, str]
) -> Callable[..., Any]:
    """Stock Inductor as a backend that notes its graphs."""
    from torch._inductor.compile_fx import compile_fx_inner

    def inner(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = "backward" if is_backward(graph.graph) else "forward"
        seen.append((phase, listing(graph.graph)))
        return compile_fx_inner(graph, inputs, **kwargs)

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for _ in canonical(graph.graph, path_of):
            pass  # it rewrites as it goes
        return stock.compiled(graph, inputs, settings, inner)

    return backend


# ---- what is alive


def timeline(step: Step) -> Timeline:
    """Runs a step that was run before, and takes down what is alive."""
    cotangents = [torch.randn_like(y) for y in step.ends(step.forward())]
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # what is freed is freed by the step
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            with torch.profiler.record_function(FORWARD):
                outputs = step.forward()
            with torch.profiler.record_function(BACKWARD):
                step.backward(outputs, cotangents)
    finally:
        if collecting:
            gc.enable()
    assert profile.profiler is not None
    results: Any = profile.profiler.kineto_results
    return _timeline(list(results.events()))


def _timeline(events: Sequence[Any]) -> Timeline:
    changes = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    on_gpu = [e for e in changes if "CUDA" in str(e.device_type())]
    changes = on_gpu or changes
    alive = list(accumulate(e.nbytes() for e in changes))
    spans = {e.name(): e for e in events if e.name() in (FORWARD, BACKWARD)}
    turn = spans[BACKWARD].start_ns()
    points = [(e.start_ns(), count) for e, count in zip(changes, alive, strict=True)]
    first = [(when, count) for when, count in points if when < turn]
    second = [(when, count) for when, count in points if when >= turn]
    start, end = spans[FORWARD].start_ns(), turn + spans[BACKWARD].duration_ns()
    return Timeline(tuple(_within(first, start, turn)), tuple(_within(second, turn, end)))


def _within(points: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[float, int]]:
    for when, alive in points:
        yield min(1.0, max(0.0, (when - start) / max(1, end - start))), alive


# ---- what is kept


def saved(graphs: Graphs) -> Iterator[Saved]:
    """The tensors that backward graphs take from forward graphs, each storage once."""
    forwards = [lines for phase, lines in graphs if phase == "forward"]
    for phase, lines in graphs:
        if phase == "backward":
            taken = [line for line in lines if line.kind == "placeholder" and line.nbytes]
            taken = [line for line in taken if "tangents" not in line.name]
            # The backward of what was traced last is compiled first.
            for forward in reversed(forwards):
                made = {line.name: line for line in forward}
                if all(line.name in made and made[line.name].type == line.type for line in taken):
                    forwards.remove(forward)
                    yield from _kept(taken, made)
                    break


def _kept(taken: Sequence[Line], made: Mapping[str, Line]) -> Iterator[Saved]:
    bases = dict.fromkeys(made[line.name].base for line in taken)
    for base in (made[name] for name in bases):
        is_input = base.kind == "placeholder"
        yield Saved(base.name, base.type, base.place, base.nbytes, is_input)
