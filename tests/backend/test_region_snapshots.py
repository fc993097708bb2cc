"""The regions that are found in the norms, as they are written; accepted by `make accept`.

A region has a line each for its axes, its inputs, what is computed of them, and its outputs
(passes/region.py). Those of a double backward are long, and stand in expect/regions/.
"""

from __future__ import annotations

import pytest
from norm_regions import decisions, made_dynamic, region
from snapshots import assert_inline, assert_snapshot

from normpass.passes.region_text import parse


def test_softmax_forward() -> None:
    assert_inline(
        region("softmax", "forward"),
        """\
region softmax
axes    r=64 c=1000
input   x: f32[r c]
amax    = amax[c](x)
sub     = sub(x, amax)
exp     = exp(sub)
sum     = sum[c](exp)
div     = div(exp, sum)
output  y0: f32[r c] = div
""",
    )


def test_softmax_backward() -> None:
    assert_inline(
        region("softmax", "backward"),
        """\
region softmax_backward
axes    r=64 c=1000
input   g: f32[r c]
input   x: f32[r c]
mul     = mul(g, x)
sum     = sum[c](mul)
neg     = neg(x)
mul_1   = mul(neg, sum)
dx      = add(mul_1, mul)
output  y0: f32[r c] = dx
""",
    )


def test_softmax_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("softmax"),
        """\
# forward
-axes    r=64 c=1000
+axes    r=? c=?
# backward
-axes    r=64 c=1000
+axes    r=? c=?
""",
    )


def test_rms_norm_forward() -> None:
    assert_inline(
        region("rms_norm", "forward"),
        """\
region rms_norm
axes    r=8 q=16 c=1024
input   x: f32[r q c]
input   w: f32[c]
mul     = mul(x, x)
sum     = sum[c](mul)
div     = div(sum, 1024.0)
add     = add(div, 1.1920928955078125e-07)
rstd    = rsqrt(add)
x_hat   = mul(x, rstd)
mul_1   = mul(x_hat, w)
output  y0: f32[r q 1] = rstd
output  y1: f32[r q c] = mul_1
""",
    )


def test_rms_norm_backward() -> None:
    assert_inline(
        region("rms_norm", "backward"),
        """\
region rms_norm_backward
axes    r=8 q=16 c=1024
input   x: f32[r q c]
input   s: f32[r q 1]
input   g: f32[r q c]
input   w: f32[c]
mul     = mul(x, s)
mul_1   = mul(g, mul)
gw      = mul(g, w)
dw      = sum[r q](mul_1)
mul_2   = mul(gw, x)
mul_3   = mul(gw, s)
sum     = sum[c](mul_2)
mul_4   = mul(s, s)
mul_5   = mul(mul_4, s)
mul_6   = mul(sum, -0.5)
mul_7   = mul(mul_6, mul_5)
div     = div(mul_7, 1024.0)
mul_8   = mul(x, 2.0)
mul_9   = mul(div, mul_8)
dx      = add(mul_3, mul_9)
output  y0: f32[1 1 c] = dw
output  y1: f32[r q c] = dx
""",
    )


def test_rms_norm_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("rms_norm"),
        """\
# forward
-axes    r=8 q=16 c=1024
+axes    r=? q=? c=1024
# backward
-axes    r=8 q=16 c=1024
+axes    r=? q=? c=1024
""",
    )


def test_llama_rms_norm_forward() -> None:
    assert_inline(
        region("llama_rms_norm", "forward"),
        """\
region norm
axes    r=8 q=16 c=1024
input   x: f32[r q c]
input   w: f32[c]
mul     = mul(x, x)
sum     = sum[c](mul)
div     = div(sum, 1024.0)
add     = add(div, 1e-06)
rstd    = rsqrt(add)
x_hat   = mul(x, rstd)
mul_1   = mul(w, x_hat)
output  y0: f32[r q 1] = rstd
output  y1: f32[r q c] = mul_1
""",
    )


