"""The decision: what a kernel would do against what Inductor would, and the reason given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tracing import trace

from normpass.passes import pipeline
from normpass.passes.cost import Caches, Calibration, Conditions, Costs, Work, parts, seconds
from normpass.passes.pipeline import Fused, Refused, fuse_graph
from normpass.passes.profit import Estimate, slower

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.passes.lower import Lowered
    from normpass.passes.pipeline import Decision

# A byte of memory takes 2 s, one of cache 1 s, a call 100 s, an exponential 10 s, a row 5 s, an
# element that is regrouped 4 s.
COSTS = Costs(
    launch=100,
    memory=2,
    cache=1,
    column=3,
    truth=6,
    row=5,
    regroup=4,
    functions=(("exp", 10.0), ("div", 1.0)),
)
ALIKE = Calibration(COSTS, COSTS)
WORK = Work(read=200, written=100, again=50, functions=(("div", 10), ("exp", 20)), rows=4)
LESS = replace(WORK, read=150)  # 100 s less
ESTIMATE = Estimate(least=300, levels=1, sizes=())

# ---- what work costs


def test_what_work_costs_by_hand() -> None:
    assert parts(WORK, COSTS) == {
        "launches": 100,
        "memory": 2 * 300,
        "for its sake": 0,
        "cache": 50,
        "columns": 0,
        "functions": 10 * 1 + 20 * 10,
        "rows": 4 * 5,
    }
    assert seconds(WORK, COSTS) == 100 + 600 + 50 + 210 + 20
    assert seconds(replace(WORK, columns=7), COSTS) == 980 + 21
    assert seconds(replace(WORK, for_its_sake=7), COSTS) == 980 + 14
    assert seconds(replace(WORK, truths=7), COSTS) == 980 + 42
    assert seconds(replace(WORK, regrouped=7), COSTS) == 980 + 28


def test_workers_share_all_but_calls() -> None:
    assert seconds(replace(WORK, workers=4), COSTS) == 100 + 880 / 4
    assert seconds(replace(WORK, launches=3), COSTS) == 980 + 200


def test_a_function_that_nobody_measured_costs_what_its_like_does() -> None:
    assert seconds(Work(0, 0, functions=(("expm1", 2), ("reciprocal", 3))), COSTS) == 100 + 20 + 3
    assert seconds(Work(0, 0, functions=(("sin", 2),)), COSTS) == 100


# ---- which is faster, and why


def reason(ours: Work, theirs: Work, estimate: Estimate = ESTIMATE) -> str | None:
    return slower(estimate, ours, theirs, ALIKE)


def test_what_is_faster_is_fused() -> None:
    assert reason(LESS, WORK) is None
    assert reason(WORK, LESS) is not None
    assert reason(WORK, WORK) is not None


def test_too_small() -> None:
    # One call more takes 100 s; 20 bytes less save 40 s of them, of each 300 bytes.
    slow = replace(WORK, read=180, launches=2)
    expected = "too small: it moves 300 B, a kernel of its own pays from 750 B"
    assert reason(slow, WORK) == expected
    # At 750 bytes it saves 50 of them, which are as much as the call, and here one more.
    assert (
        slower(
            replace(ESTIMATE, least=750),
            replace(WORK, read=500 - 51, written=250, launches=2),
            replace(WORK, read=500, written=250),
            ALIKE,
        )
        is None
    )


def test_a_call_that_saves_nothing() -> None:
    expected = "too small: it moves 300 B, where a call costs more than it saves"
    assert reason(replace(WORK, launches=2), WORK) == expected


def test_more_memory_for_its_sake() -> None:
    estimate = replace(ESTIMATE, for_its_sake=120, made=60)  # 120 s
    expected = "more memory: 120 B of 300 B would hold what Inductor computes where it is used"
    assert reason(LESS, WORK, estimate) == expected
    assert reason(LESS, WORK, replace(estimate, made=49)) is None
    assert reason(LESS, WORK, replace(estimate, made=40, truths=4)) == expected
    assert reason(LESS, WORK, replace(estimate, made=40, truths=3)) is None


def test_short_rows() -> None:
    # 150 s more, of which 100 s are saved elsewhere: in pieces half as long again it would pay.
    slow = replace(LESS, rows=14, regrouped=25, piece=32)
    expected = "short rows: they lie in pieces of 32 elements, a kernel of its own pays from 48"
    assert reason(slow, WORK) == expected
    assert reason(replace(slow, regrouped=12), WORK) is None
    alone = replace(WORK, rows=34, piece=32)
    assert reason(alone, WORK) == "short rows: they lie in pieces of 32 elements"


def test_more_passes() -> None:
    slow = replace(WORK, read=400, passes=3)
    assert reason(slow, replace(WORK, passes=2)) == (
        "more passes: 3 over memory, where Inductor needs 2"
    )
    assert reason(slow, replace(WORK, passes=3)) == (
        "more memory: 500 B and 50 B within cache, where Inductor moves 300 B and 50 B"
    )


def test_more_within_cache() -> None:
    assert reason(replace(LESS, again=250), WORK) == (
        "more memory: 250 B and 250 B within cache, where Inductor moves 300 B and 50 B"
    )
    assert reason(replace(LESS, again=149), WORK) is None


def test_more_functions() -> None:
    slow = replace(LESS, functions=(("div", 20), ("exp", 40)))
    expected = "more functions: exp 40 times, where Inductor needs 20"
    assert reason(slow, WORK) == expected
    # Ours take half as long.
    cheap = replace(ALIKE, ours=replace(COSTS, functions=(("div", 1.0), ("exp", 5.0))))
    assert slower(ESTIMATE, slow, WORK, cheap) is None


def test_columns_of_inductors_are_dear() -> None:
    assert reason(replace(WORK, launches=2), replace(WORK, columns=34)) is None
    assert reason(replace(WORK, launches=2), replace(WORK, columns=33)) is not None


# ---- the decision in its place

X = torch.randn(64, 256)
CONDITIONS = Conditions(Caches(1 << 20, 1 << 25), private=1 << 20, threads=2, calibration=ALIKE)


def decide(
    moved: int,
    conditions: Callable[[str], Conditions | None] = lambda device: CONDITIONS,
    **options: int,
) -> Decision:
    """About a softmax of which Inductor reads and writes 64 KiB each, of one whose kernel moves so
    much in so many passes.
    """

    def kernel(lowered: Lowered, cost: Estimate) -> Work:
        return Work(moved, 0, passes=options.get("passes", 1), workers=2)

    graph = trace(lambda x: x.softmax(-1), X)
    least = {name: value for name, value in options.items() if name == "least_bytes"}
    (decision,) = fuse_graph(
        graph.graph, lambda *_: None, kernel=kernel, conditions=conditions, **least
    )
    return decision


def refused(decision: Decision) -> str:
    assert isinstance(decision, Refused)
    return decision.reason


def test_the_faster_one_is_taken() -> None:
    assert isinstance(decide(2 * 4 * X.numel()), Fused)
    assert refused(decide(100 * 4 * X.numel())).startswith("more memory: ")


def test_what_takes_no_longer_than_a_call_is_not_even_planned() -> None:
    theirs = replace(COSTS, memory=1e-9, cache=1e-9, row=1e-9, functions=())
    dear = replace(CONDITIONS, calibration=Calibration(COSTS, replace(theirs, launch=99)))
    decision = decide(0, lambda device: dear)
    assert refused(decision) == "too small: it moves 131 kB, where a call costs more than it saves"


def test_the_users_least_bytes_is_all_that_counts() -> None:
    moved = 100 * 4 * X.numel()
    size = 2 * 4 * X.numel()
    assert isinstance(decide(moved, least_bytes=size), Fused)
    assert refused(decide(0, least_bytes=size + 1)) == (
        "too small: it moves 131 kB, a kernel of its own pays from 131 kB"
    )


def test_but_for_passes() -> None:
    # Two reductions that wait for one another, and what is made of them.
    assert isinstance(decide(0, least_bytes=0, passes=3), Fused)
    expected = "more passes: 4 over memory, where Inductor needs 3"
    assert refused(decide(0, least_bytes=0, passes=4)) == expected


@pytest.mark.parametrize(
    "conditions", [lambda device: None, lambda device: replace(CONDITIONS, calibration=None)]
)
def test_where_nothing_was_measured_sizes_decide(
    conditions: Callable[[str], Conditions | None],
) -> None:
    expected = "too small: it moves 131 kB, a kernel of its own pays from 4.19 MB"
    assert refused(decide(0, conditions)) == expected


def test_nothing_is_compared_where_there_is_no_element() -> None:
    graph = trace(lambda x: x.softmax(-1), X[:0]).graph
    (decision,) = fuse_graph(graph, lambda *_: None, conditions=lambda device: CONDITIONS)
    assert refused(decision) == "too small: it moves 0 B, where a call costs more than it saves"


@pytest.mark.usefixtures("faults_are_meant")
def test_a_fault_in_the_comparison_leaves_a_region_to_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "theirs", None)
    assert "a fault of normpass in weighing" in refused(decide(0))


def estimated(function: Callable[..., object], *inputs: Tensor) -> Estimate:
    """The estimate of the first region of a function."""
    seen: list[Estimate] = []

    def kernel(lowered: Lowered, cost: Estimate) -> Work:
        seen.append(cost)
        return Work(0, 0)

    fuse_graph(trace(function, *inputs).graph, lambda *_: None, least_bytes=0, kernel=kernel)
    return seen[0]


def test_truth_values_are_dear_to_write() -> None:
    index = torch.randint(256, (64, 1))
    mask = estimated(lambda x, i: (x * (torch.arange(256) < i)).softmax(-1), X, index)
    # The mask is written, for which its lines are read, and what it is made of is read.
    made = 2 * X.numel() + 8 * 256 + 8 * 64
    assert (mask.truths, mask.made) == (X.numel(), made)
    wide = estimated(lambda x, i: (x + (torch.arange(256) * i)).softmax(-1), X, index)
    assert wide.truths == 0
    none = estimated(lambda x, y: (x + y).softmax(-1), X, torch.randn(64, 1))
    assert (none.truths, none.made, none.for_its_sake) == (0, 0, 0)


def test_two_regions_share_a_mask() -> None:
    index = torch.randint(256, (64, 1))

    def f(x: Tensor, i: Tensor) -> Tensor:
        mask = (torch.arange(256) < i)[None]
        y = (x * mask).softmax(-1).cumsum(0)
        return (y * mask).softmax(-1)

    found = estimated(f, X[None], index)
    assert (found.truths, found.made) == (X.numel() // 2, X.numel() + 8 * 256 + 8 * 64)
