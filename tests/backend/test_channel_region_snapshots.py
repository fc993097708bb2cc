"""The regions found in group and batch norm, written as in test_region_snapshots.py."""

from __future__ import annotations

from norm_regions import made_dynamic, region
from snapshots import assert_inline


def test_group_norm_forward() -> None:
    assert_inline(
        region("group_norm", "forward"),
        """\
region group_norm
axes    r=4 q=8 c=8 d=16 e=16
input   x: f32[r (q c) d e]
input   x_1: f32[(q c)]
input   x_2: f32[(q c)]
sum     = sum[c d e](x)
div     = div(sum, 2048.0)
sub     = sub(x, div)
mul     = mul(sub, sub)
sum_1   = sum[c d e](mul)
div_1   = div(sum_1, 2048.0)
add     = add(div_1, 1e-05)
rsqrt   = rsqrt(add)
mul_1   = mul(sub, rsqrt)
mul_2   = mul(mul_1, x_1)
add_1   = add(mul_2, x_2)
output  y0: f32[r q] = div
output  y1: f32[r q] = rsqrt
output  y2: f32[r q c d e] = add_1
""",
    )


def test_group_norm_backward() -> None:
    assert_inline(
        region("group_norm", "backward"),
        """\
region group_norm_backward
axes    r=4 q=8 c=8 d=16 e=16
input   g: f32[r (q c) d e]
input   x: f32[r (q c) d e]
input   s: f32[r q 1 1 1]
input   s_1: f32[r q 1 1 1]
input   x_1: f32[(q c)]
sub     = sub(x, s)
mul     = mul(sub, s_1)
mul_1   = mul(g, mul)
sum     = sum[d e](g)
sum_1   = sum[d e](mul_1)
mul_2   = mul(sum, x_1)
sum_2   = sum[c](mul_2)
div     = div(sum_2, 2048.0)
mul_3   = mul(sum_1, x_1)
sum_3   = sum[c](mul_3)
div_1   = div(sum_3, 2048.0)
mul_4   = mul(g, x_1)
sub_1   = sub(mul_4, div)
mul_5   = mul(mul, div_1)
sub_2   = sub(sub_1, mul_5)
mul_6   = mul(s_1, sub_2)
sum_4   = sum[r](sum_1)
sum_5   = sum[r](sum)
output  y0: f32[r q c d e] = mul_6
output  y1: f32[q c 1 1] = sum_4
output  y2: f32[q c 1 1] = sum_5
""",
    )


def test_group_norm_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("group_norm"),
        """\
# forward
-axes    r=4 q=8 c=8 d=16 e=16
+axes    r=? q=8 c=8 d=? e=?
-div     = div(sum, 2048.0)
+numel   = numel[c d e]()
+div     = div(sum, numel)
-div_1   = div(sum_1, 2048.0)
+div_1   = div(sum_1, numel)
# backward
-axes    r=4 q=8 c=8 d=16 e=16
+axes    r=? q=8 c=8 d=? e=?
-div     = div(sum_2, 2048.0)
+numel   = numel[d e q]()
+div     = div(sum_2, numel)
-div_1   = div(sum_3, 2048.0)
+div_1   = div(sum_3, numel)
""",
    )


def test_batch_norm_forward() -> None:
    assert_inline(
        region("batch_norm", "forward"),
        """\
region batch_norm
axes    c=4 r=64 d=16 e=16
input   x: f32[c r d e]
input   s: f32[r]
input   s_1: f32[r]
input   s_2: f32[r]
input   s_3: f32[r]
sum     = sum[c d e](x)
div     = div(sum, 1024.0)
sub     = sub(x, div)
mul     = mul(sub, sub)
sum_1   = sum[c d e](mul)
div_1   = div(sum_1, 1024.0)
add     = add(div_1, 1e-05)
rsqrt   = rsqrt(add)
mul_1   = mul(sub, rsqrt)
mul_2   = mul(div, 0.1)
mul_3   = mul(s, 0.9)
add_1   = add(mul_2, mul_3)
mul_4   = mul(div_1, 1.0009775171065494)
mul_5   = mul(mul_4, 0.1)
mul_6   = mul(s_1, 0.9)
add_2   = add(mul_5, mul_6)
mul_7   = mul(mul_1, s_2)
add_3   = add(mul_7, s_3)
output  y0: f32[1 r 1 1] = div
output  y1: f32[1 r 1 1] = rsqrt
output  y2: f32[r] = add_1
output  y3: f32[r] = add_2
output  y4: f32[c r d e] = add_3
""",
    )


def test_batch_norm_backward() -> None:
    assert_inline(
        region("batch_norm", "backward"),
        """\
region batch_norm_backward
axes    c=4 r=64 d=16 e=16
input   x: f32[c r d e]
input   s: f32[1 r 1 1]
input   s_1: f32[r]
input   g: f32[c r d e]
input   s_2: f32[r]
sub     = sub(x, s)
mul     = mul(sub, s_1)
mul_1   = mul(g, mul)
sum     = sum[c d e](mul_1)
sum_1   = sum[c d e](g)
mul_2   = mul(s_1, s_2)
div     = div(sum_1, 1024.0)
div_1   = div(sum, 1024.0)
sub_1   = sub(g, div)
mul_3   = mul(mul, div_1)
sub_2   = sub(sub_1, mul_3)
mul_4   = mul(sub_2, mul_2)
output  y0: f32[r] = sum
output  y1: f32[r] = sum_1
output  y2: f32[c r d e] = mul_4
""",
    )


def test_batch_norm_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("batch_norm"),
        """\
# forward
-axes    c=4 r=64 d=16 e=16
+axes    c=? r=64 d=? e=?
-div     = div(sum, 1024.0)
+numel   = numel[c d e]()
+div     = div(sum, numel)
-div_1   = div(sum_1, 1024.0)
+div_1   = div(sum_1, numel)
-mul_4   = mul(div_1, 1.0009775171065494)
+add_2   = add(numel, -1.0)
+div_2   = div(numel, add_2)
+mul_4   = mul(div_1, div_2)
-add_2   = add(mul_5, mul_6)
+add_3   = add(mul_5, mul_6)
-add_3   = add(mul_7, s_3)
+add_4   = add(mul_7, s_3)
-output  y3: f32[r] = add_2
-output  y4: f32[c r d e] = add_3
+output  y3: f32[r] = add_3
+output  y4: f32[c r d e] = add_4
# backward
-axes    c=4 r=64 d=16 e=16
+axes    c=? r=64 d=? e=?
-div     = div(sum_1, 1024.0)
-div_1   = div(sum, 1024.0)
+numel   = numel[c d e]()
+div     = div(sum_1, numel)
+div_1   = div(sum, numel)
""",
    )
