"""A region's text beside its kernel: a line of that belongs to the value that it computes."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import pytest

from normpass.backend.explain.side_by_side import computed, kernel_lines, region_lines

EXPECT = Path(__file__).parents[2] / "expect"
VALUES = {"x", "x_1", "mean", "rstd", "sum", "dw", "y0", "n"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("const Vec x = load<scalar>(p_x + r * 512 + c, lanes);", "x"),
        ("        const scalar rstd = rsqrt_(add);", "rstd"),
        ("    mean = lib.divide(total, 1000.0)", "mean"),
        ("  Vec acc_sum[UNROLL];", None),
        ("  accumulate<Sum>(acc_sum[slot], x, lanes);", "sum"),
        ("  accumulate<Sum>(held_dw, mul, lanes);", "dw"),
        ("  scalar acc_sum = Sum::neutral<scalar>();", "sum"),
        ("  write(p_y0 + r * 512 + c, add_1, lanes, past_caches);", "y0"),
        ("  Row::write(p_y0 + at, y, k);", "y0"),
        ("    tl.store(p_y0 + r, mean, mask=mask_r)", "y0"),
        ("  slots_x_1.read(x_1, stage, k);", "x_1"),
        ("  const auto p_x = static_cast<const float*>(tensors[0]);", None),
        ("  const int64_t r = number;", None),
        ("// mean    = div(sum, 512.0)", None),
        ("# mean    = div(sum, 512.0)", None),
        ("  if (x == mean) {", None),
        ("  prefetch(p_x + r * 512 + c + 1024);", None),
    ],
)
def test_the_value_that_a_line_computes(line: str, value: str | None) -> None:
    assert computed(line, VALUES) == value


@pytest.mark.parametrize("dialect", ["cpp", "triton", "cuda"])
def test_every_value_of_a_kernel_that_is_kept_is_found(dialect: str) -> None:
    """In the snapshots: what a region's text defines is computed somewhere in its kernel."""
    files = sorted((EXPECT / dialect).glob("layer_norm*.txt"))
    assert files
    mark = "#" if dialect == "triton" else "//"
    for file in files:
        for text in re.split(rf"(?m)^(?={mark} region )", file.read_text())[1:]:
            comment = takewhile(lambda line: line.startswith(f"{mark} "), text.splitlines())
            region = [line.removeprefix(f"{mark} ") for line in comment]
            shown = kernel_lines(text, "\n".join(region))
            assert f"{mark} region" not in shown
            for line in region:
                value, _, rest = line.partition(" ")
                # How many there are is a number, which some kernels have as such.
                if rest.lstrip().startswith("= ") and "numel()" not in rest:
                    assert f'data-v="{value}"' in shown, f"{value} of {file.name}"


def test_lines_that_define_nothing_are_not_marked() -> None:
    text = "region layer_norm\naxes    r=4 c=8\ninput   x: f32[r c]\nmul     = mul(x, x)\n"
    marked = region_lines(f"{text}output  y0: f32[r c] = mul")
    assert marked.splitlines() == [
        "region layer_norm",
        "axes    r=4 c=8",
        '<span data-v="x">input   x: f32[r c]</span>',
        '<span data-v="mul">mul     = mul(x, x)</span>',
        '<span data-v="y0">output  y0: f32[r c] = mul</span>',
    ]
