"""What a region writes: what must be in memory, and nothing that is better computed again; and what
it leaves outside: integers and random numbers.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from tracing import calls, functions, fuse, fused, trace

from normpass.passes.cost import Work
from normpass.passes.pipeline import Fused, fuse_graph
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from torch import Tensor

    from normpass.passes.lower import Lowered
    from normpass.passes.profit import Estimate
    from normpass.passes.region import Region

aten = torch.ops.aten
X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))


def written(region: Region) -> list[str]:
    """The shapes of what a region writes."""
    return [" ".join(sorted(output.buffer.axes)) for output in region.outputs]


# --- what is written ----------------------------------------------------------------------------


def test_a_cross_entropy_gathers_from_what_is_not_written() -> None:
    (region,) = fused(lambda x, i: F.cross_entropy(x, i), X, torch.randint(40, (6,)))
    assert written(region) == ["r", "r"]


def test_a_gather_of_most_of_it_is_written_for() -> None:
    index = torch.randint(40, (6, 30))
    (region,) = fused(lambda x, i: x.log_softmax(-1).gather(1, i), X, index)
    assert written(region) == ["c r"]


def test_what_the_caller_gets_is_written_for_all() -> None:
    def f(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        y = x.log_softmax(-1)
        return y, y.gather(1, i)

    (region,) = fused(f, X, torch.randint(40, (6, 1)))
    assert written(region) == ["c r"]


def test_a_cast_is_computed_again_for_a_pointwise_reader() -> None:
    def f(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return F.layer_norm(wide, (40,)).cumsum(0) + wide

    (region,) = fused(f, X.bfloat16())
    assert written(region) == ["c r"]


def test_nothing_is_read_for_what_is_computed_outside() -> None:
    """The product of a second normalization, which stands behind a matrix product."""

    def f(x: Tensor, y: Tensor, w: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        total = (x * w).sum(-1, keepdim=True)
        z = x * w - total
        return z, ((y - mean) * (z @ w.outer(w))).sum(0)

    x = X.double()
    (region,) = fused(f, x, x.sin(), x[0], x[:, :1].cos())
    assert written(region) == ["c r"]
    assert [str(buffer).partition(": ")[2] for buffer in region.inputs] == ["f64[r c]", "f64[c]"]


def test_a_sum_of_two_tensors_is_written() -> None:
    """Reading both of them again takes as long."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        both = x + y
        return F.layer_norm(both, (40,)).cumsum(0) + both

    (region,) = fused(f, X, X.sin())
    assert written(region) == ["c r", "c r"]


def test_what_is_computed_again_starts_from_what_is_written() -> None:
    """An exponential that is written anyway; one more is added to it, and that is not."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        power = x.exp()
        more = power + 1
        late = (more / more.sum(-1, keepdim=True)).cumsum(0)
        return late + power, late * more

    (region,) = fused(f, X)
    assert written(region) == ["c r", "c r"]


def test_what_is_written_is_not_computed_again_for_a_gather() -> None:
    def f(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        power = x.exp()
        more = power + 1
        late = (more / more.sum(-1, keepdim=True)).cumsum(0)
        return late + power, more.gather(1, i)

    graph = trace(f, X, torch.randint(40, (6, 1)))
    (decision,) = fuse(graph)
    assert isinstance(decision, Fused)
    assert written(parse(decision.text)) == ["c r", "c r"]
    assert not calls(graph, aten.exp.default)


def test_every_reader_would_read_again() -> None:
    """Six bytes for each of them, or four that somebody wrote."""

    def f(count: int, x: Tensor, y: Tensor) -> list[Tensor]:
        both = x + y
        late = F.layer_norm(both, (40,)).cumsum(0)
        return [late + both, late * both][:count]

    for count, expected in ((1, ["c r"]), (2, ["c r", "c r"])):
        (region,) = fused(functools.partial(f, count), X, X.sin().bfloat16())
        assert written(region) == expected


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_normalized_tensor_is_computed_again_of_its_statistics() -> None:
    """As a gradient in the same graph needs it: behind the matrix product of what is written."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = normalized(x)
        return (y.relu() @ w.outer(w)) * y

    (region,) = fused(f, X, X[0])
    assert written(region) == ["r", "c r"]


def test_a_normalized_tensor_is_written_for_who_needs_nothing_else() -> None:
    """With its statistics alone there would be no norm."""

    def f(x: Tensor) -> Tensor:
        power = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(power + 1e-6) * power.cumsum(0)

    (region,) = fused(f, X)
    assert written(region) == ["r", "c r"]


