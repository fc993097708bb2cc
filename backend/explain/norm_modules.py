"""The norm modules of a user's model: their paths, and why one of them is in no region.

`normpass.explain` lists every norm; the pass only knows what it met in its graphs.
"""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from normpass.passes.names import NORM_OPS, snake_case
from normpass.passes.one_hot import INTEGERS
from normpass.passes.pipeline import Refused
from normpass.passes.region import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.fx import Graph

    from normpass.backend.explain.listing import Line
    from normpass.backend.explain.record import Passed

NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms of every rank
)
NORM_CLASS = re.compile(r"norm(?!al(?!i[sz]))", re.IGNORECASE)  # LlamaRMSNorm; not LogNormal


@dataclass(frozen=True)
class Break:
    """Where Dynamo ended a graph, and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place} ({self.reason})"


@dataclass(frozen=True)
class Seen:
    """What one compilation showed.

    graphs: that went through the pass. reached: ids of the modules Dynamo traced. phases: that
    were run. fuse: whether fusion was on.
    """

    graphs: Sequence[Passed]
    reached: frozenset[int]
    breaks: Sequence[Break]
    phases: Sequence[str]
    fuse: bool


def paths(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every module that a function can be seen to use, by its dotted path.

    As in named_modules() where there is one model: the function itself, the object it is a method
    of, or the only one among its arguments, its closure and the globals it names. Several are told
    apart by the names they have there.
    """
    roots = {"": fn} if isinstance(fn, nn.Module) else _roots(fn, args, kwargs)
    single = len(roots) == 1 and not any(is_norm(root) for root in roots.values())
    found: dict[str, Any] = {}
    for name, root in roots.items():
        stem = "" if single or root is fn else name
        for path, module in root.named_modules():
            found[".".join(filter(None, (stem, path)))] = module
    return found


def _roots(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, nn.Module]:
    if isinstance(fn, functools.partial):
        return _roots(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    named: dict[str, Any] = {}
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return {"self": owner}
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    if inspect.isfunction(function):
        named |= _variables(function)
    elif owner is None:
        owner = fn
    named |= getattr(owner, "__dict__", {})
    named |= {f"args.{k}": arg for k, arg in enumerate(args)} | dict(kwargs)
    once = {
        id(value): name for name, value in reversed(named.items()) if isinstance(value, nn.Module)
    }
    return {name: named[name] for name in once.values()}


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable of its closure has no value yet
        return {}
    return {**variables.globals, **variables.nonlocals}


def is_norm(module: Any) -> bool:
    """Whether a module is a norm by its type, or by its name if no norm stands inside of it."""
    if isinstance(module, NORMS):
        return True
    inside = (child for child in module.modules() if child is not module)
    return _named_norm(module) and not any(
        isinstance(child, NORMS) or _named_norm(child) for child in inside
    )


def _named_norm(module: Any) -> bool:
    return NORM_CLASS.search(type(module).__name__) is not None


def canonical(graph: Graph, path_of: Mapping[int, str]) -> Iterator[int]:
    """Rewrites the module paths of a graph of Dynamo's to the user's own, and yields the ids of
    its modules.

    Dynamo's begin at the frame that it traced: a submodule's after a graph break, this package's
    in explain. Its keys are str(id(module)), with "@" and a number from a module's second call on
    (torch 2.11 to 2.15).
    """
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if not stack:
            continue
        new = {}
        for key, (path, kind) in stack.items():
            digits = str(key).partition("@")[0]
            module = int(digits) if digits.isdigit() else 0
            yield module
            if module in path_of:
                path = f"L['self'].{path_of[module]}"
            new[key] = (path, kind)
        node.meta["nn_module_stack"] = new


def missing(found: Mapping[str, Any], seen: Seen) -> list[Refused]:
    """Every norm module in every phase that no decision names, with the reason that can be
    established.
    """
    decisions = [decision for graph in seen.graphs for decision in graph.decisions]
    named = {(d.phase, path) for d in decisions for path in d.module.split(", ")}
    return [
        Refused(_name(module, phase), path, phase, _reason(path, module, phase, seen))
        for phase in seen.phases
        for path, module in found.items()
        if is_norm(module) and (phase, path) not in named
    ]


def _name(module: Any, phase: str) -> str:
    """As a region of it would be called, from the first of its classes that is called a norm."""
    names = [kind.__name__ for kind in type(module).__mro__]
    name = snake_case(next(name for name in names if NORM_CLASS.search(name)))
    match = NORM_OPS.match(name)
    return (match[1] if match else name) + ("_backward" if phase == "backward" else "")


def _reason(path: str, module: Any, phase: str, seen: Seen) -> str:
    if id(module) not in seen.reached:
        return _not_reached(seen.breaks)
    if not seen.fuse:
        return "fusion is off (options: fuse=False)"
    graphs = [graph for graph in seen.graphs if graph.phase == phase]
    lines = [
        line
        for graph in graphs
        for line in graph.before
        if line.place == path or line.place.startswith(f"{path}." if path else "\0")
    ]
    if whole := next((line.op for line in lines if NORM_OPS.match(line.op)), None):
        return f"{whole} was not decomposed"
    reductions = [line for line in lines if line.reduction]
    if not reductions:
        return _no_reductions(module, phase, bool(lines))
    return _no_region(reductions, graphs)


def _not_reached(breaks: Sequence[Break]) -> str:
    if not breaks:
        return "in no compiled graph: not called with these arguments, or nobody uses its result"
    where = "; ".join(dict.fromkeys(map(str, breaks)))
    return f"in no compiled graph: not called, or left to eager by the graph break at {where}"


def _no_reductions(module: Any, phase: str, has_lines: bool) -> str:
    uses_running = (
        isinstance(module, nn.modules.batchnorm._NormBase)
        and not module.training
        and module.running_mean is not None
    )
    if uses_running:
        return "nothing to fuse: no reductions here in eval mode, which uses the running statistics"
    if phase == "backward" and not has_lines:
        return "no gradient flows through it"
    return "nothing to fuse: it has no reductions"


def _no_region(reductions: Sequence[Line], graphs: Sequence[Passed]) -> str:
    for line in reductions:
        if not line.fusable:
            held = (d for d in DTYPES.values() if d not in INTEGERS)
            expected = ", ".join(str(d).removeprefix("torch.") for d in held)
            return f"reduces {line.dtype}; regions hold {expected}"
    if not any(line.inner for line in reductions):
        return "nothing to fuse: only plain sums here, such as gradients of weight and bias"
    names = {line.name for line in reductions}
    for decision in (decision for graph in graphs for decision in graph.decisions):
        if names & set(decision.nodes):
            verb = "refused" if isinstance(decision, Refused) else "fused"
            return f"part of the region of {decision.module or 'the graph'}, which was {verb}"
    return "no region could be grown around its reductions"
