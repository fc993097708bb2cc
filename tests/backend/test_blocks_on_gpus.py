"""Axes in blocks on GPUs: few long rows for all programs, gradients of long rows complete block by
block, variances in one sweep. What kernels compute is among the cases of test_triton.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from launched import BACKWARD, axes_of, forward
from triton_ahead import source

from normpass.backend.program.machine import GPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.traffic import traffic
from normpass.passes.cost import Caches, Conditions
from normpass.passes.region import product
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from normpass.backend.program.tree import Launch, Plan

MULTIPROCESSORS = 132  # of an H100


def planned(text: str) -> Plan:
    return make_plan(parse(text), GPU)


def programs(launch: Launch, plan: Plan) -> int:
    """How many programs there can be at most."""
    blocks = launch.blocks
    shares = -(-product(plan.axis[a].hint for a in blocks.shares) // blocks.size.get("", 1))
    tiles = (a for a in launch.outer if a.name not in blocks.shares)
    return shares * product(-(-axis.hint // blocks.size[axis.name]) for axis in tiles)


def elements(launch: Launch) -> int:
    return product(axis.hint for axis in (*launch.outer, *launch.inner))


FEW = {
    "layer norm": forward({"r": 3, "c": 262144}, "r c", "c"),
    "its backward": BACKWARD.format(r=3, c=262144, dtype="f32"),
    "its backward of bfloat16": BACKWARD.format(r=1, c=1048576, dtype="bf16"),
    "instance norm of large images": forward({"r": 12, "s": 1048576}, "r s", "s"),
    "batch norm of few channels": forward({"n": 2, "c": 3, "s": 262144}, "n c s", "n s"),
    "channels last": forward({"n": 1048576, "c": 3}, "n c", "n"),
    "a norm of a whole tensor": forward({"c": 4194304}, "c", "c"),
}


@pytest.mark.parametrize("name", FEW)
def test_few_long_rows_are_divided_among_programs(name: str) -> None:
    plan = planned(FEW[name])
    assert axes_of(plan)[0].endswith("_block")
    large = [launch for launch in plan.launches if elements(launch) >= 500_000]
    assert len(large) == 2  # over all that is read, and again over what is written
    assert all(programs(launch, plan) >= MULTIPROCESSORS for launch in large)


@pytest.mark.parametrize(
    ("rows", "columns", "first"),
    [
        (4096, 8192, "r"),  # in registers
        (4096, 16384, "r"),  # in a second-level cache, those of all programs
        (4096, 32768, "c_block"),
        (200, 16384, "r"),  # few, and not long
        (4096, 65537, "r"),  # of no blocks: a prime
    ],
)
def test_rows_that_caches_hold_stay_whole(rows: int, columns: int, first: str) -> None:
    assert axes_of(planned(BACKWARD.format(r=rows, c=columns, dtype="f32")))[0] == first


SUMS_OF_BOTH = """\
region sums_of_both
axes    r=4096 c={c}
input   x: f32[r c]
row     = sum[c](x)
column  = sum[r](x)
output  y0: f32[r] = row
output  y1: f32[c] = column
"""


@pytest.mark.parametrize(("columns", "resident"), [(20000, True), (40000, False)])
def test_sums_along_rows_stay_in_registers(columns: int, resident: bool) -> None:
    """Rows are read once, and the sums of all of a program's rows are added to for each of them: 20
    thousand are in a program's registers, 40 thousand are not.
    """
    first, *_ = planned(SUMS_OF_BOTH.format(c=columns)).launches
    assert ("c" in first.blocks.resident) == resident


@pytest.mark.parametrize(
    ("columns", "dtype", "pieces", "again"),
    [
        (768, "bf16", (256, 3), False),
        (1000, "bf16", (1024, 1), False),  # little would be saved
        (5120, "bf16", (1024, 5), False),
        (8192, "f32", (8192, 1), False),
        (12288, "bf16", (2048, 6), True),  # sums alone are held
        (16384, "bf16", (2048, 8), True),
    ],
)
def test_rows_in_pieces(columns: int, dtype: str, pieces: tuple[int, int], again: bool) -> None:
    blocks = planned(BACKWARD.format(r=4096, c=columns, dtype=dtype)).launches[0].blocks
    assert (blocks.size["c"], blocks.pieces.get("c", 1)) == pieces
    assert blocks.again == again
    assert "c" in blocks.resident


@pytest.mark.parametrize(("columns", "dtype"), [(16384, "f32"), (20480, "bf16")])
def test_what_no_program_holds_is_streamed(columns: int, dtype: str) -> None:
    """There is no room to fetch such a row ahead."""
    blocks = planned(BACKWARD.format(r="?", c=columns, dtype=dtype)).launches[0].blocks
    assert "c" not in blocks.resident
    assert not blocks.again


def test_a_gradient_of_long_rows_is_complete_block_by_block() -> None:
    """No program has an array as long as a row in memory."""
    text = source("layer_norm_backward", c="65536").text
    assert "parts_dw" not in text
    assert "tl.store(p_grad_w" in text


def gpu(cache: int) -> Conditions:
    return Conditions(Caches(1, cache), 1, 4, calibration=None)


@pytest.mark.parametrize(
    "text",
    [
        forward({"r": 4096, "c": 65536}, "r c", "c"),
        forward({"r": 2, "c": 262144}, "r c", "c"),
        forward({"n": 32, "c": 64, "s": 12544}, "n c s", "n s"),
        forward({"n": 100352, "c": 64}, "n c", "n"),
    ],
)
def test_variances_take_one_sweep(text: str) -> None:
    """Memory is gone over for the statistics, and once more for what is written."""
    plan = planned(text)
    assert any(op.name.endswith("_lost") for op in plan.region.ops)
    found = traffic(text, [], "cuda", gpu(1 << 20))
    whole = product(axis.hint for axis in plan.axes) * 4
    assert 2 * whole <= found.read <= 2.1 * whole
    assert found.passes == 2
