"""The text form of regions: what is written is read back, what breaks the grammar is named."""

from __future__ import annotations

import pytest
import torch

from normpass.passes.region import Axis, Buffer, Op, Output, Region, RegionError, verify
from normpass.passes.region_text import parse

TEXT = """\
region layer_norm_backward
axes    r=? c=1024
sizes   t0=?
input   g: bf16[r c] (t0, 1)
input   w: f32[c]
input   m: b8[(r c)]
input   s: f32[r 1]
numel   = numel[r]()
where   = where(m, g, 0.0)
mul     = mul(where, w)
sum     = sum[c](mul)
amax    = amax[r c](mul)
sub     = sub(mul, sum)
div     = div(sub, -1e-05)
mul_1   = mul(div, s)
add     = add(mul_1, inf)
eq      = eq(add, nan)
or      = logical_or(eq, true)
output  y0: f16[c r] (1, 1024) = add
output  y1: f32[] = amax
output  y2: b8[r c] = or"""


def with_line(line: str, *, instead: str = "") -> str:
    """TEXT with one line changed, or added before the outputs."""
    if instead:
        assert instead in TEXT
        return TEXT.replace(instead, line)
    return TEXT.replace("output  y0", f"{line}\noutput  y0")


def test_what_is_written_is_read_back() -> None:
    region = parse(TEXT)
    assert str(region) == TEXT
    assert parse(str(region)) == region


def test_what_the_text_means() -> None:
    region = parse(TEXT)
    assert region.name == "layer_norm_backward"
    assert region.axes == (Axis("r", None), Axis("c", 1024))
    assert region.inputs[0] == Buffer("g", torch.bfloat16, (("r",), ("c",)), ("t0", 1))
    assert region.inputs[2].dims == (("r", "c"),)
    assert region.inputs[3].dims == (("r",), ())
    assert region.ops[0] == Op("numel", "numel", (), ("r",))
    assert region.ops[-1] == Op("or", "logical_or", ("eq", True))
    assert region.outputs[1] == Output(Buffer("y1", torch.float32, ()), "amax")
    assert region.runtime_sizes == ("r", "t0")
    assert region.compute_dtype is torch.float32


def test_values_vary_over_what_their_operands_do() -> None:
    varies = parse(TEXT).varies
    assert varies["mul"] == {"r", "c"}
    assert varies["sum"] == {"r"}
    assert varies["amax"] == frozenset()
    assert varies["w"] == {"c"}


def test_an_expanded_tensor_does_not_vary() -> None:
    region = parse("region a\naxes r=3 c=4\ninput x: f32[r c] (0, 1)\noutput y: f32[c] = x")
    assert region.varies["x"] == {"c"}


def test_shapes_and_strides_from_run_time_sizes() -> None:
    region = parse(TEXT)
    extents = region.extents([5, 2048])
    assert extents == {"r": 5, "c": 1024, "t0": 2048}
    assert region.shape(region.inputs[2], extents) == (5 * 1024,)
    assert region.strides(region.inputs[0], extents) == (2048, 1)
    assert region.strides(region.inputs[3], extents) == (1, 1)


def test_strides_of_an_empty_tensor_are_pytorchs() -> None:
    region = parse("region a\naxes r=? c=4\ninput x: f32[r c]\noutput y: f32[c r] = x")
    extents = region.extents([0])
    for buffer in (region.inputs[0], region.outputs[0].buffer):
        shape = region.shape(buffer, extents)
        assert region.strides(buffer, extents) == torch.empty(shape).stride()


def test_the_compute_dtype_is_double_where_any_tensor_is() -> None:
    assert parse(TEXT.replace("f16[c r]", "f64[c r]")).compute_dtype is torch.float64
    assert parse(TEXT.replace("f32[c]", "f64[c]")).compute_dtype is torch.float64


def test_a_wrong_number_of_sizes_says_which_are_expected() -> None:
    with pytest.raises(RegionError, match=r"expected 2 run-time sizes \(r, t0\), found 1"):
        parse(TEXT).extents([3])


# Each breaks one rule; the message says which, and what stood there.
BROKEN = {
    "a line without a value": ("lonely", "expected 'WORD REST' in a region's line, found 'lonely'"),
    "an unknown line": (
        "widget w: f32[r]",
        "expected region, axes, sizes, dialect, input, output, joined, in turn or a value",
    ),
    "no dtype": ("input   q: [r]", r"expected 'NAME: DTYPE\[DIMS\] \(STRIDES\)', found 'q: \[r\]'"),
    "an unknown dtype": ("input   q: i16[r]", "expected 'NAME: DTYPE.* found 'q: i16"),
    "an undeclared axis": ("input   q: f32[z]", r"q has undeclared axes \['z'\]"),
    "too few strides": ("input   q: f32[r c] (1)", "q: one stride a dimension"),
    "an undeclared size": ("input   q: f32[r c] (t9, 1)", r"q has undeclared sizes \['t9'\]"),
    "an input twice": ("input   w: f32[c]", "expected every input once"),
    "no function": ("v       = 3 + 4", r"expected 'FN\(ARGS\)' or 'FN\[AXES\]\(VALUE\)' for v"),
    "a bad argument": ("v       = neg(1x)", "expected a value's name or a number, found '1x'"),
    "use before definition": ("v       = neg(later)", r"v uses \['later'\] before definition"),
    "defined twice": ("mul     = neg(g)", "mul is defined twice"),
    "defined as an input": ("g       = neg(w)", "g is defined twice"),
    "reduces what is not there": ("v       = sum[z](g)", r"v reduces undeclared axes \['z'\]"),
    "a reduction of nothing": ("v       = sum(g)", "v: axes mean a reduction"),
    "axes without a reduction": ("v       = neg[c](g)", "v: axes mean a reduction"),
    "reduces what does not change": ("v       = sum[r](w)", r"does not vary over \['r'\]"),
    "an undefined output": ("output  y9: f32[r] = nix", "output y9 is nix, not defined"),
    "one output joined": ("joined  y0 [0]", r"expected 'NAME NAME ... \[DIM\]', found 'y0 \[0\]'"),
    "joined outputs apart": ("joined  y0 y9 [0]", "expected outputs that follow one another"),
    "joined outputs that are whole": ("joined  y0 y1 [0]", "of one type with the strides of"),
    "an output too small": (
        "output  y9: f32[r] = mul",
        r"output y9 lacks its value's axes \['c'\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_the_grammar_is_said(case: str) -> None:
    line, message = BROKEN[case]
    with pytest.raises(RegionError, match=message):
        parse(with_line(line))


@pytest.mark.parametrize("extent", ["x", "", "-3", "1.5"])
def test_an_extent_is_a_number_or_a_question_mark(extent: str) -> None:
    with pytest.raises(RegionError, match="expected an axis as NAME=INTEGER or NAME="):
        parse(with_line(f"axes    r={extent} c=4", instead="axes    r=? c=1024"))


def test_axes_stand_once() -> None:
    with pytest.raises(RegionError, match="expected every axis once"):
        parse(with_line("axes    r=? c=1024 c=3", instead="axes    r=? c=1024"))


def test_a_region_has_a_name() -> None:
    with pytest.raises(RegionError, match="expected a name"):
        verify(Region("", (), (), (), ()))


def test_an_expanded_output_lacks_an_axis() -> None:
    """A tensor with a stride of zero cannot hold different values along it."""
    with pytest.raises(RegionError, match="y9 lacks its value's axes"):
        parse(with_line("output  y9: f32[r c] (0, 1) = mul"))
