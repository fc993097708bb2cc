"""Training steps over several processes by torch's own engines: the gradients are those of one
process with the whole batch in eager mode, and the norms are fused all the same.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import rank_steps
from rank_steps import LARGE, WAYS, alone
from ranks import COLLECTIVE, RankFailed, Ranks, needs_gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

pytestmark = needs_gloo
# Of the largest number of each gradient, in float64: the ranks' sums are added in another order.
ROUNDING = 1e-13
# Each kind of engine once with Inductor, the rest of the graph uncompiled in the others.
WITH_INDUCTOR = (
    "compiled DDP, several buckets",
    "FSDP2 by block, checkpointed",
    "sequence parallel",
    "SimpleFSDP",
)
CASES = [
    *((way, 2, "inductor") for way in WITH_INDUCTOR),
    *(
        pytest.param(way, 2, "eager", marks=[pytest.mark.sweep] * (way in WITH_INDUCTOR))
        for way in WAYS
    ),
    ("FSDP2 by block", 4, "eager"),
    pytest.param("pipeline", 3, "eager", marks=pytest.mark.sweep),
    *(
        pytest.param(way, 4, "eager", marks=pytest.mark.sweep)
        for way in (
            "compiled DDP, several buckets",
            "SimpleFSDP",
            "tensor parallel",
            "sequence parallel",
            "rows sharded",
        )
    ),
]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """A group of so many ranks, the same for all tests."""
    made: dict[int, Ranks] = {}
    with ExitStack() as stack:

        def group(count: int) -> Ranks:
            if count not in made:
                store = tmp_path_factory.mktemp("ranks") / "store"
                made[count] = stack.enter_context(Ranks(count, store))
            return made[count]

        yield group


def off(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """How far gradients are from the right ones, of the largest number of each."""
    return max(
        float((found[name] - right[name]).abs().max() / right[name].abs().max()) for name in found
    )


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("way", "count", "inner"), CASES)
def test_gradients(way: str, count: int, inner: str, groups: Callable[[int], Ranks]) -> None:
    ranks = groups(count)
    if "parallel" in way:
        # torch 2.13's DTensor keeps what another plan has left in its caches, and AOTAutograd then
        # fails under every backend ("Node tangents_2 was invalid, but is output").
        ranks.restart()
    right = alone(*LARGE) if "buckets" in way else alone()
    answers = ranks(rank_steps.run, way, "normpass", inner)
    assert {name for found, _ in answers for name in found} == right.keys()
    allowed = ROUNDING
    if "bfloat16" in way:
        allowed = 2 * max(off(eager, right) for eager, _ in ranks(rank_steps.run, way, None, ""))
    for found, counts in answers:
        assert off(found, right) <= allowed
        refused = [key for key in counts if key.startswith("refused")]
        assert not refused
        assert any(key.startswith("fused") and key.endswith("backward") for key in counts)
        assert any(key.startswith("fused") and not key.endswith("backward") for key in counts)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_a_step_traced_as_one_graph(count: int, groups: Callable[[int], Ranks]) -> None:
    ranks = groups(count)
    right = alone()
    for stock, counts in ranks(rank_steps.traced_step, False):
        assert off(stock, right) <= ROUNDING
        assert not counts
    for found, counts in ranks(rank_steps.traced_step, True):
        assert found.keys() == right.keys()
        assert off(found, right) <= ROUNDING
        assert any(key.startswith("fused") and key.endswith("backward") for key in counts)


def test_a_rank_that_dies_does_not_hang_the_others(groups: Callable[[int], Ranks]) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 0: .*rank 1: expected an answer, found it d"):
        groups(2)(rank_steps.dies, 1)
    assert time.monotonic() - began < COLLECTIVE
