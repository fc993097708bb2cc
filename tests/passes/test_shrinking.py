"""What becomes of a region that is refused: the largest part of it that is accepted, and of norms
in one region those that are.

The values are checked against the same mathematics in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tracing import calls, functions, fuse, trace

from normpass.backend.run.op import region_op
from normpass.passes import pipeline, shrink
from normpass.passes.pipeline import Decision, Fused, Refused, fuse_graph
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import Graph, GraphModule

    from normpass.passes.lower import Lowered
    from normpass.passes.region import Region

aten = torch.ops.aten
# Large enough for a region of its own by default.
ROWS, WIDTH = 512, 1024
X, Y, Z = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(3))
INDEX = torch.arange(ROWS)[:, None] % WIDTH
SMALL, OTHER = X[:6, :40], Y[:6, :40]


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def masked(y: Tensor, i: Tensor) -> Tensor:
    """With a mask that no region may hold, and that Inductor computes where it is used."""
    return y * (torch.arange(WIDTH) != i)


def decided(graph: GraphModule) -> list[Decision]:
    """What is decided where nothing is asked for."""
    decisions = fuse_graph(graph.graph, region_op)
    graph.graph.lint()
    graph.recompile()
    return decisions


def check(
    f: Callable[..., Any],
    *inputs: Tensor,
    decide: Callable[[GraphModule], list[Decision]] = decided,
) -> tuple[list[Region], list[str]]:
    """The regions of a function and the reasons of what is refused, after a check that the graph
    computes what the function does in float64.
    """
    graph = trace(f, *inputs)
    decisions = decide(graph)
    exact = f(*(x.double() if x.is_floating_point() else x for x in inputs))
    found = graph(*inputs)
    several = isinstance(exact, tuple)
    for ours, right in zip(*((found, exact) if several else ([found], [exact])), strict=True):
        torch.testing.assert_close(ours, right.to(ours.dtype), rtol=1e-4, atol=1e-4)
    regions = [parse(d.text) for d in decisions if isinstance(d, Fused)]
    return regions, [d.reason for d in decisions if isinstance(d, Refused)]


def shapes(region: Region) -> list[str]:
    """Of what a region reads, the dtypes and axes."""
    return [str(buffer).partition(": ")[2] for buffer in region.inputs]


def stays(graph: Graph, **options: Any) -> Refused:
    """The only decision on a graph, which is refused, and leaves it as it was."""
    before = str(graph)
    (decision,) = fuse_graph(graph, region_op, **options)
    assert isinstance(decision, Refused)
    assert str(graph) == before
    graph.lint()
    return decision


# ---- an input that would be written for the region's sake


def test_a_norm_of_what_is_in_memory_is_fused_without_what_made_it() -> None:
    """Somebody else needs the sum too, so that it is written anyway."""

    def f(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        s = x + masked(y, i) / 0.9
        return rms(s), s

    regions, refused = check(f, X, Y, INDEX)
    assert not refused
    (region,) = regions
    assert shapes(region) == ["f32[r c]"]
    assert functions(region) >= {"rsqrt"}


def test_it_may_be_seen_otherwise() -> None:
    def f(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        s = (x.view(ROWS, 8, -1) + masked(y, i).view(ROWS, 8, -1)).view(ROWS, WIDTH)
        return rms(s), s

    regions, refused = check(f, X, Y, INDEX)
    assert not refused
    assert [shapes(region) for region in regions] == [["f32[r c]"]]


def test_random_numbers_are_cut_off_with_what_they_are_multiplied_with() -> None:
    """Dropout before a norm, in half precision, where nothing keeps the mask."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y * (torch.rand_like(y) > 0.1) / 0.9
        return rms(s), s

    a, b = (x.bfloat16().repeat(3, 1) for x in (X, Y))  # large enough without the dropout too
    graph = trace(f, a, b)
    (decision,) = decided(graph)
    assert isinstance(decision, Fused)
    assert shapes(parse(decision.text)) == ["bf16[r c]"]
    torch.manual_seed(0)
    y, s = graph(a, b)
    torch.manual_seed(0)
    keep = torch.rand(a.shape, dtype=torch.bfloat16) > 0.1
    exact = a.double() + b.double() * keep / 0.9
    torch.testing.assert_close(s.double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(y.double(), rms(s.double()), rtol=2e-2, atol=2e-2)


def test_what_is_only_made_for_the_norm_is_not_written_in_its_place() -> None:
    """That would be four times as much."""

    def f(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return rms(x + masked(y, i))

    decision = stays(trace(f, X, Y, INDEX).graph)
    assert decision.reason.startswith("more memory: 1.05 MB of ")


def test_what_depends_on_an_index_to_the_end_stays_with_inductor() -> None:
    """Were there one position, as in the gradient of a cross entropy, it would not."""

    def f(x: Tensor, i: Tensor) -> Tensor:
        g = torch.where(torch.arange(WIDTH) < i, -1.0, 0.0)
        return g - x.exp() * g.sum(-1, keepdim=True)

    decision = stays(trace(f, X, INDEX).graph)
    assert decision.reason.startswith("more memory: ")


def test_a_mask_in_memory_is_read() -> None:
    def f(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keep = torch.arange(WIDTH) != i
        s = x + y * keep
        return rms(s), s, keep

    regions, refused = check(f, X, Y, INDEX)
    assert not refused
    assert sorted(shapes(regions[0])) == ["b8[r c]", "f32[r c]", "f32[r c]"]


def test_what_a_norm_is_multiplied_with_is_cut_off_after_it() -> None:
    def f(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        y = rms(x)
        return y, masked(y, i).exp()

    regions, refused = check(f, X, INDEX)
    assert not refused
    assert [shapes(region) for region in regions] == [["f32[r c]"]]


# ---- a node that cannot be lowered


def with_product(x: Tensor, y: Tensor) -> Tensor:
    """By a product over an axis along which nothing changes."""
    same = y[:, :1].expand(x.shape)
    return x * same * (1 + same.prod(1)[:, None])


def test_a_node_that_cannot_be_lowered_stays_outside() -> None:
    regions, refused = check(lambda x, y: with_product(rms(x), y), SMALL, OTHER, decide=fuse)
    assert not refused
    (region,) = regions
    assert "prod" not in functions(region)
    assert functions(region) >= {"rsqrt", "mul"}


def test_what_only_feeds_it_stays_outside_too() -> None:
    """The region would have to write it."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        same = y[:, :1].expand(x.shape)
        return rms(x * same) + (same * 3).prod(1)[:, None]

    regions, refused = check(f, SMALL, OTHER, decide=fuse)
    assert not refused
    (region,) = regions
    assert "3.0" not in str(region)
    assert len(region.outputs) == 1


def test_a_detour_through_float64_starts_outside() -> None:
    def f(x: Tensor) -> Tensor:
        return centred(x.double()).float()

    graph = trace(f, SMALL)
    (decision,) = fuse(graph)
    assert isinstance(decision, Fused)
    assert shapes(parse(decision.text)) == ["f64[r c]"]
    x = SMALL + 1e6
    torch.testing.assert_close(graph(x), f(x), rtol=1e-6, atol=1e-6)


def test_a_graph_of_nothing_else_is_left_alone() -> None:
    """The only norm is what cannot be lowered."""

    def f(x: Tensor) -> Tensor:
        same = x[:, :1].expand(-1, 3)
        return same / same.prod(1, keepdim=True)

    decision = stays(trace(f, SMALL).graph, least_bytes=0)
    assert decision.reason == "a product over an axis along which nothing changes"


# ---- a size that is nowhere


def test_a_view_that_brings_in_an_unknown_size_stays_outside() -> None:
    """Of a flat tensor of rows times columns."""

    def f(x: Tensor) -> Tensor:
        return centred(x.flatten().cumsum(0).view(x.shape))

    graph = trace(f, SMALL, dynamic=True)
    (decision,) = fuse(graph)
    assert isinstance(decision, Fused)
    for rows, width in ((6, 40), (3, 7)):
        x = torch.randn(rows, width)
        torch.testing.assert_close(graph(x), f(x.double()).float(), rtol=1e-4, atol=1e-4)


def test_sizes_that_are_there_need_no_cut() -> None:
    tries = attempts(lambda x: centred(x.view(-1, 5, 8)).view(x.shape), SMALL)
    assert [type(attempt.decision) for attempt in tries] == [Fused]


# ---- what is at fault


def attempts(
    f: Callable[..., Any], *inputs: Tensor, least_bytes: int | None = 0
) -> list[pipeline.Attempt]:
    """Every region of a function that is grown and judged, in order."""
    return attempts_on(trace(f, *inputs).graph, least_bytes)


def attempts_on(graph: Graph, least_bytes: int | None = 0) -> list[pipeline.Attempt]:
    seen: list[pipeline.Attempt] = []
    attempt = pipeline.Search.attempt

    def noted(*args: Any, in_pieces: bool = False) -> pipeline.Attempt:
        made = attempt(*args, in_pieces=in_pieces)
        seen.extend(() if in_pieces else (made,))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.Search, "attempt", noted)
        fuse_graph(graph, region_op, least_bytes=least_bytes)
    return seen


def test_a_refusal_knows_what_is_at_fault() -> None:
    def written(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        return rms(x + masked(y, i))

    first, *_ = attempts(written, X, Y, INDEX, least_bytes=None)
    assert [x.target for x in first.fault.inputs] == [aten.ne.Tensor]
    first, *_ = attempts(lambda x, y: with_product(rms(x), y), SMALL, OTHER)
    assert first.fault.node is not None
    assert first.fault.node.target is aten.prod.dim_int
    flat = trace(lambda x: centred(x.flatten().cumsum(0).view(x.shape)), SMALL, dynamic=True)
    first, *_ = attempts_on(flat.graph)
    assert str(first.fault.size) == str(
        flat.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    )


def test_of_what_is_too_small_nothing_smaller_is_tried() -> None:
    (attempt,) = attempts(lambda x: rms(centred(x)), SMALL, least_bytes=1 << 30)
    assert isinstance(attempt.decision, Refused)
    assert not attempt.fault


# ---- norms in one region


def test_the_first_of_two_is_fused_without_the_second() -> None:
    def f(x: Tensor, z: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        y = centred(x)
        return rms(masked(z, i) + y), y

    regions, refused = check(f, X, Z, INDEX)
    (region,) = regions
    assert "rsqrt" not in functions(region)
    assert len(refused) == 1


def test_the_second_of_two_is_fused_without_the_first() -> None:
    def f(x: Tensor, z: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        s = centred(masked(x, i)) + z
        return rms(s), s

    regions, refused = check(f, X, Z, INDEX)
    (region,) = regions
    assert "rsqrt" in functions(region)
    assert shapes(region) == ["f32[r c]"]
    assert len(refused) == 1


def test_of_two_the_one_that_can_be_lowered_is_fused() -> None:
    """And of the other what it does with its reduction, which is no norm any more."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        same = y[:, :1].expand(x.shape)
        return rms(x) + same / same.prod(1, keepdim=True)

    regions, refused = check(f, SMALL, OTHER, decide=fuse)
    (region,) = regions
    assert functions(region) >= {"rsqrt", "add", "div"}
    assert "prod" not in functions(region)
    assert not refused


def one_at_a_time(lowered: Lowered) -> str | None:
    """A backend that has kernels for one reduction only."""
    count = sum(op.is_reduction for op in lowered.region.ops)
    return None if count == 1 else f"{count} at once"


def test_where_nobody_knows_why_each_has_a_chance_of_its_own() -> None:
    """Without a kernel for both: the second is fused, and what it has of the first comes along."""
    graph = trace(lambda x: (rms(x), centred(x)), SMALL)
    decisions = fuse_graph(graph.graph, region_op, least_bytes=0, missing=one_at_a_time)
    graph.recompile()
    assert [type(decision) for decision in decisions] == [Refused, Fused]
    assert len(calls(graph, region_op)) == len(calls(graph, aten.mean.dim)) == 1
    exact = SMALL.double()
    for found, right in zip(graph(SMALL), (rms(exact), centred(exact)), strict=True):
        torch.testing.assert_close(found, right.float())


def test_a_refused_region_is_reported_once() -> None:
    decision = stays(
        trace(lambda x: rms(centred(x)), SMALL).graph, least_bytes=0, missing=lambda _: "not today"
    )
    assert decision.reason == "not today"
    assert {"mean", "mean_1"} <= set(decision.nodes)


def test_tries_are_bounded() -> None:
    """Of many nodes that cannot be lowered one is left out at a time."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        z = rms(x)
        for k in range(8):
            z = with_product(z, y[:, k:])
        return z

    tries = attempts(f, SMALL, OTHER)
    seeds = 9
    assert 1 + shrink.MOST_TRIES <= len(tries) <= (1 + shrink.MOST_TRIES) * seeds
    assert all(len(attempt.left_out) <= 1 for attempt in tries)


# ---- a graph is as it was


def test_copies_of_every_try_are_taken_back() -> None:
    """A sum that leads out and back in is copied into each region that is tried."""

    def f(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        s = x + y
        return with_product(rms(s + s.sin() @ w), y)

    copied: list[int] = []
    copy_inputs = pipeline.copy_inputs

    def counted(graph: Graph, nodes: Any, copies: dict[Any, Any], barred: Any) -> None:
        copy_inputs(graph, nodes, copies, barred)
        copied.append(len(copies))

    graph = trace(f, SMALL, OTHER, SMALL.mT @ OTHER).graph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "copy_inputs", counted)
        decision = stays(graph, least_bytes=0, missing=lambda _: "no")
    assert decision.reason == "a product over an axis along which nothing changes"
    assert copied[:2] == [1, 1]


@pytest.mark.usefixtures("faults_are_meant")
def test_a_fault_in_leaving_something_out_leaves_the_region_to_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "left_out", None)
    decision = stays(trace(lambda x, y: with_product(rms(x), y), SMALL, OTHER).graph, least_bytes=0)
    assert decision.reason.startswith("a fault of normpass in leaving something out: TypeError")
