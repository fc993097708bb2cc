"""Region texts for the Triton generator's tests; triton_oracles.py has the mathematics of each."""

from __future__ import annotations


def fill(
    text: str,
    c: str = "70",
    r: str = "?",
    t: str = "f32",
    w: str = "",
    x: str = "",
    v: str = "4",
) -> str:
    """A region's text. c, r, v: extents. t, w: dtypes of activations and weights. x: their
    layout.
    """
    statistics = "f64" if t == "f64" else "f32"
    marks = {"%C": c, "%R": r, "%V": v, "%T": t, "%W": w or t, "%S": statistics, "%X": x}
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.strip()


# ---- regions; %T is the activations' dtype, %W the weights', %S the statistics'

LAYER_NORM_BACKWARD = """
region layer_norm_backward
axes    r=%R c=%C
input   g: %T[r c]
input   w: %W[c]
input   x: %T[r c]
input   mean: %S[r 1]
input   rstd: %S[r 1]
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
gw      = mul(g, w)
sum_gw  = sum[c](gw)
n       = numel[c]()
a       = div(sum_gw, n)
gwx     = mul(gw, x_hat)
sum_gwx = sum[c](gwx)
b       = div(sum_gwx, n)
less_a  = sub(gw, a)
xb      = mul(x_hat, b)
less_b  = sub(less_a, xb)
dx      = mul(less_b, rstd)
gx      = mul(g, x_hat)
dw      = sum[r](gx)
db      = sum[r](g)
output  grad_x: %T[r c] = dx
output  grad_w: %W[c] = dw
output  grad_b: %W[c] = db
"""

# The same with a weight for each of some examples, which have rows.
MODULATED_BACKWARD = (
    LAYER_NORM_BACKWARD.replace("layer_norm_backward", "modulated_backward")
    .replace("axes    r", "axes    v=%V r")
    .replace("%T[r", "%T[v r")
    .replace("%S[r", "%S[v r")
    .replace("%W[c]", "%W[v c]")
)

RMS_NORM_BACKWARD = """
region rms_norm_backward
axes    r=%R c=%C
input   g: %T[r c]
input   w: %W[c]
input   x: %T[r c]
input   rstd: %S[r 1]
x_hat   = mul(x, rstd)
gw      = mul(g, w)
gwx     = mul(gw, x_hat)
sum_gwx = sum[c](gwx)
n       = numel[c]()
b       = div(sum_gwx, n)
xb      = mul(x_hat, b)
less_b  = sub(gw, xb)
dx      = mul(less_b, rstd)
gx      = mul(g, x_hat)
dw      = sum[r](gx)
output  grad_x: %T[r c] = dx
output  grad_w: %W[c] = dw
"""

LAYER_NORM_FORWARD = """
region layer_norm
axes    r=%R c=%C
input   x: %T[r c]
input   w: %W[c]
input   bias: %W[c]
n       = numel[c]()
total   = sum[c](x)
mean    = div(total, n)
centred = sub(x, mean)
square  = mul(centred, centred)
squares = sum[c](square)
var     = div(squares, n)
var_eps = add(var, 1e-05)
rstd    = rsqrt(var_eps)
x_hat   = mul(centred, rstd)
scaled  = mul(x_hat, w)
y       = add(scaled, bias)
output  out: %T[r c] = y
output  save_mean: %S[r 1] = mean
output  save_rstd: %S[r 1] = rstd
"""

SOFTMAX = """
region softmax
axes    r=%R c=%C
input   x: %T[r c]
top     = amax[c](x)
less    = sub(x, top)
e       = exp(less)
total   = sum[c](e)
y       = div(e, total)
output  out: %T[r c] = y
"""

SOFTMAX_BACKWARD = """
region softmax_backward
axes    r=%R c=%C
input   g: %T[r c]
input   y: %T[r c]
gy      = mul(g, y)
total   = sum[c](gy)
part    = mul(y, total)
dx      = sub(gy, part)
output  grad_x: %T[r c] = dx
"""

SOFTMAX_MIDDLE = """
region softmax_middle
axes    r=%R c=%C s=37
input   x: %T[r c s]
top     = amax[c](x)
less    = sub(x, top)
e       = exp(less)
total   = sum[c](e)
y       = div(e, total)
output  out: %T[r c s] = y
"""

GROUP_NORM_BACKWARD = """
region group_norm_backward
axes    r=%R g=3 d=%C s=35
input   dy: %T[%X]
input   w: %W[(g d)]
input   x: %T[%X]
input   mean: %S[r g]
input   rstd: %S[r g]
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
dyx     = mul(dy, x_hat)
ds      = sum[s](dyx)
db      = sum[s](dy)
dsw     = mul(ds, w)
dbw     = mul(db, w)
sum_ds  = sum[d](dsw)
sum_db  = sum[d](dbw)
n       = numel[d s]()
a       = div(sum_ds, n)
b       = div(sum_db, n)
gw      = mul(dy, w)
less_b  = sub(gw, b)
xa      = mul(x_hat, a)
less_a  = sub(less_b, xa)
dx      = mul(less_a, rstd)
dw      = sum[r](ds)
dbias   = sum[r](db)
output  grad_x: %T[%X] = dx
output  grad_w: %W[(g d)] = dw
output  grad_b: %W[(g d)] = dbias
"""

BATCH_NORM_BACKWARD = """
region batch_norm_backward
axes    r=%R c=%C s=35
input   dy: %T[%X]
input   w: %W[c]
input   x: %T[%X]
input   mean: %S[c]
input   rstd: %S[c]
sub     = sub(x, mean)
x_hat   = mul(sub, rstd)
dyx     = mul(dy, x_hat)
ds      = sum[r s](dyx)
db      = sum[r s](dy)
n       = numel[r s]()
a       = div(ds, n)
b       = div(db, n)
less_b  = sub(dy, b)
xa      = mul(x_hat, a)
less_a  = sub(less_b, xa)
k       = mul(rstd, w)
dx      = mul(less_a, k)
output  grad_x: %T[%X] = dx
output  grad_w: %W[c] = ds
output  grad_b: %W[c] = db
"""

