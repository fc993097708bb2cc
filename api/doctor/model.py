"""The usual mistakes in how a model is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import normpass
from normpass.backend.explain.messages import message_of
from normpass.backend.explain.norm_modules import is_norm
from normpass.backend.explain.record import listen
from normpass.doctor.finding import Finding
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from normpass.backend.explain.report import RefusedNorm
    from normpass.commands import Target
    from normpass.passes.pipeline import Decision

# Reasons that somebody who wants the norm fused can do something about.
TO_MEND = ("not-compiled", "fusion-off", "no-gradient", "not-decomposed", "types", "fault")


def examined(name: str, target: Target) -> tuple[dict[str, str], list[Finding]]:
    """What is to be known of a model, and what is wrong with how it is compiled.

    A model that is compiled is run as it is; any other by `normpass.explain`.
    """
    function = target.function
    facts = {"what": type(function).__name__}
    if isinstance(function, nn.Module):
        facts["norms"] = str(sum(map(is_norm, function.modules())))
        facts["mode"] = "training" if function.training else "eval"
        if wrong := [*left_to_eager(name, function)]:
            return facts, wrong
        if is_compiled(function):
            decisions = run(target)
            fused = sum(isinstance(decision, Fused) for decision in decisions)
            facts["compiled"] = f"yes; {fused} norms fused, {len(decisions) - fused} not"
            return facts, [] if decisions else [without_normpass(name)]
    report = normpass.explain(function, *target.args, **target.kwargs)
    facts["compiled"] = "no; by normpass it would be: " + report.summary().partition(": ")[2]
    return facts, [*refusals(report.refused)]


def left_to_eager(name: str, model: nn.Module) -> Iterator[Finding]:
    """Modules of torch.nn's own classes that were compiled in place: Dynamo leaves the code of
    torch.nn to eager mode where a graph would begin in it.
    """
    for path, module in model.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        if of_torch and module._compiled_call_impl is not None:
            kind, place = type(module).__name__, f"{name}.{path}".strip(".")
            yield Finding(
                f"{place} is an nn.{kind} whose method compile() was called, "
                "which compiles nothing",
                "use what torch.compile(module) returns in its place",
            )


def is_compiled(model: nn.Module) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    modules = [*model.modules()]
    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in modules)


def run(target: Target) -> list[Decision]:
    """What is decided while a model runs, forward and backward, with nothing in the caches."""
    import torch.utils._pytree as pytree
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    torch._dynamo.reset()
    with (
        listen() as decisions,
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        results: Any = target.function(*target.args, **target.kwargs)
        ends = [y for y in pytree.tree_leaves(results) if is_differentiable(y)]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(y) for y in ends])
    return decisions


def is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def without_normpass(name: str) -> Finding:
    return Finding(
        f"{name} is compiled, and normpass took no part in it",
        'pass backend="normpass" to torch.compile, or call normpass.register() before it',
    )


def refusals(refused: Sequence[RefusedNorm]) -> Iterator[Finding]:
    """What somebody can do something about, once each."""
    seen: dict[str, list[str]] = {}
    for norm in refused:
        message = message_of(norm.reason)
        if message and message.name in TO_MEND:
            seen.setdefault(norm.reason, []).append(norm.module or "the model itself")
    for reason, modules in seen.items():
        where = ", ".join(dict.fromkeys(modules))
        yield Finding(reason, f"of {where}: normpass explain has more")
