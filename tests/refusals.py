"""What becomes of the norms of the benchmark's models at their full sizes, and why: everything up
to our pass and the pass itself, without a kernel built or a step run.

Private names of torch._inductor.compile_fx are those of 2.13 (`TORCH`): other versions trace other
graphs, and their decisions are not under snapshot.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import compile_fx as inductor
from torch._inductor.virtualized import V
from torch.fx import Node

from normpass.backend import fusion
from normpass.backend.explain import record
from normpass.backend.explain.report import RefusedNorm, refusals
from normpass.backend.inductor.memory_format import Wishes, channels_last
from normpass.backend.run import calibration
from normpass.benchmarks import zoo
from normpass.passes.cost import Caches, Conditions
from normpass.passes.pipeline import Decision, Fused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest
    from torch.fx import Graph

TORCH = (2, 13)
# Whatever this machine has.
CONDITIONS = Conditions(
    Caches(worker=1 << 24, shared=1 << 25),
    private=1 << 20,
    threads=2,
    calibration=calibration.SHIPPED,
)


class Decided(Exception):
    """All regions of a model are decided on: nothing is to run."""


def made_with(model: str) -> str:
    """The versions that a model's graphs depend on."""
    packages = ["torch", *filter(None, [zoo.zoo()[model].package])]
    return ", ".join(f"{name} {'.'.join(version(name).split('.')[:2])}" for name in packages)


def report(model: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of every case of a model: how many norms are fused, and each that is not, with its reason."""
    monkeypatch.setattr(fusion, "conditions_of", lambda device: CONDITIONS)
    lines = [f"# {made_with(model)}"]
    for case in zoo.select([model]):
        found = decisions(case)
        fused = sum(isinstance(decision, Fused) for decision in found)
        lines += ["", f"{case.label}: {fused} fused, {len(found) - fused} not"]
        for name, phases, module, reason in rows(found):
            lines.append(f"    {name} of {module} ({phases}): {reason}")
    return "\n".join(lines)


def rows(found: Sequence[Decision]) -> list[tuple[str, str, str, str]]:
    refused = [decision for decision in found if not isinstance(decision, Fused)]
    return refusals([RefusedNorm(d.name, d.module, d.phase, d.reason) for d in refused])


def decisions(case: zoo.Case) -> list[Decision]:
    torch._dynamo.reset()
    made, loss = case.build("cpu"), zoo.zoo()[case.model].loss
    step: Any = torch.compile(lambda: loss(made.module, **made.inputs), backend="normpass")
    with record.listen() as heard, nothing_is_built():
        try:
            step()
        except Decided:
            return list(heard)
    raise AssertionError(f"{case.label} was not compiled")


def report_strides(graph: Graph) -> None:
    """Tells AOTAutograd where a forward's results are expected to lie: so the backward has them."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    wishes = Wishes.expected(graph)
    (output,) = graph.find_nodes(op="output")
    for node in output.args[0]:
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(value, torch.Tensor):
            context.output_strides.append(None)
        elif wishes.visible.get(node) is None and wishes.prefers_channels_last(node):
            context.output_strides.append(tuple(map(int, channels_last(node))))
        else:
            context.output_strides.append(tuple(value.stride()))


@contextmanager
def nothing_is_built() -> Iterator[None]:
    """Inductor ends where it has run our pass over forward and backward."""
    compile_fx = inductor.compile_fx

    def inner_compile(module: Any, inputs: Any, **rest: Any) -> Any:
        inductor.view_to_reshape(module)
        with torch.no_grad():
            mode = inductor.fake_tensor_prop(module, inputs)
        inductor._recursive_record_original_output_strides(module)
        with V.set_fake_mode(mode):
            inductor._recursive_post_grad_passes(module, rest.get("is_inference", False))
        report_strides(module.graph)

        def run(inputs: list[Any]) -> Any:
            raise Decided

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def until_decided(*args: Any, **options: Any) -> Any:
        return compile_fx(*args, **{"inner_compile": inner_compile, **options})

    inductor.compile_fx = until_decided
    try:
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            yield
    finally:
        inductor.compile_fx = compile_fx
