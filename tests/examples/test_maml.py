"""examples/maml.py: it trains as eager does, in float64."""

from __future__ import annotations

import pytest
import torch
from example_runs import INNER, assert_trains_as_eager
from higher_order_cases import IGNORED

from normpass.examples import maml

pytestmark = [*IGNORED, pytest.mark.usefixtures("float64")]


@pytest.mark.sweep
@pytest.mark.parametrize("inner", INNER)
def test_training_is_eagers(inner: str) -> None:
    assert_trains_as_eager(maml.training, inner, filters=4, tasks=1, inner_steps=2)


@pytest.mark.sweep
@pytest.mark.parametrize("queries", [5, 15])
def test_the_inner_steps_as_a_whole(queries: int) -> None:
    """Queries of another number than shots have another size."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        sizes = {"filters": 4, "tasks": 1, "inner_steps": 2, "queries": queries}
        assert_trains_as_eager(maml.training, "inductor", whole=True, **sizes)


@pytest.mark.sweep
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_other_queries_than_shots(inner: str) -> None:
    sizes = {"filters": 4, "tasks": 1, "inner_steps": 2, "queries": 15}
    assert_trains_as_eager(maml.training, inner, **sizes)
