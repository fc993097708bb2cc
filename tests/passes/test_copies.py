"""What a region computes again inside, where a path leads out of it and back in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from tracing import fuse, fused, trace

from normpass.passes import pipeline
from normpass.passes.pipeline import Refused, fuse_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ROWS, WIDTH = 6, 40
G, H, K, L = (torch.randn(ROWS, WIDTH) for _ in range(4))
W = torch.randn(WIDTH, WIDTH)


def added_on_both_sides(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """As a residual's gradient: the sum goes to the norm, and into a product that goes there."""
    s = g + h
    return F.layer_norm(s + s.sin() @ w, (WIDTH,))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sum_that_leads_out_and_back_is_computed_inside(dynamic: bool) -> None:
    (region,) = fused(added_on_both_sides, G, H, W, dynamic=dynamic)
    assert len(region.inputs) == 3  # g, h and the product
    assert sum(op.fn == "add" for op in region.ops) >= 2


def test_the_reader_outside_has_its_own() -> None:
    graph = trace(added_on_both_sides, G, H, W)
    fuse(graph)
    (sine,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    (s,) = sine.all_input_nodes
    assert s.target is torch.ops.aten.add.Tensor
    assert set(s.users) == {sine}


def test_what_it_is_made_of_may_be_looked_at_otherwise() -> None:
    def f(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
        s = (g.view(-1, 5, 8) / 3.0 + h.view(-1, 5, 8)).view(-1, WIDTH)
        return F.layer_norm(s + s.sin() @ w, (WIDTH,))

    (region,) = fused(f, G, H, W)
    assert len(region.inputs) == 3
    fused(f, G, H, W, dynamic=True)  # where rows of eight are none of the region's: right as well


def test_what_is_written_to_afterwards_is_read_before() -> None:
    def f(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
        s = g + h
        y = F.layer_norm(s + s.sin() @ w, (WIDTH,))
        g.add_(y)
        return y

    def values(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        g = G.clone()
        return function(g, H, W), g

    options = {"least_bytes": 0, "inner": "eager"}
    found = values(torch.compile(f, backend="normpass", options=options))
    torch.testing.assert_close(found, values(f))


def test_two_of_one_source() -> None:
    """The second is made of the first."""

    def f(g: Tensor, h: Tensor, w: Tensor) -> Tensor:
        s = g + h
        t = s * 2.0
        return F.layer_norm(s * t + (s.sin() + t.cos()) @ w, (WIDTH,))

    (region,) = fused(f, G, H, W)
    assert len(region.inputs) == 3


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda g, h, i, j: (g + h, (g + h) * 1.5), id="in memory anyway"),
        pytest.param(lambda g, h, i, j: (g.exp() + h,), id="expensive"),
        pytest.param(lambda g, h, i, j: (g + h + i + j,), id="of more than it is"),
        pytest.param(lambda g, h, i, j: (g * 2 * h * 3 * g * 5 * h * 7 * g,), id="in many steps"),
    ],
)
def test_what_is_better_read(made: Callable[..., tuple[Tensor, ...]]) -> None:
    def f(g: Tensor, h: Tensor, i: Tensor, j: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        s, *rest = made(g, h, i, j)
        product = s @ w if rest else s.sin() @ w
        return F.layer_norm(s + product, (WIDTH,)), *rest

    (region,) = fused(f, G, H, K, L, W)
    assert len(region.inputs) == 2


def test_a_region_that_is_refused_leaves_no_copies() -> None:
    graph = trace(added_on_both_sides, G, H, W).graph
    before = str(graph)
    (decision,) = fuse_graph(graph, print, least_bytes=1 << 30)
    assert isinstance(decision, Refused)
    assert str(graph) == before


@pytest.mark.usefixtures("faults_are_meant")
def test_nor_does_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(added_on_both_sides, G, H, W).graph
    before = str(graph)
    monkeypatch.setattr(pipeline, "lower", None)
    (decision,) = fuse_graph(graph, print, least_bytes=0)
    assert isinstance(decision, Refused)
    assert str(graph) == before
