"""Which loops at the top workers divide, and in which order they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import triton_regions
from launched import BACKWARD, axes_of, forward

from normpass.backend.program.listing import listing
from normpass.backend.program.plan import make_plan
from normpass.backend.program.tree import Loop
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from normpass.backend.program.tree import Plan

# ---- loops at the top


def divided(plan: Plan) -> list[bool]:
    return [node.parallel for node in plan.body if isinstance(node, Loop)]


@pytest.mark.parametrize(("columns", "by_all"), [(65536, True), (32768, False)])
def test_long_loops_that_only_write_are_everybodys(columns: int, by_all: bool) -> None:
    text = BACKWARD.format(r=512, c=columns, dtype="f32")
    assert divided(make_plan(parse(text))) == [True, by_all]


def test_what_adds_up_or_keeps_stays_one_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normpass.backend.program.nests.DIVIDED", 1)
    text = triton_regions.fill(triton_regions.BATCH_NORM_BACKWARD, c="64", r="6", x="r c s")
    assert divided(make_plan.__wrapped__(parse(text))) == [False, True, False, True]


# ---- the order of loops that are divided together


def test_divided_loops_go_in_the_order_of_memory() -> None:
    """Sums over the pixels of two images are of all pixels at once; a worker reads one image."""
    plan = make_plan(parse(forward({"n": 2, "s": 512, "c": 64}, "n s c", "s", "bf16")))
    assert axes_of(plan) == ["s", "n", "c"]
    nests = [node for node in plan.body if isinstance(node, Loop) and node.parallel]
    assert {nest.axis.name for nest in nests} == {"n"}
    assert "for n, divided among workers\n    for s, divided among workers" in listing(plan)


# ---- what is asked for ahead of time

CHANNELS = """
region log_softmax
axes    n=8 c=21 s=%s
input   x: f32[n c s]
top     = amax[c](x)
less    = sub(x, top)
e       = exp(less)
total   = sum[c](e)
output  y0: f32[n 1 s] = top
output  y1: f32[n 1 s] = total
"""


@pytest.mark.parametrize(("pixels", "asks"), [(1024, True), (65536, False)])
def test_images_that_leave_the_caches_are_not_asked_for(pixels: int, asks: bool) -> None:
    """An image of 5.5 MB that is asked for during the one before it: 0.55x as fast."""
    assert (f"ahead {21 * pixels}" in listing(make_plan(parse(CHANNELS % pixels)))) is asks