def test_what_is_small_is_no_reason_to_compute_again() -> None:
    """Something of the statistics is written too, but nothing as large as the tensor."""

    def f(x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * scale * (scale * 2).cumsum(0)

    (region,) = fused(f, X)
    assert written(region) == ["c r", "r"]


def test_a_mean_s_gradient_is_computed_again() -> None:
    """A number of each row, divided by how many there are, where a mask lets it through."""

    def f(x: Tensor, g: Tensor, seen: Tensor) -> Tensor:
        spread = torch.where(seen, g.expand(6, 40) / 40, 0.0)
        return F.layer_norm(x * spread, (40,)).cumsum(0) + spread

    (region,) = fused(f, X, X[:, :1].cos(), X > 0)
    assert written(region) == ["c r"]


def test_an_exponential_is_written() -> None:
    def f(x: Tensor) -> Tensor:
        power = x.exp()
        return (power / power.sum(-1, keepdim=True)).cumsum(0) + power

    (region,) = fused(f, X)
    assert written(region) == ["c r", "c r"]


def test_a_product_is_written_for_a_matrix_product() -> None:
    (region,) = fused(lambda x, w: F.layer_norm(x, (40,), w) @ w.outer(w), X, X[0])
    assert written(region) == ["c r"]


# --- what stays outside -------------------------------------------------------------------------


def test_a_mask_of_positions() -> None:
    def f(x: Tensor) -> Tensor:
        i = torch.arange(40)
        return torch.where(i[:, None] >= i, x, -1e9).softmax(-1)

    (region,) = fused(f, torch.randn(3, 40, 40))
    assert [str(buffer).partition(": ")[2] for buffer in region.inputs] == ["b8[q c]", "f32[r q c]"]


def test_a_mask_of_integers() -> None:
    """As models of transformers pass it: ones and zeros, cast and added."""
    mask = torch.randint(2, (3, 1, 40))
    (region,) = fused(
        lambda x, m: (x + (1 - m.to(torch.float32)) * -1e9).softmax(-1), torch.randn(3, 7, 40), mask
    )
    assert functions(region) >= {"amax", "exp", "sum"}
    assert len(region.inputs) == 2


def test_random_numbers_are_drawn_outside() -> None:
    """What is in memory is the truth value that dropout keeps for the backward."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.rand_like(x) > 0.1
        return x.softmax(-1) * keep / 0.9, keep

    graph = trace(f, X)
    torch.manual_seed(0)
    expected = graph(X)
    (decision,) = fuse(graph)
    torch.manual_seed(0)
    torch.testing.assert_close(graph(X), expected)
    assert isinstance(decision, Fused)
    dtypes = {buffer.dtype for buffer in parse(decision.text).inputs}
    assert dtypes == {torch.float32, torch.bool}
    assert calls(graph, aten.gt.Scalar)


def for_its_sake(f: object, *inputs: Tensor) -> int:
    seen: list[int] = []

    def kernel(_: Lowered, cost: Estimate) -> Work:
        seen.append(cost.for_its_sake)
        return Work(cost.least, 0)

    graph = trace(f, *inputs)  # type: ignore[arg-type]
    fuse_graph(graph.graph, lambda *_: None, least_bytes=0, kernel=kernel)
    return seen[0]


def test_what_inductor_computes_where_it_is_used_is_counted() -> None:
    index = torch.randint(40, (6, 1))

    def masked(x: Tensor, i: Tensor) -> Tensor:
        return (x * (torch.arange(40) < i)).softmax(-1)

    def kept(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.arange(40) < i
        return (x * before).softmax(-1), before

    def behind_views(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        before = (torch.arange(40) < i)[:, None].expand(-1, 7, -1)
        return (x * before).softmax(-1), (x.cumsum(0) * before).sum(0)

    def kept_as_a_view(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        before = (torch.arange(40) < i)[:, None]
        return (x * before).softmax(-1), before

    assert for_its_sake(masked, X, index) == 2 * X.numel()
    assert for_its_sake(kept, X, index) == 0
    higher = torch.randn(6, 7, 40)
    assert for_its_sake(behind_views, higher, index) == 2 * X.numel()
    assert for_its_sake(kept_as_a_view, higher, index) == 0
    assert for_its_sake(lambda x: x.softmax(-1), X) == 0


def test_a_mask_as_large_as_the_activation_stays_with_inductor() -> None:
    index = torch.randint(4096, (256, 1))
    graph = trace(
        lambda x, i: (x * (torch.arange(4096) < i)).softmax(-1), X.new_ones(256, 4096), index
    )
    (decision,) = fuse_graph(graph.graph, lambda *_: None)
    assert "Inductor computes where it is used" in decision.reason  # type: ignore[union-attr]