def test_llama_rms_norm_backward() -> None:
    assert_inline(
        region("llama_rms_norm", "backward"),
        """\
region norm_backward
axes    r=8 q=16 c=1024
input   g: f32[r q c]
input   w: f32[c]
input   x: f32[r q c]
input   s: f32[r q 1]
gw      = mul(g, w)
mul     = mul(x, s)
mul_1   = mul(g, mul)
dw      = sum[r q](mul_1)
mul_2   = mul(gw, x)
mul_3   = mul(gw, s)
sum     = sum[c](mul_2)
mul_4   = mul(s, s)
mul_5   = mul(mul_4, s)
mul_6   = mul(sum, -0.5)
mul_7   = mul(mul_6, mul_5)
div     = div(mul_7, 1024.0)
mul_8   = mul(x, 2.0)
mul_9   = mul(div, mul_8)
dx      = add(mul_3, mul_9)
output  y0: f32[1 1 c] = dw
output  y1: f32[r q c] = dx
""",
    )


def test_llama_rms_norm_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("llama_rms_norm"),
        """\
# forward
-axes    r=8 q=16 c=1024
+axes    r=? q=? c=1024
# backward
-axes    r=8 q=16 c=1024
+axes    r=? q=? c=1024
""",
    )


def test_layer_norm_forward() -> None:
    assert_inline(
        region("layer_norm", "forward"),
        """\
region layer_norm
axes    r=8 q=16 c=1024
input   x: f32[r q c]
input   w: f32[c]
input   w_1: f32[c]
sum     = sum[c](x)
mean    = div(sum, 1024.0)
sub     = sub(x, mean)
mul     = mul(sub, sub)
sum_1   = sum[c](mul)
var     = div(sum_1, 1024.0)
add     = add(var, 1e-05)
rstd    = rsqrt(add)
x_hat   = mul(sub, rstd)
mul_1   = mul(x_hat, w)
add_1   = add(mul_1, w_1)
output  y0: f32[r q 1] = mean
output  y1: f32[r q 1] = rstd
output  y2: f32[r q c] = add_1
""",
    )


def test_layer_norm_backward() -> None:
    assert_inline(
        region("layer_norm", "backward"),
        """\
region layer_norm_backward
axes    r=8 q=16 c=1024
input   g: f32[r q c]
input   w: f32[c]
input   x: f32[r q c]
input   mean: f32[r q 1]
input   rstd: f32[r q 1]
gw      = mul(g, w)
sum     = sum[c](gw)
mean_1  = div(sum, 1024.0)
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
mul     = mul(gw, x_hat)
sum_1   = sum[c](mul)
div     = div(sum_1, 1024.0)
sub_1   = sub(gw, mean_1)
mul_1   = mul(x_hat, div)
sub_2   = sub(sub_1, mul_1)
dx      = mul(rstd, sub_2)
mul_2   = mul(g, x_hat)
dw      = sum[r q](mul_2)
db      = sum[r q](g)
output  y0: f32[r q c] = dx
output  y1: f32[c] = dw
output  y2: f32[c] = db
""",
    )


def test_layer_norm_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("layer_norm"),
        """\
# forward
-axes    r=8 q=16 c=1024
+axes    r=? q=? c=1024
# backward
-axes    r=8 q=16 c=1024
+axes    r=? q=? c=1024
""",
    )


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_wide_rows_are_the_same_region(phase: str, dynamic: bool) -> None:
    """What differs between rows of 4 and of 32 KiB is the kernel."""
    usual, wide = (
        parse(region(name, phase, dynamic=dynamic)) for name in ("layer_norm", "layer_norm_wide")
    )
    assert [op.fn for op in usual.ops] == [op.fn for op in wide.ops]
    assert [len(some) for some in (usual.inputs, usual.outputs)] == [
        len(some) for some in (wide.inputs, wide.outputs)
    ]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_double_backward(dynamic: bool) -> None:
    made = decisions("layer_norm_double_backward", dynamic)
    texts = [f"# {decision.phase}\n{decision.text}" for decision in made]
    kind = "dynamic" if dynamic else "static"
    assert_snapshot(f"regions/layer_norm_double_backward_{kind}.txt", "\n\n".join(texts))
