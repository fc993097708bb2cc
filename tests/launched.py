"""Region texts of norms, and what their kernels compute with any number of workers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from normpass.backend.codegen.cpp import generate
from normpass.backend.program.machine import CPU
from normpass.backend.program.plan import make_plan
from normpass.backend.run import toolchain
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from torch import Tensor

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.tree import Plan
    from normpass.passes.region import Buffer

FORWARD = """\
region {name}
axes    {axes}
input   x: {dtype}[{dims}]{strides}
sum     = sum[{reduced}](x)
mean    = div(sum, {count})
sub     = sub(x, mean)
square  = mul(sub, sub)
total   = sum[{reduced}](square)
var     = div(total, {count})
add     = add(var, 1e-05)
rstd    = rsqrt(add)
y       = mul(sub, rstd)
output  y0: f32[{dims}]{written} = y
output  y1: f32[{kept}] = mean
output  y2: f32[{kept}] = rstd
"""
BACKWARD = """\
region layer_norm_backward
axes    r={r} c={c}
input   x: {dtype}[r c]
input   g: {dtype}[r c]
input   mean: f32[r 1]
input   rstd: f32[r 1]
input   w: f32[c]
sub     = sub(x, mean)
hat     = mul(sub, rstd)
gw      = mul(g, w)
product = mul(gw, hat)
sum     = sum[c](gw)
sum_1   = sum[c](product)
a       = div(sum, {c}.0)
b       = div(sum_1, {c}.0)
hat_b   = mul(hat, b)
less    = sub(gw, a)
less_1  = sub(less, hat_b)
dx      = mul(less_1, rstd)
gh      = mul(g, hat)
dw      = sum[r](gh)
db      = sum[r](g)
output  y0: {dtype}[r c] = dx
output  y1: f32[c] = dw
output  y2: f32[c] = db
"""
KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}


def forward(
    axes: dict[str, int],
    dims: str,
    reduced: str,
    dtype: str = "f32",
    strides: str = "",
    written: str = "",
) -> str:
    """A norm's forward over some axes of x."""
    count = 1.0
    for axis in reduced.split():
        count *= axes[axis]
    return FORWARD.format(
        name="norm",
        axes=" ".join(f"{name}={extent}" for name, extent in axes.items()),
        dims=dims,
        reduced=reduced,
        count=count,
        kept=" ".join(axis for axis in dims.split() if axis not in reduced.split()),
        dtype=dtype,
        strides=strides,
        written=written,
    )


def strided(buffer: Buffer, extents: dict[str, int]) -> Tensor:
    region = parse(forward({"r": 1}, "r", "r"))
    return torch.empty_strided(
        region.shape(buffer, extents), region.strides(buffer, extents), dtype=buffer.dtype
    )


def launched(text: str, inputs: list[Tensor], workers: int, machine: Machine = CPU) -> list[Tensor]:
    """What a region's kernel computes with so many workers, whatever this machine has."""
    region = parse(text)
    outputs = [strided(output.buffer, region.extents(())) for output in region.outputs]
    for output in outputs:
        output.fill_(torch.nan)
    library = toolchain.load(generate(make_plan(region, machine)))
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    library.kernel((ctypes.c_void_p * len(pointers))(*pointers), None, workers, ctypes.c_bool(True))
    return outputs


def is_right(
    text: str, reduced: tuple[int, ...], workers: int, machine: Machine = CPU, mean: float = 0.5
) -> None:
    """A forward's results against float64; statistics are rounded at most twice as much as by
    PyTorch's own of float32.
    """
    region = parse(text)
    x = strided(region.inputs[0], region.extents(()))
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * 2 + mean)
    y, found, rstd = launched(text, [x], workers, machine)
    var, want = torch.var_mean(x.double(), reduced, correction=0, keepdim=True)
    right = (var + 1e-5).rsqrt()
    torch.testing.assert_close(found.double(), want.reshape(found.shape), rtol=5e-7, atol=1e-6)
    torch.testing.assert_close(rstd.double(), right.reshape(rstd.shape), rtol=5e-7, atol=0)
    # y is as far off as its mean, in units of deviations, and as x less the mean loses of digits.
    lost = 4e-7 * (1 + abs(mean))
    torch.testing.assert_close(y.double(), (x.double() - want) * right, rtol=1e-6, atol=lost)


def axes_of(plan: Plan) -> list[str]:
    return [axis.name for axis in plan.axes]


def has_parts(text: str) -> bool:
    """Whether variances are made of those of blocks."""
    return any(op.name.endswith("_lost") for op in make_plan(parse(text)).region.ops)
