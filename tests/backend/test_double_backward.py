"""Second derivatives of the norms inside one graph: one region each, with all reductions inside.

The rules give correct derivatives of any order where they are registered; grad of grad is also
right without them, and then reaches the engine as torch's own formulas write it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from compiled import compile_fused
from orders import EPS, MIXES, NORMS, SHAPE, fixed
from snapshots import assert_snapshot
from torch.nn import functional as F

import normpass
from normpass.backend import entry
from normpass.backend.explain import record
from normpass.decomps.torch_versions import GROUP_NORM_BACKWARD_REWRITTEN
from normpass.passes.pipeline import Decision, Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.backend.explain.record import Passed

TRAINED = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm")
X = fixed(*SHAPE) * 2 + 0.5


def compiled(
    function: Callable[[Tensor], Tensor], x: Tensor, *, registered: bool, **options: Any
) -> tuple[Tensor, list[Passed]]:
    """The result of a function, and the graphs that went through the pass. registered: whether the
    rules are, else the graph is that of torch's own formulas, as `normpass.fuse` may be given it.
    """
    torch._dynamo.reset()  # what was compiled without the rules stays so
    rules = normpass.registered() if registered else nullcontext()
    no_others = patch.object(entry, "rules_if_asked_for", lambda _: nullcontext())
    with rules, no_others, record.watch() as graphs:
        return compile_fused(function, inner="eager", **options)(x), graphs


def decisions(graphs: list[Passed]) -> list[Decision]:
    return [decision for graph in graphs for decision in graph.decisions]


def assert_one_region(graphs: list[Passed]) -> Fused:
    (decision,) = decisions(graphs)
    assert isinstance(decision, Fused), decision
    before, after = (
        [line.text for graph in graphs for line in lines(graph) if line.reduction]
        for lines in (lambda graph: graph.before, lambda graph: graph.after)
    )
    assert len(before) >= 2
    assert not after
    assert len(parse(decision.text).outputs) == 1
    return decision


def assert_right(got: Tensor, want: Tensor) -> None:
    """To a part in 1e8 of the largest element, as in the matrix of derivatives."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-8 * want.abs().max().item())


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("registered", "dynamic"), [(False, False), (True, False), (True, True)], ids=str
)
@pytest.mark.parametrize("norm", TRAINED)
def test_grad_of_grad_is_one_region(norm: str, registered: bool, dynamic: bool) -> None:
    make, primitives = NORMS[norm]
    mix = MIXES["grad_grad"]
    got, graphs = compiled(mix(make()), X, registered=registered, dynamic=dynamic)
    assert_one_region(graphs)
    assert_right(got, mix(primitives)(X))


@pytest.mark.parametrize("norm", TRAINED)
def test_hessian_vector_product_is_one_region(norm: str) -> None:
    make, primitives = NORMS[norm]
    mix = MIXES["jvp_grad"]
    got, graphs = compiled(mix(make()), X, registered=True)
    assert_one_region(graphs)
    assert_right(got, mix(primitives)(X))


def nonlinear(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A loss whose second derivative is none of the norm's alone."""
    return lambda x: torch.sin(norm(x))


@pytest.mark.parametrize("mix", ["grad_grad", "jvp_grad"])
def test_rms_norm_without_rules_is_one_region(mix: str) -> None:
    """A composite of primitives: its tangents come with copies and powers of zero."""
    make, primitives = NORMS["rms_norm"]
    got, graphs = compiled(MIXES[mix](nonlinear(make())), X, registered=False)
    assert_one_region(graphs)
    assert_right(got, MIXES[mix](nonlinear(primitives))(X))


@pytest.mark.parametrize("registered", [False, True])
def test_eval_mode_has_no_reduction_to_fuse(registered: bool) -> None:
    """Its statistics are constants, so that everything about x is pointwise."""
    make, primitives = NORMS["batch_norm_eval"]
    mix = MIXES["grad_grad"]
    got, graphs = compiled(mix(nonlinear(make())), X, registered=registered)
    assert not decisions(graphs)
    assert not any(line.reduction for graph in graphs for line in graph.before)
    assert_right(got, mix(nonlinear(primitives))(X))


def test_gradients_of_weights_join_the_region() -> None:
    """Of a penalty on the gradient, for x, weight and bias at once: one region, three outputs."""

    def penalty(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def inner(x: Tensor, *parameters: Tensor) -> Tensor:
            grad = torch.func.grad(lambda x: torch.sin(norm(x, *parameters)).sum())(x)
            return (grad * grad).sum()

        return torch.func.grad(inner, argnums=(0, 1, 2))

    def primitives(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean((0, 2), keepdim=True)
        y = centred / ((centred * centred).mean((0, 2), keepdim=True) + EPS).sqrt()
        return y * weight[:, None] + bias[:, None]

    def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)

    weight, bias = fixed(6) + 1.5, fixed(6)
    with normpass.registered(), record.watch() as graphs:
        got = compile_fused(penalty(batch_norm), inner="eager")(X, weight, bias)
    (decision,) = decisions(graphs)
    assert isinstance(decision, Fused)
    assert len(parse(decision.text).outputs) == 3
    for mine, exact in zip(got, penalty(primitives)(X, weight, bias), strict=True):
        assert_right(mine, exact)


SNAPSHOTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "group_norm": lambda x, weight, bias: F.group_norm(x, 8, weight, bias),
    "batch_norm": lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, True),
}


@pytest.mark.parametrize("registered", [False, True], ids=["torch", "rules"])
@pytest.mark.parametrize("norm", SNAPSHOTS)
def test_region_text(norm: str, registered: bool) -> None:
    """As torch's own formulas write it, and as the rules do."""
    x, g, v = torch.randn(3, 4, 64, 16, 16)
    weight, bias = torch.randn(2, 64)

    def loss(x: Tensor) -> Tensor:
        return (SNAPSHOTS[norm](x, weight, bias) * g).sum()

    def slope(x: Tensor) -> Tensor:
        return (torch.func.grad(loss)(x) * v).sum()

    _, graphs = compiled(torch.func.grad(slope), x, registered=registered)
    text = assert_one_region(graphs).text
    if norm == "group_norm" and not registered and GROUP_NORM_BACKWARD_REWRITTEN:
        return  # the snapshot is of torch's formula before 2.15
    whose = "" if registered else "_of_torch"
    assert_snapshot(f"regions/{norm}_double_backward{whose}.txt", text)
