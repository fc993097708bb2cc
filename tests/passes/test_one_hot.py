"""Integers in a region: compared with their positions along an axis, and added up where one of them
counts. The values are checked against the same mathematics in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import CONDITIONS
from tracing import trace

from normpass.backend.run.op import region_op
from normpass.passes.cost import Work
from normpass.passes.one_hot import EXACT, are_positions
from normpass.passes.pipeline import Decision, Fused, Refused, fuse_graph
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from normpass.passes.region import Region

aten, prims = torch.ops.aten, torch.ops.prims
WIDTH = 40
# Positions, what is next to the first and the last, and what float32 rounds: to others, none of
# which is a position.
INDICES = (0, 39, 7, -1, 40, 2**24 + 1, 2**31 + 7, 2**53 + 1, 2**63 - 1, -(2**63), -100)
X = torch.randn(len(INDICES), WIDTH, generator=torch.Generator().manual_seed(0))


def regions(f: Callable[..., Tensor], *inputs: Tensor) -> list[Region]:
    """The regions of a function, after a check that the graph computes what the function does."""
    graph = trace(f, *inputs)
    decisions = fuse_graph(graph.graph, region_op, least_bytes=0)
    graph.graph.lint()
    graph.recompile()
    exact = f(*(x.double() if x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(graph(*inputs), exact.to(X.dtype), rtol=1e-5, atol=1e-6)
    return [parse(d.text) for d in decisions if isinstance(d, Fused)]


def index(dtype: torch.dtype = torch.int64) -> Tensor:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor([min(max(i, least), most) for i in INDICES], dtype=dtype)[:, None]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integers_are_compared_with_positions(dtype: torch.dtype) -> None:
    (region,) = regions(
        lambda x, i: (x * (torch.arange(WIDTH, dtype=dtype) == i)).softmax(-1), X, index(dtype)
    )
    assert {buffer.dtype for buffer in region.inputs} == {dtype, torch.int32, torch.float32}


def gradient(x: Tensor, i: Tensor) -> Tensor:
    """Of a cross entropy, as Inductor writes it."""
    g = torch.where(i == torch.arange(WIDTH), -1.0, 0.0) * x[:, :1]
    return g - x.exp() * g.sum(-1, keepdim=True)


def test_one_position_is_not_added_up() -> None:
    (region,) = regions(gradient, X, index())
    assert not any(op.is_reduction for op in region.ops)


def test_factors_are_taken_out() -> None:
    def f(x: Tensor, i: Tensor) -> Tensor:
        g = 0.5 * (torch.where(torch.arange(WIDTH) == i, x[:, 1:2], 0.0) * x[:, :1]) * x[:1, :1]
        return g - x.exp() * g.sum(-1, keepdim=True)

    (region,) = regions(f, X, index())
    assert not any(op.is_reduction for op in region.ops)


def smoothed(x: Tensor, i: Tensor) -> Tensor:
    g = torch.where(torch.arange(WIDTH) == i, -0.9, 0.0) - 0.1 / WIDTH
    return g - x.exp() * g.sum(-1, keepdim=True)


def with_weights(x: Tensor, i: Tensor) -> Tensor:
    g = torch.where(torch.arange(WIDTH) == i, x, 0.0)
    return g - x.exp() * g.sum(-1, keepdim=True)


def but_one(x: Tensor, i: Tensor) -> Tensor:
    g = torch.where(torch.arange(WIDTH) == i, 0.0, x[:, :1])
    return g - x.exp() * g.sum(-1, keepdim=True)


def of_other_integers(x: Tensor, i: Tensor) -> Tensor:
    g = torch.where((torch.arange(WIDTH) == i) & (x > 0), -1.0, 0.0)
    return g - x.exp() * g.sum(-1, keepdim=True)


def over_rows(x: Tensor, i: Tensor) -> Tensor:
    g = torch.where(torch.arange(WIDTH) == i, -1.0, 0.0)
    return g - x.exp() * g.sum(0, keepdim=True)


def in_two_axes(x: Tensor, i: Tensor) -> Tensor:
    position = torch.arange(WIDTH).view(4, 10)
    g = torch.where(position == i[..., None], -1.0, 0.0)
    return g - x.view(-1, 4, 10).exp() * g.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "f", [smoothed, with_weights, but_one, of_other_integers, over_rows, in_two_axes]
)
def test_what_counts_everywhere_is_added_up(f: Callable[..., Tensor]) -> None:
    (region,) = regions(f, X, index())
    assert [op.fn for op in region.ops if op.is_reduction] == ["sum"]


def test_what_is_not_finite_stays_so() -> None:
    """Infinity and NaN as what a position counts: as they do in float64."""
    x = X.clone()
    x[0, 0], x[1, 0], x[2, 5], x[3, 0] = torch.nan, torch.inf, torch.nan, torch.nan
    graph = trace(gradient, x, index())
    assert [type(d) for d in fuse_graph(graph.graph, region_op, least_bytes=0)] == [Fused]
    graph.recompile()
    found, exact = graph(x, index()), gradient(x.double(), index())
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


ROWS, WORDS = 512, 4096
LOGITS, WORD = torch.randn(ROWS, WORDS), torch.randint(WORDS, (ROWS, 1))
FACTORS = torch.randn(ROWS, 8), torch.randn(8, WORDS)


def of_logits(x: Tensor, i: Tensor) -> Tensor:
    g = torch.where(torch.arange(WORDS) == i, -1.0, 0.0)
    return g - x.exp() * g.sum(-1, keepdim=True)


def of_a_layer(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return of_logits(x @ w, i)


def in_other_dimensions(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return of_logits(x @ w, i).view(4, -1, WORDS)


def with_the_gradient_of_a_bias(x: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    g = of_logits(x @ w, i)
    return g, g.sum(0)


def that_are_needed(x: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ w
    return of_logits(logits, i), logits.cumsum(0)


def that_are_needed_as_a_view(x: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ w
    return of_logits(logits, i), logits.view(-1)


def in_less_precision(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
    return of_logits(x @ w, i).bfloat16()


def decision(
    f: Callable[..., Any], *inputs: Tensor, donated: bool = False, over: Sequence[str] = ()
) -> Decision:
    """Where nothing is asked for. over: what a kernel may write its result over."""
    graph = trace(f, *inputs).graph
    own = set(graph.find_nodes(op="placeholder")) if donated else set()
    (found,) = fuse_graph(
        graph,
        region_op,
        kernel=lambda lowered, cost: Work(cost.least, 0, over=frozenset(over)),
        conditions=lambda device: CONDITIONS,
        donated=own,
    )
    return found


OVER = "more memory: 8.39 MB, where Inductor writes over what it reads"


@pytest.mark.parametrize(
    "f", [of_a_layer, in_other_dimensions, with_the_gradient_of_a_bias], ids=lambda f: f.__name__
)
def test_logits_that_inductor_writes_over_stay_with_it(f: Callable[..., Any]) -> None:
    refused = decision(f, *FACTORS, WORD)
    assert isinstance(refused, Refused)
    assert refused.reason == OVER


@pytest.mark.parametrize(
    "f",
    [that_are_needed, that_are_needed_as_a_view, in_less_precision],
    ids=lambda f: f.__name__,
)
def test_logits_that_it_cannot_write_over_do_not(f: Callable[..., Any]) -> None:
    assert isinstance(decision(f, *FACTORS, WORD), Fused)


@pytest.mark.parametrize("f", [of_a_layer, in_other_dimensions], ids=lambda f: f.__name__)
def test_logits_that_a_kernel_writes_over_as_well_do_not(f: Callable[..., Any]) -> None:
    fused = decision(f, *FACTORS, WORD, over=["x"])
    assert isinstance(fused, Fused)
    assert "input   x: f32" in fused.text
    assert isinstance(decision(f, *FACTORS, WORD, over=["w"]), Refused)


def test_inputs_are_written_over_if_they_are_donated() -> None:
    assert isinstance(decision(of_logits, LOGITS, WORD), Fused)
    refused = decision(of_logits, LOGITS, WORD, donated=True)
    assert isinstance(refused, Refused)
    assert refused.reason == OVER


def test_a_factor_that_is_not_finite_counts_at_every_position() -> None:
    """Zero times infinity is NaN, so that a sum over one position is NaN as well."""
    scale = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, 0.0, 2.0] * 2)[: len(X), None]

    def f(x: Tensor, i: Tensor, scale: Tensor) -> Tensor:
        here = torch.arange(WIDTH) == i
        g = torch.where(here, x[:, :1], 0.0) * scale
        return torch.where(here, x, x.exp() * g.sum(-1, keepdim=True))

    graph = trace(f, X, index(), scale)
    (fused,) = fuse_graph(graph.graph, region_op, least_bytes=0)
    assert isinstance(fused, Fused)
    assert "sum[" not in fused.text
    graph.recompile()
    exact = f(X.double(), index(), scale.double()).float()
    found = graph(X, index(), scale)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6, equal_nan=True)


def shifted(x: Tensor, i: Tensor) -> Tensor:
    return (x * (torch.arange(1, WIDTH + 1) == i)).softmax(-1)


def every_other(x: Tensor, i: Tensor) -> Tensor:
    return (x * (torch.arange(0, 2 * WIDTH, 2) == i)).softmax(-1)


def of_two_rows(x: Tensor, i: Tensor) -> Tensor:
    return (x * (i == i.view(1, -1)[:, :1])).softmax(-1)


def diagonal(x: Tensor, i: Tensor) -> Tensor:
    return (x[:, :11] * (torch.arange(11) == torch.arange(11)[:, None])).softmax(-1)


def far_apart(x: Tensor, i: Tensor) -> Tensor:
    """None of them is a position, and in 32 bits all were."""
    far = torch.arange(2**32, 2**32 + len(INDICES))[:, None]
    return (x * (torch.arange(WIDTH) == far)).softmax(-1)


def multiplied(x: Tensor, i: Tensor) -> Tensor:
    return (x * (torch.arange(WIDTH) * i)).softmax(-1)


def the_largest(x: Tensor, i: Tensor) -> Tensor:
    return (x * (torch.arange(WIDTH) == i.clamp(0, 3))).softmax(-1) + i.amax(0, keepdim=True)


def test_what_is_compared_keeps_its_size() -> None:
    (region,) = regions(far_apart, X, index())
    assert {buffer.dtype for buffer in region.inputs} > {torch.int64, torch.int32}


@pytest.mark.parametrize("f", [shifted, every_other, of_two_rows, diagonal, multiplied])
def test_other_integers_stay_outside(f: Callable[..., Tensor]) -> None:
    small = index().clamp(-100, 100)
    for region in regions(f, X, small):
        dtypes = {buffer.dtype for buffer in region.inputs}
        assert dtypes.isdisjoint({torch.int32, torch.int64}), region


def test_integers_that_are_used_outside_too() -> None:
    (region,) = regions(the_largest, X, index().clamp(-100, 100))
    assert {output.buffer.dtype for output in region.outputs} == {torch.float32}


@pytest.mark.parametrize(("length", "are"), [(EXACT, True), (EXACT + 1, False)])
def test_positions_are_exact_in_float32(length: int, are: bool) -> None:
    graph = torch.fx.Graph()
    made: Any = {"start": 0, "step": 1, "dtype": torch.int64, "device": "cpu"}
    iota = graph.call_function(prims.iota.default, (length,), {**made, "requires_grad": False})
    assert are_positions(graph.call_function(aten.unsqueeze.default, (iota, 0))) is are
