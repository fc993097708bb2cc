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
mean    = div(sum, 2048.0)
sub     = sub(x, mean)
mul     = mul(sub, sub)
sum_1   = sum[c d e](mul)
var     = div(sum_1, 2048.0)
add     = add(var, 1e-05)
rstd    = rsqrt(add)
x_hat   = mul(sub, rstd)
mul_1   = mul(x_hat, x_1)
add_1   = add(mul_1, x_2)
output  y0: f32[r q] = mean
output  y1: f32[r q] = rstd
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
input   mean: f32[r q 1 1 1]
input   rstd: f32[r q 1 1 1]
input   x_1: f32[(q c)]
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
mul     = mul(g, x_hat)
sum     = sum[d e](g)
sum_1   = sum[d e](mul)
mul_1   = mul(sum, x_1)
sum_2   = sum[c](mul_1)
div     = div(sum_2, 2048.0)
mul_2   = mul(sum_1, x_1)
sum_3   = sum[c](mul_2)
div_1   = div(sum_3, 2048.0)
mul_3   = mul(g, x_1)
sub_1   = sub(mul_3, div)
mul_4   = mul(x_hat, div_1)
sub_2   = sub(sub_1, mul_4)
dx      = mul(rstd, sub_2)
db      = sum[r](sum_1)
db_1    = sum[r](sum)
output  y0: f32[r q c d e] = dx
output  y1: f32[q c 1 1] = db
output  y2: f32[q c 1 1] = db_1
""",
    )


def test_group_norm_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("group_norm"),
        """\
# forward
-axes    r=4 q=8 c=8 d=16 e=16
+axes    r=? q=8 c=8 d=? e=?
-mean    = div(sum, 2048.0)
+numel   = numel[c d e]()
+mean    = div(sum, numel)
-var     = div(sum_1, 2048.0)
+var     = div(sum_1, numel)
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
axes    n=4 c=64 d=16 e=16
input   x: f32[n c d e]
input   s: f32[c]
input   s_1: f32[c]
input   s_2: f32[c]
input   s_3: f32[c]
sum     = sum[n d e](x)
mean    = div(sum, 1024.0)
sub     = sub(x, mean)
mul     = mul(sub, sub)
sum_1   = sum[n d e](mul)
var     = div(sum_1, 1024.0)
add     = add(var, 1e-05)
rstd    = rsqrt(add)
x_hat   = mul(sub, rstd)
mul_1   = mul(mean, 0.1)
mul_2   = mul(s, 0.9)
add_1   = add(mul_1, mul_2)
mul_3   = mul(var, 1.0009775171065494)
mul_4   = mul(mul_3, 0.1)
mul_5   = mul(s_1, 0.9)
add_2   = add(mul_4, mul_5)
mul_6   = mul(x_hat, s_2)
add_3   = add(mul_6, s_3)
output  y0: f32[1 c 1 1] = mean
output  y1: f32[1 c 1 1] = rstd
output  y2: f32[c] = add_1
output  y3: f32[c] = add_2
output  y4: f32[n c d e] = add_3
""",
    )


def test_batch_norm_backward() -> None:
    assert_inline(
        region("batch_norm", "backward"),
        """\
region batch_norm_backward
axes    n=4 c=64 d=16 e=16
input   x: f32[n c d e]
input   mean: f32[1 c 1 1]
input   rstd: f32[c]
input   g: f32[n c d e]
input   s: f32[c]
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
mul     = mul(g, x_hat)
dw      = sum[n d e](mul)
db      = sum[n d e](g)
mul_1   = mul(rstd, s)
mean_1  = div(db, 1024.0)
div     = div(dw, 1024.0)
sub_1   = sub(g, mean_1)
mul_2   = mul(x_hat, div)
sub_2   = sub(sub_1, mul_2)
dx      = mul(sub_2, mul_1)
output  y0: f32[c] = dw
output  y1: f32[c] = db
output  y2: f32[n c d e] = dx
""",
    )


def test_batch_norm_of_sizes_known_at_run_time() -> None:
    assert_inline(
        made_dynamic("batch_norm"),
        """\
# forward
-axes    n=4 c=64 d=16 e=16
+axes    n=? c=64 d=? e=?
-mean    = div(sum, 1024.0)
+numel   = numel[n d e]()
+mean    = div(sum, numel)
-var     = div(sum_1, 1024.0)
+var     = div(sum_1, numel)
-mul_3   = mul(var, 1.0009775171065494)
+add_2   = add(numel, -1.0)
+div     = div(numel, add_2)
+mul_3   = mul(var, div)
-add_2   = add(mul_4, mul_5)
+add_3   = add(mul_4, mul_5)
-add_3   = add(mul_6, s_3)
+add_4   = add(mul_6, s_3)
-output  y3: f32[c] = add_2
-output  y4: f32[n c d e] = add_3
+output  y3: f32[c] = add_3
+output  y4: f32[n c d e] = add_4
# backward
-axes    n=4 c=64 d=16 e=16
+axes    n=? c=64 d=? e=?
-mean_1  = div(db, 1024.0)
-div     = div(dw, 1024.0)
+numel   = numel[n d e]()
+mean_1  = div(db, numel)
+div     = div(dw, numel)
""",
    )
