"""Compiled code that can be differentiated again, to any order.

AOTAutograd compiles a graph's forward and backward into one autograd.Function, whose backward
cannot be differentiated: its inputs are saved activations, which no tape leads to. Here that class
keeps references to its own inputs, and where somebody asks for more than a first derivative
(create_graph=True, or vmap over a backward), the gradients come from another program:

    inputs, cotangents -> run the graph on a tape -> torch.autograd.grad(create_graph=True)

which is compiled like any model the first time it is needed, so that its own backward can be
differentiated again by the same means. What is expensive in the forward it does not compute once
more: from then on the forward hands it over. What a first derivative alone costs is two attributes
a call.

    program.py           a graph as a function that runs on a tape; its gradients
    custom_functions.py  the user's own autograd.Functions in it
    derivatives.py       those gradients, compiled
    handover.py          what a forward hands over to them
    sizes.py             code for all sizes of a graph, or for each
    forward.py           which forward a compiled graph has
    batched.py           cotangents that vmap has batched
    kept.py              what a call keeps
    inside.py            graphs that take derivatives themselves
    __init__.py          how it comes into what AOTAutograd has made

Private, checked on torch 2.11, 2.13 and 2.15: RuntimeWrapper.post_compile, to which AOTAutograd
hands that class; the class's forward, backward, metadata, maybe_subclass_metadata and
boxed_grads_call; torch._dynamo.trace_rules.add, which has Dynamo skip a package's frames;
torch._C._will_engine_execute_node, _get_current_graph_task_keep_graph; and
torch.autograd.graph._engine_run_backward, whose frame tells what gradients somebody asked for.
"""

from __future__ import annotations

import logging
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import graph as autograd_graph

from normpass.backend.higher_order.batched import below_vmap, is_batched
from normpass.backend.higher_order.derivatives import Derivatives
from normpass.backend.higher_order.forward import Forward
from normpass.backend.higher_order.handover import hand_over
from normpass.backend.higher_order.kept import keeping
from normpass.backend.higher_order.program import Layout, Program
from normpass.backend.inductor_mistakes.mistake import wrap
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from torch.fx import GraphModule

    from normpass.backend.higher_order.program import Compile

log = logging.getLogger(__name__)
_KEEPS_GRAPH = torch._C._autograd._get_current_graph_task_keep_graph


class _Compiling:
    """A graph that is being compiled, and its forward, once that can be differentiated again."""

    program: Program | None = None
    forward: Forward | None = None


class _State(threading.local):
    compiling: _Compiling | None = None


_STATE = _State()
_install_lock = threading.Lock()
_installed = False


def install() -> None:
    """Lets this module see what AOTAutograd makes, while it compiles for us; once a process."""
    global _installed
    with _install_lock:
        if not _installed:
            from torch._dynamo import trace_rules
            from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper

            wrap(RuntimeWrapper, "post_compile", _around_post_compile)
            # Where a frame that Dynamo cannot trace calls autograd, it would trace the backward's
            # own frames, and read what a checkpoint unpacks once to make guards of it.
            trace_rules.add(__name__)
            _installed = True


