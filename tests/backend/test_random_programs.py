"""Derivatives of random small programs, compiled, against eager mode in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from higher_order_cases import IGNORED, numbers, results, weighted
from hypothesis import HealthCheck, assume, example, given, settings
from random_programs import Case, Step, cases, oracle, parameters, program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normpass.backend.higher_order import handover
from normpass.decomps.torch_versions import CHECKPOINTS_KEEP_INPUTS
from normpass.passes import faults

if TYPE_CHECKING:
    from typing import Any

pytestmark = [
    *IGNORED,
    pytest.mark.skipif(
        not CHECKPOINTS_KEEP_INPUTS,
        reason="before torch 2.12 what is compiled inside a checkpoint has no second derivatives",
    ),
]
QUIET: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
}
# Derivatives of a softmax of a norm of three rows may be large: what is larger tests rounding.
LARGEST = 1e6


def derivatives(function: Any, leaves: list[Tensor], order: int) -> list[Tensor]:
    """Of all leaves, all orders up to this one; zeros for those that it does not depend on, which
    compiled code may not know.
    """
    nothing = sum((leaf.sum() for leaf in leaves), torch.zeros(())) * 0
    values = results(function, leaves[0])
    found: list[Tensor] = []
    for k in range(order):
        last = k + 1 == order
        values = list(
            torch.autograd.grad(weighted(values) + nothing, leaves, create_graph=not last)
        )
        found += [g.detach() for g in values]
        values = [g.sin() for g in values]
    return found


def is_conditioned(case: Case, leaves: list[Tensor], found: list[Tensor]) -> bool:
    """Whether inputs and parameters that are changed by their rounding, and by more, have nearly
    the same derivatives: those of a program that normalizes what should be zero are of rounding
    alone, and where a norm's numbers nearly cancel the last digits of all are.
    """
    for change, least in ((1e-12, 1e-7), (1e-15, 1e-11)):
        x, *others = (leaf.detach() * (1 + change * leaf.detach().cos()) for leaf in leaves)
        shared = nn.ParameterList(others)
        again = derivatives(oracle(case, shared), [x.requires_grad_(), *shared], case.order)
        for a, b in zip(again, found, strict=True):
            if not float((a - b).abs().max()) < least * max(1.0, float(b.abs().max())):
                return False
    return True


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    with monkeypatch.context() as patched:
        if case.everything:
            patched.setattr(handover, "LEAST_OPERATIONS", 1)
        shared = parameters()
        right, ours = oracle(case, shared), program(case, shared)
        for rows in case.rows:
            leaves = [numbers(rows, 4), *shared]
            want = derivatives(right, leaves, case.order)
            assume(all(float(g.abs().max()) < LARGEST for g in want))  # NaN is not
            assume(is_conditioned(case, leaves, want))
            for k, (g, w) in enumerate(
                zip(derivatives(ours, leaves, case.order), want, strict=True)
            ):
                scale = max(1.0, float(w.abs().max()))
                wrong = float((g - w).abs().max()) / scale
                assert wrong < 1e-9, f"derivative {k} of {rows} rows is wrong by {wrong}: {case}"
    assert not faults.reported(), case


# Found by the many. Dynamo cannot trace the frame that takes the slope, and traced the backward
# that it calls, for whose guards a checkpoint would have had to unpack twice.
_SLOPE = Step("slope", 1, (Step("tanh", 0), Step("tanh", 1)))
_TRACED = Case(
    (Step("checkpoint", 0, (_SLOPE, _SLOPE), compiled=True),),
    whole=True,
    returns="an integer",
    order=2,
    dynamic=False,
    everything=True,
    rows=(6, 9),
)
# A graph whose caller does not record and that itself does.
_RECORDED = Case(
    (Step("without a tape", 0, (Step("slope", 0, (Step("product"),)),)),),
    whole=True,
    returns="one value",
    order=2,
    dynamic=False,
    everything=False,
    rows=(6,),
)


@settings(max_examples=4, derandomize=True, **QUIET)
@example(case=_TRACED)
@example(case=_RECORDED)
@given(cases())
def test_random_programs(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    check(case, monkeypatch)


class Broken(nn.Module):
    def __init__(self, breaks: int) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.breaks):
            torch._dynamo.graph_break()
        return x.sin()


def test_torch_recomputes_what_it_has_compiled_with_other_code() -> None:
    """A mistake of torch's, at first order and with any backend: a frame that breaks in a loop is
    not compiled any more, nor is then any other of the same code, and a checkpoint that recorded
    one as compiled code runs it in eager mode. Random programs' blocks have code of their own.
    """
    torch._dynamo.reset()
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Tensor) -> Any:
            ran.append("compiled")
            return graph.forward(*inputs)

        return run

    x = torch.randn(3, requires_grad=True)
    whole, broken = (torch.compile(Broken(breaks), backend=backend) for breaks in (0, 1))
    y = checkpoint(whole, x, use_reentrant=False)
    assert ran == ["compiled"]
    checkpoint(broken, y, use_reentrant=False).sum().backward()
    assert ran == ["compiled"]  # and not once more


@pytest.mark.sweep
@settings(max_examples=400, print_blob=True, **QUIET)
@given(cases())
def test_many_random_programs(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    check(case, monkeypatch)