# What is added up over rows varies over columns, and the other way round: no program has a share of
# both.
TWO_WAYS = """
region two_ways
axes    v=%V r=%R c=%C
input   x: %T[v r c]
sum     = sum[c](x)
n       = numel[c]()
mean    = div(sum, n)
y       = sub(x, mean)
of_rows = sum[v](y)
of_v    = sum[r](y)
output  o0: %T[v r c] = y
output  o1: %T[r c] = of_rows
output  o2: %T[v c] = of_v
"""

BATCH_NORM = """
region batch_norm
axes    r=%R c=%C s=%V
input   x: %T[%X]
n       = numel[r s]()
sum     = sum[r s](x)
mean    = div(sum, n)
sub     = sub(x, mean)
square  = mul(sub, sub)
total   = sum[r s](square)
var     = div(total, n)
add     = add(var, 1e-05)
rstd    = rsqrt(add)
y       = mul(sub, rstd)
output  y0: %T[%X] = y
output  y1: %S[c] = mean
output  y2: %S[c] = rstd
"""

# Three inner levels and an outer sum of what follows them, like layer norm's double backward.
THREE_LEVELS = """
region three_levels
axes    r=%R c=%C
input   x: %T[r c]
input   v: %T[r c]
input   w: %W[c]
n       = numel[c]()
total   = sum[c](x)
mean    = div(total, n)
centred = sub(x, mean)
square  = mul(centred, centred)
squares = sum[c](square)
var     = div(squares, n)
var_eps = add(var, 0.1)
rstd    = rsqrt(var_eps)
x_hat   = mul(centred, rstd)
vw      = mul(v, w)
xv      = mul(x_hat, vw)
sum_xv  = sum[c](xv)
b       = div(sum_xv, n)
xb      = mul(x_hat, b)
less    = sub(vw, xb)
y       = mul(less, rstd)
vy      = mul(v, y)
dw      = sum[r](vy)
output  out: %T[r c] = y
output  grad_w: %W[c] = dw
"""

# A dropout mask goes in, a ReLU mask comes out.
MASKED = """
region masked
axes    r=%R c=%C
input   x: %T[r c]
input   keep: b8[r c]
twice   = mul(x, 2.0)
dropped = where(keep, twice, 0.0)
total   = sum[c](dropped)
n       = numel[c]()
mean    = div(total, n)
y       = sub(dropped, mean)
up      = gt(y, 0.0)
both    = logical_and(up, keep)
z       = where(both, y, 0.1)
count   = sum[r](both)
output  out: %T[r c] = z
output  mask: b8[r c] = both
output  counts: %W[c] = count
"""

# What counts at some positions, which are integers.
ONE_HOT = """
region one_hot
axes    r=%R c=%C
input   i: i32[c]
input   word: i64[r 1]
input   x: %T[r c]
eq      = eq(word, i)
hot     = where(eq, x, 0.0)
total   = sum[c](hot)
exp     = exp(x)
scaled  = mul(exp, total)
y       = sub(hot, scaled)
output  out: %T[r c] = y
"""

# Rows that no single axis describes: x is a window of something wider, g is transposed.
STRIDED = """
region strided
axes    a=%R t=5 c=%C
sizes   step=?
input   g: %T[a t c] (1, step, 1000)
input   x: %T[a t c] (1500, 300, 2)
input   w: %W[c]
input   one: %T[a t c] (1, 0, 0)
gw      = mul(g, w)
gwx     = mul(gw, x)
total   = sum[c](gwx)
xt      = mul(x, total)
less    = sub(gw, xt)
dx      = mul(less, one)
gx      = mul(g, x)
dw      = sum[a t](gx)
output  grad_x: %T[a t c] = dx
output  grad_w: %W[c] = dw
"""

# Normalized by a sum over everything: results of no axes between two launches.
GLOBAL = """
region global_norm
axes    r=%R c=%C
input   x: %T[r c]
input   scale: %W[]
square  = mul(x, x)
squares = sum[r c](square)
norm    = sqrt(squares)
safe    = add(norm, 0.5)
unit    = div(x, safe)
y       = mul(unit, scale)
output  out: %T[r c] = y
output  length: %W[] = norm
"""

# A loop over what another has added up, which adds up itself.
SUMS_OF_SUMS = """
region sums_of_sums
axes    r=%R c=%C
input   x: %T[r c]
total   = sum[r](x)
square  = mul(total, total)
all     = sum[c](square)
output  y: %T[c] = total
output  z: %T[1] = all
"""

EXTREMES = """
region extremes
axes    r=%R c=%C
input   x: %T[r c]
high    = amax[c](x)
low     = amin[c](x)
most    = amax[r](x)
shrunk  = mul(x, 0.05)
near    = add(shrunk, 1.0)
grown   = prod[c](near)
output  highest: %T[r] = high
output  lowest: %T[r] = low
output  columns: %T[c] = most
output  product: %T[r] = grown
"""

# Names that Python or the generator needs for itself.
NAMES = """
region names of all kinds
axes    tl=%R n=%C
input   n_n: %T[tl n]
input   program: %T[n]
for     = mul(n_n, program)
acc_for = sum[n](for)
tl      = sub(for, acc_for)
mask_n  = sum[tl](tl)
output  p_n: %T[tl n] = tl
output  share: %T[n] = mask_n
"""
