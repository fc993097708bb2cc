"""What was fused, what was not and why: `normpass.explain`.

The function is compiled as `torch.compile(fn, backend="normpass")` does it, run forward and
backward, and watched. Uses of private interfaces here (compile_subgraph_reason, counters, the cache
settings) were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from normpass.backend.explain import memory, record, running
from normpass.backend.explain.norm_modules import Break, Seen, canonical, missing, paths
from normpass.backend.explain.report import (
    FusedNorm,
    RefusedNorm,
    Report,
    fused_norms,
    time_regions,
)
from normpass.backend.options import Options
from normpass.backend.run.dialects import kernel_source
from normpass.passes.pipeline import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch.fx import GraphModule

__all__ = ["FusedNorm", "RefusedNorm", "Report", "explain"]


MEASURES = ("time", "memory")


def explain(
    fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    measure: str | Collection[str] = (),
    **kwargs: Any,
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
        measure: "time", "memory" or both. "time": each region's kernel and Inductor's kernels for
            the same nodes, on random tensors; Inductor compiles every region that differs.
            "memory": bytes alive over the step, with normpass and with stock Inductor, which
            compiles fn for that, and what each saves for the backward; the function runs five
            times more.

    Raises:
        ValueError: for an option or a measurement there is not.
        Whatever fn raises.
    """
    settings, measures = Options.parse(options), _measures(measure)
    fn = _original(fn)
    modules = paths(fn, args, kwargs)
    watcher = _Watcher(settings, {id(module): path for path, module in reversed(modules.items())})
    kept = None
    with running.apart(fn, args, kwargs) as arguments:
        step = running.Step.of(fn, arguments, watcher)
        with record.watch() as graphs, watcher.frames_without_graph():
            backward = step.backward(step.forward())
        if "memory" in measures:
            kept = memory.measured(
                step,
                [(graph.phase, graph.before) for graph in graphs],
                lambda backend: running.Step.of(fn, arguments, backend),
                settings.inductor,
                watcher.path_of,
            )
        regions = [region for graph in graphs for region in fused_norms(graph, kernel_source)]
        if "time" in measures:
            time_regions(regions, settings.inductor)
    phases = ("forward", "backward") if backward else ("forward",)
    seen = Seen(graphs, frozenset(watcher.reached), watcher.breaks, phases, settings.fuse)
    decisions = [decision for graph in graphs for decision in graph.decisions]
    refused = [d for d in decisions if isinstance(d, Refused)] + missing(modules, seen)
    return Report(
        title=_title(fn),
        regions=regions,
        refused=[RefusedNorm(d.name, d.module, d.phase, d.reason) for d in refused],
        graphs=list(graphs),
        memory=kept,
    )


def _measures(asked: str | Collection[str]) -> frozenset[str]:
    """What is to be measured.

    Raises:
        ValueError: for what cannot be.
    """
    found = frozenset([asked] if isinstance(asked, str) else asked)
    for name in found:
        if name not in MEASURES:
            raise ValueError(f"measure: expected {' or '.join(MEASURES)}, found {name!r}")
    return found


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
