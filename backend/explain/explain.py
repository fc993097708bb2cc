"""What was fused, what was not and why: `normpass.explain`.

The function is compiled as `torch.compile(fn, backend="normpass")` does it, run forward and
backward, and watched. Uses of private interfaces here (clone_input, compile_subgraph_reason,
counters, the cache settings) were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from normpass.backend.explain import record
from normpass.backend.explain.norm_modules import Break, Seen, canonical, missing, paths
from normpass.backend.explain.report import FusedNorm, RefusedNorm, Report
from normpass.backend.options import Options
from normpass.backend.run.dialects import kernel_source
from normpass.passes.pipeline import Fused, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.fx import GraphModule

__all__ = ["FusedNorm", "RefusedNorm", "Report", "explain"]


def explain(
    fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Compiles a function forward and backward, and reports every norm: fused or not and why.

    It runs once, under the grad mode and autocast of the caller, and if any floating-point output
    requires a gradient then backward too, from all of them with random cotangents. Everything is
    compiled anew, past the caches that would skip the passes; functions that were compiled before
    stay so.

    The caller's tensors stay as they are: the run has copies of the arguments and of the buffers
    (running statistics), gradients are returned rather than added to `.grad`, and random
    generators are put back.

    Args:
        fn: a module or a function, compiled already or not. Its outputs may have any structure.
        args, kwargs: what it is called with.
        options: of the backend, as for `torch.compile(fn, backend="normpass", options=...)`.

    Raises:
        ValueError: for an option there is not.
        Whatever fn raises.
    """
    settings = Options.parse(options)
    fn = _original(fn)
    modules = paths(fn, args, kwargs)
    watcher = _Watcher(settings, {id(module): path for path, module in reversed(modules.items())})
    with record.watch() as graphs, watcher.frames_without_graph():
        backward = _run(fn, args, kwargs, watcher)
    phases = ("forward", "backward") if backward else ("forward",)
    seen = Seen(graphs, frozenset(watcher.reached), watcher.breaks, phases, settings.fuse)
    decisions = [decision for graph in graphs for decision in graph.decisions]
    refused = [d for d in decisions if isinstance(d, Refused)] + missing(modules, seen)
    return Report(
        title=_title(fn),
        regions=[FusedNorm.of(d, kernel_source) for d in decisions if isinstance(d, Fused)],
        refused=[RefusedNorm(d.name, d.module, d.phase, d.reason) for d in refused],
        graphs=list(graphs),
    )


def _original(fn: Any) -> Any:
    """What was given to torch.compile, where fn came from there."""
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def _title(fn: Any) -> str:
    return type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))


# ---- compiling


@dataclass
class _Watcher:
    """The backend that explain compiles with: notes what Dynamo hands over, and hands it on."""

    settings: Options
    path_of: Mapping[int, str]
    reached: set[int] = field(default_factory=set)
    breaks: list[Break] = field(default_factory=list)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from normpass.backend.entry import normpass

        self.reached.update(canonical(graph.graph, self.path_of))
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.breaks.append(_break(reason))
        options = {
            name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__
        }
        # In the options, because a thread that compiles a backward does not see config patches of
        # ours.
        options["inductor"] = {
            **self.settings.inductor,
            "fx_graph_cache": False,
            "fx_graph_remote_cache": False,
        }
        return normpass(graph, inputs, options=options)

    @contextmanager
    def frames_without_graph(self) -> Iterator[None]:
        """Notes the breaks of frames that no graph came of."""
        from torch._dynamo.utils import counters

        before = dict(counters["graph_break"])
        yield
        for reason, count in counters["graph_break"].items():
            known = {stop.reason for stop in self.breaks}
            first = reason.strip().splitlines()[0]
            if count > before.get(reason, 0) and first not in known:
                self.breaks.append(Break("an unknown place", first))


def _break(reason: Any) -> Break:
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = f"{frame.filename}:{frame.lineno}" if frame else "an unknown place"
    return Break(place, str(reason.reason).strip().splitlines()[0])


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


def _run(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], backend: _Watcher
) -> bool:
    """Runs forward and backward; whether there was a backward."""
    from torch._functorch import config as functorch_config

    modules = [m for m in pytree.tree_leaves((fn, args, dict(kwargs))) if isinstance(m, nn.Module)]
    modules += list(paths(fn, args, kwargs).values())
    with ExitStack() as stack:
        stack.enter_context(_random_state(args, kwargs, modules))
        stack.enter_context(_buffers_aside(modules))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(_without_limit())
        copies = _copies((tuple(args), dict(kwargs)))
        since = _now()
        outputs = _compiled(backend)(fn, *copies)
        return _backward(list(_tensors(outputs, set())), since)


def _backward(outputs: Sequence[Tensor], since: int) -> bool:
    """Runs backward from all outputs that require a gradient, through all that was recorded since;
    whether there was anything.
    """
    ends = [y for y in outputs if y.requires_grad and (y.is_floating_point() or y.is_complex())]
    edges = _edges_behind(ends, since)
    if not edges:
        return False
    # Named edges, because then nothing is added to a `.grad` and no graph of the caller's is
    # entered.
    torch.autograd.grad(ends, edges, [torch.randn_like(y) for y in ends], allow_unused=True)
    return True


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
