"""Passes and bytes that a plan stands for, counted by hand for small regions."""

from __future__ import annotations

import pytest

from normpass.backend.caches import Caches, caches_of
from normpass.backend.traffic import Traffic, traffic

ROWS, ROW = 32, 64
LAYER_NORM_BACKWARD = """
region layer_norm_backward
axes    r=? c=64
input   x: f32[r c]
input   mean: f32[r 1]
input   rstd: f32[r 1]
input   g: f32[r c]
input   w: f32[c]
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
gw      = mul(g, w)
sum     = sum[c](gw)
a       = div(sum, 64.0)
prod    = mul(gw, x_hat)
sum_1   = sum[c](prod)
b       = div(sum_1, 64.0)
sub_1   = sub(gw, a)
mul     = mul(x_hat, b)
sub_2   = sub(sub_1, mul)
dx      = mul(rstd, sub_2)
gx      = mul(g, x_hat)
dw      = sum[r](gx)
output  y0: f32[r c] = dx
output  y1: f32[c] = dw
"""
WHOLE = ROWS * ROW * 4  # bytes of x, of g and of dx
WRITTEN = WHOLE + ROW * 4
ONCE = 2 * WHOLE + 2 * ROWS * 4 + ROW * 4  # x, g, mean, rstd, w
A_ROW = 3 * ROW * 4  # x, g and w, which the first phase over a row touches


def test_one_pass_where_a_row_stays_in_cache() -> None:
    found = traffic(LAYER_NORM_BACKWARD, [ROWS], "cpu", Caches(worker=2 * A_ROW, shared=1 << 20))
    assert found == Traffic(ONCE, WRITTEN, 1)
    assert found.moved == ONCE + WRITTEN


def test_two_passes_where_it_does_not() -> None:
    found = traffic(LAYER_NORM_BACKWARD, [ROWS], "cpu", Caches(worker=A_ROW - 1, shared=1 << 20))
    # x and g twice; w, which fits no more, in both phases of every row.
    assert found.read == 4 * WHOLE + 2 * ROWS * 4 + 2 * ROWS * ROW * 4
    assert found.written == WRITTEN
    assert found.passes == 2


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_run_time_sizes_count(rows: int) -> None:
    found = traffic(LAYER_NORM_BACKWARD, [rows], "cpu", Caches(1 << 20, 1 << 25))
    assert found.moved == 3 * rows * ROW * 4 + 2 * rows * 4 + 2 * ROW * 4


CHANNELS_LAST = """
region batch_norm_backward
axes    r=4096 c=8
input   x: f32[r c]
input   g: f32[r c]
prod    = mul(g, x)
sum     = sum[r](prod)
mul     = mul(x, sum)
sub     = sub(g, mul)
output  y0: f32[r c] = sub
output  y1: f32[c] = sum
"""


@pytest.mark.parametrize(("shared", "passes"), [(1 << 20, 1), (4096 * 8 * 4, 2)])
def test_statistics_over_the_whole_tensor(shared: int, passes: int) -> None:
    # Rows are summed over, so the first phase ends with the tensor: the last cache decides.
    found = traffic(CHANNELS_LAST, [], "cpu", Caches(worker=1 << 10, shared=shared))
    assert found.passes == passes
    assert found.read == passes * 2 * 4096 * 8 * 4
    assert found.written == 4096 * 8 * 4 + 8 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_this_machine_has_caches(device: str) -> None:
    caches = caches_of(device)
    assert caches.worker > 0
    assert caches.shared > 0
