"""What Inductor would do with a region's nodes, counted by hand: loops, bytes, functions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from inductor_counts import (
    BACKWARD,
    COLUMN,
    LARGE,
    NOTHING_FITS,
    ROW,
    ROWS_FIT,
    WHOLE,
    B,
    C,
    R,
    W,
    X,
    aten,
    in_inference,
    layer_norm,
    layer_norm_backward,
    needs_two_steps,
    outer_loops,
    work,
)
from torch._inductor import config
from torch.nn import functional as F
from tracing import trace

from normpass.passes.inductor_work import theirs
from normpass.passes.lower import lower
from normpass.passes.regions import Grower, seeds

if TYPE_CHECKING:
    from torch import Tensor

    from normpass.passes.cost import Conditions

# ---- rows


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_norm_over_rows_is_one_group(dynamic: bool) -> None:
    found = work(in_inference, X, W, B, dynamic=dynamic)
    assert found.launches == 1
    assert found.read == WHOLE + 2 * ROW
    assert found.again == WHOLE
    assert found.written == WHOLE
    assert found.passes == 1
    assert found.columns == 0
    # Variance and mean in one loop. What does not change along a row is computed once for it.
    assert dict(found.functions) == {"welford": R * C, "div": R, "rsqrt": R}
    assert found.rows == 2 * R


@pytest.mark.parametrize("dynamic", [False, True])
def test_statistics_that_are_returned_set_its_loops_apart(dynamic: bool) -> None:
    """Those of all rows are computed at once, by a loop along the rows."""
    found = work(layer_norm, X, W, B, dynamic=dynamic, conditions=ROWS_FIT)
    assert found.launches == 3
    assert found.read == 2 * WHOLE + COLUMN + 2 * ROW
    assert found.again == 0
    assert found.written == WHOLE + 2 * COLUMN
    assert found.passes == 2
    # The loop of the result needs the mean, the one of rstd the variance.
    assert dict(found.functions) == {"welford": R * C, "div": 2 * R, "rsqrt": R}


def test_so_few_rows_have_no_lanes() -> None:
    assert work(layer_norm, X[:4], W, B).launches == 3
    few = work(layer_norm, torch.randn(3, 800), torch.randn(800), torch.randn(800))
    assert few.launches == 1


def test_rows_much_longer_than_there_are_of_them_are_divided() -> None:
    def loops(rows: int, columns: int, **how: bool) -> int:
        return work(lambda x: x.softmax(-1), torch.randn(rows, columns), **how).launches

    assert loops(4, 1200) == 1
    assert loops(4, 1201) == 3
    assert loops(4, 1201, dynamic=True) == 1
    # Inductor has no outer loop to share, and the number alone needs none.
    assert loops(1, 4096) == 3


def test_a_row_that_does_not_fit_is_read_again_from_memory() -> None:
    found = work(in_inference, X, W, B, conditions=NOTHING_FITS)
    assert found.passes == 2
    assert found.read == 2 * WHOLE + 2 * ROW
    assert found.again == 0


@needs_two_steps
@pytest.mark.parametrize("conditions", [ROWS_FIT, NOTHING_FITS])
def test_a_variance_of_few_numbers_goes_over_memory_twice(conditions: Conditions) -> None:
    """And what is made of it once more: no loop over rows is around all three."""
    few = config.cpp.use_two_step_variance_threshold
    x, w = torch.randn(64, few), torch.randn(few)

    def norm(x: Tensor, w: Tensor) -> object:
        return aten.native_layer_norm(x, x.shape[-1:], w, w, 1e-5)

    found = work(norm, x, w, conditions=conditions)
    assert found.passes == 3
    assert found.read == 3 * 4 * x.numel() + 4 * few + 4 * 64
    assert found.again == 0
    assert found.launches == 5  # the mean, its division, the variance, rstd, and the result
    assert "welford" not in dict(found.functions)
    more = work(norm, torch.randn(64, few + 1), torch.randn(few + 1), conditions=conditions)
    assert more.passes == 2
    assert "welford" in dict(more.functions)


@needs_two_steps
def test_one_variance_of_few_numbers_is_found_at_once() -> None:
    def f(x: Tensor) -> Tensor:
        return x - torch.var_mean(x)[0]

    assert "welford" in dict(work(f, torch.randn(8, 32)).functions)


@needs_two_steps
def test_a_number_of_columns_that_is_not_known_is_many() -> None:
    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    few = torch.randn(16, 64)
    assert "welford" not in dict(work(norm, few).functions)
    assert "welford" in dict(work(norm, few, dynamic=True).functions)


def test_gradients_of_weights_are_a_group_of_their_own() -> None:
    found = work(layer_norm_backward, *BACKWARD)
    inputs = 2 * WHOLE + 2 * COLUMN + ROW
    assert found.launches == 2
    assert found.read == inputs
    # The loop of dx reads all again, and the one of dweight and dbias all but the weight.
    assert found.again == inputs + 2 * WHOLE + 2 * COLUMN
    assert found.columns == 2 * WHOLE
    assert found.written == WHOLE + 2 * ROW
    assert dict(found.functions) == {"div": 2 * R}  # two means, for each row of dx


def test_they_read_from_memory_what_fits_in_no_cache() -> None:
    found = work(layer_norm_backward, *BACKWARD, conditions=ROWS_FIT)
    assert found.passes == 2
    assert found.read == 2 * (2 * WHOLE + 2 * COLUMN) + ROW
    assert found.again == 2 * WHOLE + 2 * COLUMN + ROW


def test_a_line_is_read_before_it_is_overwritten() -> None:
    moved = 2 * WHOLE + 2 * ROW
    within = replace(LARGE, threads=1, private=moved)
    beyond = replace(within, private=moved - 1)
    before = work(in_inference, X, W, B, conditions=within)
    after = work(in_inference, X, W, B, conditions=beyond)
    assert after == replace(before, read=before.read + before.written)


def test_few_elements_are_one_workers() -> None:
    many = replace(LARGE, threads=R * C // 512)
    assert work(layer_norm, X, W, B, conditions=many).workers == many.threads
    too_many = replace(LARGE, threads=R * C // 512 + 1)
    assert work(layer_norm, X, W, B, conditions=too_many).workers == 1


# ---- channels

N, CHANNELS, SIDE = 4, 8, 18
IMAGE = torch.randn(N, CHANNELS, SIDE, SIDE)
SCALE = torch.randn(CHANNELS)
IMAGES = 4 * IMAGE.numel()


def batch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, w, training=True)


def group_norm(x: Tensor, *weights: Tensor) -> Tensor:
    return F.group_norm(x, 2, *weights)


def test_batch_norm_is_two_groups() -> None:
    assert outer_loops(batch_norm, IMAGE, SCALE) == [CHANNELS, IMAGE.numel()]
    found = work(batch_norm, IMAGE, SCALE)
    assert found.launches == 2
    assert found.read == IMAGES + 4 * CHANNELS
    assert found.again == IMAGES
    assert found.columns == 0
    # A group of its own computes the deviation for each element.
    assert dict(found.functions) == dict.fromkeys(("welford", "div", "rsqrt"), IMAGE.numel())
    # A loop over the pixels of each channel of each image, in both.
    assert found.rows == 2 * N * CHANNELS


def test_its_channels_may_be_columns() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return batch_norm(x.permute(0, 3, 1, 2), w).permute(0, 2, 3, 1)

    x = IMAGE.permute(0, 2, 3, 1).contiguous()
    assert work(f, x, SCALE).columns == IMAGES


def test_weights_tell_group_norms_examples_from_its_groups() -> None:
    assert outer_loops(group_norm, IMAGE, SCALE, SCALE) == [2 * N, IMAGE.numel()]
    assert outer_loops(group_norm, IMAGE) == [2 * N]


def test_instance_norm_without_weights_is_one_group() -> None:
    assert outer_loops(lambda x: F.instance_norm(x), IMAGE) == [N * CHANNELS]


# ---- what is computed, and where


def test_what_is_dear_and_needed_twice_is_stored() -> None:
    found = work(lambda x: x.softmax(-1), X)
    assert found.launches == 1
    assert dict(found.functions) == {"exp": R * C, "div": R * C}
    # x for the exponentials, which are written and read again in cache.
    assert found.again == 3 * WHOLE
    assert found.written == WHOLE


def test_what_is_cheaper_is_computed_in_each_loop() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        return y / y.sum(-1, keepdim=True)

    found = work(f, X)
    assert dict(found.functions) == {"sin": 2 * R * C, "div": R * C}
    assert found.again == WHOLE


def test_what_reads_many_tensors_is_stored() -> None:
    def f(*inputs: Tensor) -> Tensor:
        first, *rest = inputs
        y = sum(rest, first)
        return y / y.sum(-1, keepdim=True)

    four, five = (work(f, *(torch.randn(R, C) for _ in range(k))) for k in (4, 5))
    assert four.again == 4 * WHOLE
    assert five.again == 2 * WHOLE  # written and read


def test_what_is_reused_by_way_of_a_view_is_stored() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.exp().view(R // 2, 2, C)
        return y / y.sum(-1, keepdim=True)

    assert dict(work(f, X).functions) == {"exp": R * C, "div": R * C}


def test_a_variance_and_its_mean_are_two_that_are_read() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, keepdim=True)
        y = ((x - mean) * var * w + b).sin()
        return y / y.sum(-1, keepdim=True)

    assert dict(work(f, X, W, B).functions)["sin"] == R * C
    assert dict(work(lambda x, w, b: f(x, w, w), X, W, B).functions)["sin"] == 2 * R * C


def test_a_stored_value_that_another_group_reads_is_in_memory() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.tanh()
        return y / y.sum(-1, keepdim=True), y.sum(0)

    assert work(f, X).written == WHOLE + ROW + WHOLE


def test_a_mask_that_a_backward_needs_is_written() -> None:
    """Truth values, one by one."""

    def norm_then_relu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = batch_norm(x, w).relu()
        return y, y <= 0

    assert work(norm_then_relu, IMAGE, SCALE).truths == IMAGE.numel()


def test_a_mask_that_the_same_graph_uses_is_computed_there() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.softmax(-1)
        return torch.where(y > 0.5, x, y)

    graph = trace(f, X).graph
    (outside,) = graph.find_nodes(op="call_function", target=aten.where.self)
    region = Grower(graph).grow(seeds(graph)[0], {outside})
    assert region is not None
    lowered = lower("region", region.nodes, region.domain)
    assert any(node.target is aten.gt.Scalar for node in lowered.outputs)
    assert theirs(region.nodes, region.domain, lowered, (), LARGE).truths == 0


def test_what_is_broadcast_and_dear_is_stored() -> None:
    found = work(lambda x: x - x.exp().sum(-1, keepdim=True).log(), X)
    assert dict(found.functions) == {"exp": R * C, "log": R}
    assert found.launches == 3


def test_a_view_of_a_result_is_one() -> None:
    found = work(lambda x: F.layer_norm(x, [C]).view(2, -1), X)
    assert found.again == WHOLE
    assert found.rows == 2 * R


def test_a_reduction_that_stays_outside_is_read() -> None:
    graph = trace(lambda x: x.softmax(-1), X).graph
    (largest,) = graph.find_nodes(op="call_function", target=aten.amax.default)
    (seed,) = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    region = Grower(graph).grow(seed, {largest})
    assert region is not None
    lowered = lower("region", region.nodes, region.domain)
    found = theirs(region.nodes, region.domain, lowered, (), LARGE)
    assert largest in lowered.inputs
    assert found.read == WHOLE + COLUMN


def test_a_mask_is_made_where_it_is_used() -> None:
    index = torch.randint(C, (R, 1))
    found = work(lambda x, i: (x * (torch.arange(C) < i)).softmax(-1), X, index)
    indices = 8 * C + 8 * R
    assert found.read == WHOLE + indices
    # The loop of the exponentials makes it once more; they are written and read.
    assert found.again == WHOLE + indices + 2 * WHOLE


def test_a_mask_that_others_need_is_read() -> None:
    index = torch.randint(C, (R, 1))

    def f(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(C) < i
        return (x * mask).softmax(-1), mask

    found = work(f, X, index)
    assert found.read == WHOLE + R * C
    assert found.again == WHOLE + R * C + 2 * WHOLE


def test_functions_of_what_is_made_count() -> None:
    """An integer's logarithm is not the region's."""
    index = torch.randint(1, C, (R, C))
    found = work(lambda x, i: (x + i.log()).amax(-1, keepdim=True) - x, X, index)
    assert dict(found.functions) == {"log": R * C}


@pytest.mark.parametrize(
    ("exponent", "priced"), [(2, {}), (0.5, {"sqrt": R * C}), (1.7, {"pow": R * C})]
)
def test_powers_that_multiplication_gives_cost_nothing(
    exponent: float, priced: dict[str, int]
) -> None:
    found = work(lambda x: x / x.pow(exponent).sum(-1, keepdim=True), X)
    assert dict(found.functions) == {"div": R * C, **priced}
