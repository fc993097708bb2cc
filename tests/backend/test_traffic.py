"""Passes, bytes and functions that a plan stands for, counted by hand for small regions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton_regions

from normpass.backend.program.traffic import traffic
from normpass.backend.run.caches import caches_of
from normpass.passes.cost import Caches, Conditions

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


def machine(worker: int, shared: int, threads: int = 2) -> Conditions:
    return Conditions(Caches(worker, shared), 1 << 20, threads, calibration=None)


def test_one_pass_where_a_row_stays_in_cache() -> None:
    found = traffic(LAYER_NORM_BACKWARD, [ROWS], "cpu", machine(worker=2 * A_ROW, shared=1 << 20))
    assert (found.read, found.written, found.passes) == (ONCE, WRITTEN, 1)
    assert found.moved == ONCE + WRITTEN


def test_two_passes_where_it_does_not() -> None:
    found = traffic(LAYER_NORM_BACKWARD, [ROWS], "cpu", machine(worker=A_ROW - 1, shared=1 << 20))
    # x and g twice; w, which fits no more, in both phases of every row.
    assert found.read == 4 * WHOLE + 2 * ROWS * 4 + 2 * ROWS * ROW * 4
    assert found.written == WRITTEN
    assert found.passes == 2


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_run_time_sizes_count(rows: int) -> None:
    found = traffic(LAYER_NORM_BACKWARD, [rows], "cpu", machine(1 << 20, 1 << 25))
    assert found.moved == 3 * rows * ROW * 4 + 2 * rows * 4 + 2 * ROW * 4


def test_what_is_read_again_comes_from_cache() -> None:
    found = traffic(LAYER_NORM_BACKWARD, [ROWS], "cpu", machine(2 * A_ROW, 1 << 20))
    # The phase that writes dx reads x, g and w again. Sums over rows are an array of one worker's,
    # which is written, combined, and read when dw is stored.
    assert found.again == 2 * WHOLE + ROW * 4 + 3 * ROW * 4
    assert found.workers == 1
    # A loop over a row in each phase, and one over dw.
    assert found.rows == 2 * ROWS + 1
    assert found.piece == ROW
    assert found.launches == 1
    assert dict(found.functions) == {"div": 2 * ROWS}  # a and b, once a row


def test_every_worker_has_partial_sums() -> None:
    rows = 4096
    one, two = (
        traffic(LAYER_NORM_BACKWARD, [rows], "cpu", machine(1 << 20, 1 << 25, threads))
        for threads in (1, 2)
    )
    assert (one.workers, two.workers) == (1, 2)
    assert two.again - one.again == 2 * ROW * 4
    assert replace(two, again=one.again, workers=1) == one


SOFTMAX = """
region softmax
axes    r=? c=64
input   x: f32[r c]
amax    = amax[c](x)
sub     = sub(x, amax)
exp     = exp(sub)
sum     = sum[c](exp)
div     = div(exp, sum)
output  y0: f32[r c] = div
"""


def test_a_dear_function_is_computed_once() -> None:
    found = traffic(SOFTMAX, [ROWS], "cpu", machine(1 << 20, 1 << 25))
    assert dict(found.functions) == {"exp": ROWS * ROW, "div": ROWS * ROW}
    # x for the sum, after it was read for the maximum; the exponentials are written and read.
    assert found.again == 3 * WHOLE


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
    found = traffic(CHANNELS_LAST, [], "cpu", machine(worker=1 << 10, shared=shared))
    assert found.passes == passes
    assert found.read == passes * 2 * 4096 * 8 * 4
    assert found.written == 4096 * 8 * 4 + 8 * 4


# ---- launches of a GPU of four multiprocessors, each of which runs four programs of four warps


def gpu(cache: int) -> Conditions:
    return machine(worker=1, shared=cache, threads=4)


def test_programs_read_what_they_hold_once() -> None:
    rows, programs = 4096, 16
    found = traffic(LAYER_NORM_BACKWARD.replace("r=?", f"r={rows}"), [], "cuda", gpu(1 << 20))
    whole = rows * ROW * 4
    assert found.read == 2 * whole + 2 * rows * 4 + ROW * 4
    assert found.written == whole + ROW * 4
    # w for every program but the first, and each one's part of dw, written and read.
    assert found.again == (programs - 1) * ROW * 4 + 2 * programs * ROW * 4
    assert dict(found.functions) == {"div": 2 * rows}
    assert (found.passes, found.launches, found.workers) == (1, 2, 4)


def test_rows_of_which_sums_alone_are_held_are_read_again() -> None:
    """From the cache: a program has added up the weight's gradient of all of its rows."""
    rows, row, programs = 64, 16384, 4
    text = triton_regions.fill(
        triton_regions.RMS_NORM_BACKWARD, r=str(rows), c=str(row), t="bf16", w="f32"
    )
    found = traffic(text, [], "cuda", gpu(1 << 25))
    whole = rows * row * 2
    assert found.read == 2 * whole + rows * 4 + row * 4
    assert (found.written, found.passes) == (whole + row * 4, 1)
    parts = 2 * programs * row * 4
    assert found.again == 2 * whole + (programs - 1) * row * 4 + parts


PRIME = 2**17 - 1  # no blocks divide it


@pytest.mark.parametrize(
    ("cache", "passes"), [(1 << 25, 1), (8 * 4 * PRIME, 1), (8 * 4 * PRIME - 1, 3)]
)
def test_streamed_rows_stay_if_those_of_all_programs_do(cache: int, passes: int) -> None:
    rows, row = 256, PRIME  # a program has eight warps: eight of them run at once
    text = SOFTMAX.replace("r=?", f"r={rows}").replace("c=64", f"c={row}")
    found = traffic(text, [], "cuda", gpu(cache))
    whole = rows * row * 4
    assert (found.read, found.again) == (passes * whole, (3 - passes) * whole)
    assert (found.written, found.passes, found.launches) == (whole, passes, 1)
    # What is not held is computed again.
    assert dict(found.functions) == {"exp": 2 * rows * row, "div": rows * row}


@pytest.mark.parametrize(("cache", "passes"), [(1 << 20, 1), (2 * 4096 * 8 * 4 - 1, 2)])
def test_a_launch_finds_what_an_earlier_one_read(cache: int, passes: int) -> None:
    found = traffic(CHANNELS_LAST, [], "cuda", gpu(cache))
    both, programs = 2 * 4096 * 8 * 4, 16
    assert (found.read, found.passes, found.launches) == (passes * both, passes, 3)
    # Every program's sums, and theirs together, are written and read.
    assert found.again == (2 - passes) * both + 2 * (programs + 1) * 8 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_this_machine_has_caches(device: str) -> None:
    caches = caches_of(device)
    assert caches.worker > 0
    assert caches.shared > 0
