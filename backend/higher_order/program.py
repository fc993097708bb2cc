"""A compiled graph as a function that can be run again on a tape, and its gradients.

Private, checked on torch 2.11, 2.13 and 2.15: input_info, output_info and
mutated_inp_runtime_indices of the metadata that AOTAutograd keeps of a graph (ViewAndMutationMeta),
and OutputType; has_effects of torch._higher_order_ops.effects; a placeholder's
meta["example_value"] in Dynamo's graphs.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import has_effects
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Interpreter
from torch.nn import functional

from normpass.backend.higher_order import custom_functions
from normpass.backend.higher_order.handover import HANDED, Phase, WithGiven

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Graph, Node

    from normpass.backend.higher_order.handover import Handed

    Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


_set_grad_enabled = torch._C._set_grad_enabled


def _enables_grad(graph: Graph) -> bool:
    """Whether a graph records what it does, some of it, where its caller does not."""
    nodes = graph.find_nodes(op="call_function", target=_set_grad_enabled)
    return any(node.args[0] for node in nodes)


def _begin_without_grad(gm: GraphModule) -> None:
    """Has a graph whose caller does not record begin so, wherever it is run."""
    *_, last = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(last):
        gm.graph.call_function(_set_grad_enabled, (False,))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(_set_grad_enabled, (True,))
    gm.recompile()


@dataclass
class Program:
    """A graph that is being compiled, and how to compile its derivatives.

    graph: a copy of what Dynamo has handed over. examples: of each input, tensors as fake ones.
    compile: the backend, with the same options. handed: what it hands over to its derivatives.
    code: what runs in place of the graph.
    """

    graph: GraphModule
    examples: list[Any]
    compile: Compile
    autocast: Autocast
    handed: Handed | None = None
    code: Callable[..., Any] | None = None

    @classmethod
    def of(cls, graph: GraphModule, inputs: Sequence[Any], compile: Compile) -> Program | None:
        """None where nothing is differentiated, or where the examples of tensors are no fake ones:
        nothing could be traced later.
        """
        places = graph.graph.find_nodes(op="placeholder")
        examples = [n.meta.get("example_value", x) for n, x in zip(places, inputs, strict=True)]
        tensors = [x for x in examples if isinstance(x, Tensor)]
        if not any(x.requires_grad for x in tensors):
            return None
        if not (torch.is_grad_enabled() or _enables_grad(graph.graph)):
            return None
        if not all(isinstance(x, FakeTensor) for x in tensors):
            return None
        own = GraphModule(graph, copy.deepcopy(graph.graph))  # Inductor rewrites what it is given
        for node in own.graph.nodes:
            node.meta.pop("example_value", None)
        if not torch.is_grad_enabled():
            _begin_without_grad(own)
        own = custom_functions.differentiable(own)
        return cls(own, examples, compile, Autocast.now(), graph.meta.get(HANDED))

    @property
    def fake_mode(self) -> Any:
        """Dynamo's own, in which the examples were made."""
        return next(x.fake_mode for x in self.examples if isinstance(x, FakeTensor))

    def effect(self) -> str | None:
        """What the graph does beside computing: a print, a call of an object's method. That the
        solution of a linear system is checked is none.
        """
        for module in self.graph.modules():
            nodes = module.graph.nodes if isinstance(module, GraphModule) else ()
            for node in nodes:
                if has_effects(node.target):
                    return str(node.target)
        return None

    def run(
        self, inputs: Sequence[Any], given: Sequence[Tensor] = (), phase: Phase | None = None
    ) -> Sequence[Any]:
        """given: what the graph hands over, if that is known; phase: of its gradients."""
        run: Callable[..., Sequence[Any]] = self.code or Interpreter(self.graph).run
        if given and self.handed and phase:
            by_name = dict(zip(self.handed.names, given, strict=True))
            run = WithGiven(self.graph, by_name, phase).run
        with self.autocast.restored():
            return run(*inputs)