def differentiable(
    graph: GraphModule, inputs: Sequence[Any], once: Compile, again: Compile
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo's so that its backward can be differentiated.

    once: the backend, by AOTAutograd. again: the same, by this function, for its derivatives.
    """
    compiling = _Compiling()
    with faults.survived("preparing further derivatives", "a graph", "There are none"):
        install()
        compiling.program = Program.of(graph, inputs, again)
    before, _STATE.compiling = _STATE.compiling, compiling
    try:
        code = once(graph, inputs)
    finally:
        _STATE.compiling = before
    return compiling.forward.around(code) if compiling.forward else code


def _around_post_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_compile(self: Any, compiled_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function = getattr(compiled_fn, "__self__", None)
        compiling = _STATE.compiling
        if (
            compiling is not None
            and compiling.program is not None
            and isinstance(function, type)
            and issubclass(function, torch.autograd.Function)
        ):
            with faults.survived("preparing further derivatives", "a graph", "There are none"):
                compiling.forward = attach(function, compiling.program)
        return original(self, compiled_fn, *args, **kwargs)

    return post_compile


def attach(function: Any, program: Program) -> Forward | None:
    """Makes a compiled function's backward differentiable; None where it cannot be."""
    handed = program.handed
    layout = Layout.of(function.metadata, program.graph.graph, len(handed or ()))
    if why := _refusal(function, layout, program):
        function.backward = staticmethod(_refusing(function.backward, why))
        return None
    found = Forward(program, layout, len(function.metadata.output_info))
    derivatives = Derivatives(program, layout, found.handing_over)
    forward, backward = function.forward, function.backward
    boxed = getattr(function, "boxed_grads_call", False)
    if handed is not None:
        forward, backward = hand_over(forward, backward, layout)
        handed.is_attached = True
    places = [one.place for one in layout.results] if handed else []
    # Nor may Dynamo trace what that calls.
    more = torch._dynamo.disable(gradients_of)
    donates = bool(getattr(function.metadata, "bw_donated_idxs", None))

    def backward_or_more(ctx: Any, *gradients: Any) -> Any:
        given = gradients[0] if boxed else gradients
        is_plain = not torch.is_grad_enabled() and not is_batched(given)
        if is_plain and (not places or all(given[i] is not None for i in places)):
            if not _KEEPS_GRAPH():
                ctx.normpass_kept = None
                return backward(ctx, *gradients)
            if not donates:
                return backward(ctx, *gradients)
        return more(ctx, derivatives, given)

    function.forward = staticmethod(keeping(forward, layout))
    function.backward = staticmethod(backward_or_more)
    return found


def _refusal(function: Any, layout: Layout, program: Program) -> str | None:
    """Why there are no further derivatives of a compiled function: its inputs are not the graph's,
    or what else the graph does would be done again.
    """
    if function.maybe_subclass_metadata is not None:
        return "tensors of torch's own classes, found parts of a subclass among its inputs"
    if layout.inputs != len(program.examples):
        return "inputs with memory of their own, found some that share it and are written to"
    if effect := program.effect():
        return f"a graph that only computes, found {effect}"
    return None


def _refusing(backward: Callable[..., Any], why: str) -> Callable[..., Any]:
    """A compiled function's backward, which cannot be differentiated, and says why if asked to,
    once.
    """
    to_say = [why]

    def backward_only(ctx: Any, *gradients: Any) -> Any:
        if to_say and torch.is_grad_enabled():
            log.warning(
                "a backward of compiled code cannot be differentiated (create_graph=True): "
                "expected %s. Where a second derivative is needed, take that part out of what is "
                "compiled (torch.compiler.disable) (normpass why no-further-derivative)",
                why,
            )
            to_say.clear()
        return backward(ctx, *gradients)

    return backward_only


def gradients_of(ctx: Any, derivatives: Derivatives, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """What a compiled function's backward returns, on a tape."""
    # Raises if they are gone, or were written to; once, as a checkpoint gives them.
    saved = ctx.saved_tensors
    layout, kept = derivatives.layout, ctx.normpass_kept
    inputs = kept.unpacked(layout)
    wanted = tuple(_wanted(ctx, inputs))
    cotangents = [gradients[one.place] for one in layout.results]
    handed = saved[-len(layout.handed) :] if layout.handed else ()
    pull_back = partial(derivatives.pull_back, wanted, inputs, handed=handed, random=kept.random)
    if is_batched(cotangents):
        found = below_vmap(
            [g for g in cotangents if g is not None],
            lambda batched: pull_back(_in_place_of(batched, cotangents), batched=True),
        )
    else:
        found = pull_back(cotangents)
    if not _KEEPS_GRAPH():
        ctx.normpass_kept = None
    result: list[Any] = [None] * len(inputs)
    for i, gradient in zip(wanted, found, strict=True):
        result[i] = gradient
    return tuple(result)


def _in_place_of(values: Sequence[Any], all_: Sequence[Any]) -> list[Any]:
    """These in place of those that are there."""
    left = iter(values)
    return [None if one is None else next(left) for one in all_]


def _wanted(ctx: Any, inputs: Sequence[Any]) -> Iterator[int]:
    """Which inputs' gradients the engine will use."""
    asked = _asked_for()
    edges = iter(ctx.next_functions)
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor):
            continue
        node, _ = next(edges)
        if node is None or not ctx.needs_input_grad[i]:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is None:
            if torch._C._will_engine_execute_node(node):
                yield i
        elif asked is None or any(leaf is y or not isinstance(y, Tensor) for y in asked):
            yield i


def _asked_for() -> Sequence[Any] | None:
    """The inputs of the torch.autograd.grad that is running in this thread; None for all leaves."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is autograd_graph._engine_run_backward.__code__:
            _, _, _, inputs, *_ = frame.f_locals["args"]
            return inputs or None
        frame = frame.f_back
    return None
