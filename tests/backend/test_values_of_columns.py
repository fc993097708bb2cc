"""What lanes differ in and rows do not (rstd of channels that are last in memory) is computed once
for all rows, where that takes longer than reading it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normpass.backend.program.machine import CPU, GPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.traffic import traffic
from normpass.backend.program.tree import Compute, Keep, Loop, walk
from normpass.backend.run.runtime import Kernel
from normpass.passes.cost import Caches, Conditions
from normpass.passes.region_text import parse

# Batch norm with channels last, of one model or of several.
TEXT = """\
region batch_norm
axes    {v}r={rows} c={channels}
input   x: {dtype}[{v}r c]
input   w: f32[{v}c]
sum     = sum[r](x)
mean    = div(sum, {count})
sub     = sub(x, mean)
square  = mul(sub, sub)
total   = sum[r](square)
var     = div(total, {count})
add     = add(var, 1e-05)
rstd    = rsqrt(add)
hat     = mul(sub, rstd)
scaled  = mul(hat, w)
output  y0: {dtype}[{v}r c] = scaled
output  y1: f32[{v}c] = rstd
"""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
COSTLY = ("div", "rsqrt")


def text(rows: int, channels: int, models: int = 1, dtype: str = "f32") -> str:
    v = "v " if models > 1 else ""
    axes = TEXT.replace("axes    {v}", f"axes    v={models} " if v else "axes    ")
    return axes.format(v=v, rows=rows, channels=channels, count=float(rows), dtype=dtype)


def times(region: str) -> dict[str, int]:
    """How often each costly value is computed, by name."""
    plan = make_plan(parse(region), CPU)
    found: dict[str, int] = {}

    def count(nodes: Any, around: int) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                count(node.body, around * node.axis.hint)
            elif isinstance(node, Compute) and node.op.fn in COSTLY:
                found[node.op.name] = found.get(node.op.name, 0) + around

    count(plan.body, 1)
    return found


def is_close_to_torch(region: str, rows: int, channels: int, models: int, dtype: str) -> None:
    x = torch.randn(models, rows, channels).to(DTYPES[dtype])
    w = torch.randn(models, channels)
    y, rstd = Kernel(region)([x.squeeze(0), w.squeeze(0)], ())
    var, mean = torch.var_mean(x.double(), 1, correction=0, keepdim=True)
    want = (x.double() - mean) * (var + 1e-5).rsqrt() * w.double().unsqueeze(1)
    # A result in half precision is rounded once.
    rtol = {"f32": 1e-5, "bf16": 2**-8}[dtype]
    torch.testing.assert_close(y.reshape(want.shape).double(), want, rtol=rtol, atol=1e-5)
    right = (var + 1e-5).rsqrt().reshape(rstd.shape)
    torch.testing.assert_close(rstd.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("models", [1, 3, 20])
@pytest.mark.parametrize(("rows", "channels"), [(500, 64), (37, 5), (2, 100)])
def test_once_for_all_rows(rows: int, channels: int, models: int, dtype: str) -> None:
    region = text(rows, channels, models, dtype)
    of_all = models * channels
    assert times(region) == {"mean": of_all, "var": of_all, "rstd": of_all}
    is_close_to_torch(region, rows, channels, models, dtype)


def test_what_it_costs_is_counted_so() -> None:
    conditions = Conditions(Caches(1 << 20, 1 << 25), private=1 << 20, threads=2, calibration=None)
    work = traffic(text(500, 64), (), "cpu", conditions)
    assert dict(work.functions) == {"div": 128, "rsqrt": 64}


def test_not_on_a_gpu() -> None:
    """Where that would be a launch, and the functions cost nothing beside memory."""
    plan = make_plan(parse(text(500, 64)), GPU)
    assert not any(isinstance(node, Keep) for top in plan.body for node in walk(top))


def test_not_where_there_are_as_many_as_a_cache_holds() -> None:
    assert times(text(4, CPU.kept))["rstd"] == CPU.kept
    assert times(text(4, CPU.kept + 1))["rstd"] > CPU.kept + 1


def test_not_what_is_as_quickly_computed_as_read() -> None:
    cheap = """
        region example; axes r=50 c=40; input x: f32[r c]; input w: f32[c]
        one = add(w, 1.0); y = mul(x, one); s = sum[r](y); output y0: f32[r c] = y
        output y1: f32[c] = s
    """
    nodes = [node for top in make_plan(parse(cheap)).body for node in walk(top)]
    assert not any(isinstance(node, Keep) for node in nodes)


def test_of_inputs_alone() -> None:
    """The running statistics of batch norm in inference."""
    region = """
        region inference; axes r=300 c=40; input x: f32[r c]; input v: f32[c]
        a = add(v, 1e-05); rstd = rsqrt(a); y = mul(x, rstd); output y0: f32[r c] = y
    """
    assert times(region) == {"rstd": 40}
    x, v = torch.randn(300, 40), torch.rand(40)
    (y,) = Kernel(str(parse(region)))([x, v], ())
    torch.testing.assert_close(y, x * (v + 1e-5).rsqrt())


def test_not_what_a_row_has_one_of() -> None:
    """Channels that come before the pixels: a number in front of the loop over these."""
    region = """
        region inference; axes n=3 c=40 p=300; input x: f32[n c p]; input v: f32[c]
        a = add(v, 1e-05); rstd = rsqrt(a); y = mul(x, rstd); output y0: f32[n c p] = y
    """
    assert times(region) == {"rstd": 3 * 40}