@dataclass(frozen=True)
class Autocast:
    """The state of autocast by device type: whether it is on and its dtype."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Autocast:
        kinds = ("cpu", "cuda")
        return cls(
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        )

    @contextlib.contextmanager
    def restored(self, *, off: bool = False) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                enabled = enabled and not off
                if enabled != torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


@dataclass(frozen=True)
class Returned:
    """One of the values that a compiled forward returns, if a gradient may come to it.

    place: among all that are returned. kind, index: the new value of an input, an output, or the
    tensor that an output is a view of.
    """

    place: int
    kind: str
    index: int


@dataclass(frozen=True)
class Layout:
    """What a compiled graph writes to and returns.

    inputs: how many there are. differentiable: those that require a gradient. written: those that
    it writes to. unread: those of them whose value before does not matter to any derivative.
    results: what it returns that has a gradient, in its order: new values of inputs, outputs, bases
    of outputs that are views. handed: which of the results are handed over.
    """

    inputs: int
    differentiable: frozenset[int]
    written: frozenset[int]
    unread: frozenset[int]
    results: tuple[Returned, ...]
    handed: tuple[int, ...]

    @classmethod
    def of(cls, metadata: Any, graph: Graph, handed: int = 0) -> Layout:
        """handed: how many of the outputs, the last ones, are handed over.

        Raises:
            ValueError: if AOTAutograd takes one of them for a view of something.
        """
        from torch._functorch._aot_autograd.schemas import OutputType

        written, new = metadata.input_info, list(metadata.mutated_inp_runtime_indices)
        results = [
            Returned(place, "input", i)
            for place, i in enumerate(new)
            if written[i].mutates_data and written[i].requires_grad
        ]
        kinds = (
            OutputType.non_alias,
            OutputType.unsafe_view_alias,
            OutputType.custom_function_view,
        )
        for i, info in enumerate(metadata.output_info):
            recorded = getattr(info, "requires_grad_for_backward", info.requires_grad)
            if info.output_type in kinds and issubclass(info.raw_type, Tensor) and recorded:
                results.append(Returned(len(new) + i, "output", i))
        views = OutputType.alias_of_intermediate_save_as_output
        bases = [i for i, info in enumerate(metadata.output_info) if info.output_type == views]
        first = len(new) + len(metadata.output_info)
        results += [Returned(first + k, "base", i) for k, i in enumerate(bases)]
        own = len(metadata.output_info) - handed
        over = [k for k, one in enumerate(results) if one.kind == "output" and one.index >= own]
        if len(over) != handed:
            raise ValueError(f"expected {handed} tensors to hand over; found {len(over)} of them")
        return cls(
            len(written),
            frozenset(i for i, info in enumerate(written) if info.requires_grad),
            frozenset(
                i for i, info in enumerate(written) if info.mutates_data or info.mutates_metadata
            ),
            # a new value that is on the tape would hold the call that holds it
            frozenset(_unread(graph)) - {one.index for one in results if one.kind == "input"},
            tuple(results),
            tuple(over),
        )


def _unread(graph: Graph) -> Iterator[int]:
    """Inputs of a graph of Dynamo's that are running statistics of norms in training, or counters
    of calls.
    """
    for i, place in enumerate(graph.find_nodes(op="placeholder")):
        if place.users and all(_updates(user, place) for user in place.users):
            yield i


def _updates(node: Node, place: Node) -> bool:
    """Whether a node does nothing with an input but to write to it."""
    if node.op == "call_method":
        return node.target in ("add_", "copy_") and place is node.args[0] and not node.users
    names = ("running_mean", "running_var")
    if node.target is functional.batch_norm:
        given = dict(zip(("input", *names, "weight", "bias", "training"), node.args, strict=False))
        given.update(node.kwargs)
        uses = [name for name, value in given.items() if value is place]
        return given.get("training") is True and all(name in names for name in uses)
    return False


@dataclass
class Recorded:
    """A run of the graph on a tape: its inputs there, what has gradients, and all tensors that it
    has computed or written to.
    """

    inputs: list[Any]
    results: list[Tensor]
    computed: list[Tensor]


def record(
    program: Program,
    values: Sequence[Any],
    layout: Layout,
    given: Sequence[Tensor] = (),
    phase: Phase | None = None,
) -> Recorded:
    """Runs the graph on a tape that starts at its inputs, which stay as they are."""
    inputs = [_on_tape(x) if i in layout.differentiable else x for i, x in enumerate(values)]
    fresh = [
        x.clone() if isinstance(x, Tensor) and i in layout.written else x
        for i, x in enumerate(inputs)
    ]
    outputs = program.run(fresh, given, phase)
    results: list[Tensor] = []
    for one in layout.results:
        value = fresh[one.index] if one.kind == "input" else outputs[one.index]
        base: Any = value._base if one.kind == "base" else value
        results.append(base)
    if program.code and not all(y.requires_grad for y in results):
        # The code that Inductor does not compile may return a view itself, of what has no tape.
        return record(replace(program, code=None), values, layout, given, phase)
    written = (x for i, x in enumerate(fresh) if i in layout.written)
    return Recorded(inputs, results, [y for y in (*outputs, *written) if isinstance(y, Tensor)])


def _number(values: Sequence[Tensor]) -> Tensor:
    """One that depends on all of them."""
    real = (torch.view_as_real(y) if y.is_complex() else y for y in values)
    sums = [y.detach().to(torch.float32).sum().cpu() for y in real]
    return torch.stack(sums).sum() if sums else torch.zeros(())


def _on_tape(x: Tensor) -> Tensor:
    """An input of its own: one may have been computed from another, and gradients in that one end
    at this graph.
    """
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


@dataclass(frozen=True)
class Key:
    """What gradients a program computes.

    wanted: of which inputs. on_tape: whether each cotangent is on the tape; None for one that is
    not there, so zero. higher: whether the gradients are on the tape. batch: how many cotangents
    there are at once; None if they are not batched. draws: whether the graph draws random numbers.
    """

    wanted: tuple[int, ...]
    on_tape: tuple[bool | None, ...]
    higher: bool
    batch: int | None
    draws: bool


class Pullback:
    """The gradients of a graph, as a program of its own: inputs, what the forward has handed over
    and cotangents in, gradients of the wanted inputs out, None for those that nothing depends on.

    A batch of cotangents, and of gradients, has one more axis in front, which the graph has not.
    Where random numbers are drawn there is one more result, which depends on all that the graph
    computes: the same numbers are those that are drawn in the same order, all of them.
    """

    def __init__(self, program: Program, layout: Layout, key: Key) -> None:
        self.program, self.layout, self.key = program, layout, key

    @property
    def results(self) -> int:
        return len(self.key.wanted) + self.key.draws

    def __call__(self, *values: Any) -> tuple[Tensor | None, ...]:
        count, key, phase = self.layout.inputs, self.key, Phase()
        inputs, values = values[:count], values[count:]
        count = len(self.program.handed or ())
        handed, cotangents = values[:count], values[count:]
        higher = torch.is_grad_enabled()
        with torch.enable_grad():
            with phase:  # the graph may call autograd itself
                run = record(self.program, inputs, self.layout, handed, phase)
            there = [y for y, on in zip(run.results, key.on_tape, strict=True) if on is not None]
            pairs = zip(there, cotangents, strict=True)
            pairs_on_tape = [(y, g) for y, g in pairs if y.requires_grad]
            everything = (_number(run.computed),) if key.draws else ()
            if not pairs_on_tape:
                return (None,) * len(key.wanted) + everything
            results, given = zip(*pairs_on_tape, strict=True)

            def gradients(*given: Tensor) -> tuple[Tensor | None, ...]:
                return torch.autograd.grad(
                    results,
                    [run.inputs[i] for i in key.wanted],
                    given,
                    create_graph=higher,
                    retain_graph=True,
                    allow_unused=True,
                )

            with self.program.autocast.restored(off=True), phase:
                over_all = gradients if key.batch is None else partial(_over_batch, gradients)
                return over_all(*given) + everything


def _over_batch(
    gradients: Callable[..., tuple[Tensor | None, ...]], *given: Tensor
) -> tuple[Tensor | None, ...]:
    """vmap of a function some of whose results may be None."""
    present: list[bool] = []

    def tensors(*given: Tensor) -> tuple[Tensor, ...]:
        found = gradients(*given)
        present[:] = [g is not None for g in found]
        return tuple(g for g in found if g is not None)

    # A checkpoint's second run draws what its first one drew, the same for all.
    found = iter(torch.func.vmap(tensors, randomness="same")(*given))
    return tuple(next(found) if there else None for there in present)
