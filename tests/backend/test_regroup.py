"""Group norm in channels_last: lanes run along all channels of a pixel, and groups are looked at
where pixels are done with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from compiled import compile_fused, count_fused
from torch import nn
from torch.nn import functional as F

from normpass.backend.program.plan import make_plan
from normpass.backend.run.runtime import kernel
from normpass.passes.region import REGROUP
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.backend.program.tree import Plan

LAST = torch.channels_last


def regrouped(plan: Plan) -> bool:
    return any(op.fn == REGROUP for op in plan.region.ops)


def gradients(function: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    cotangent = x.detach().flip(1, 2)  # the same number in every dtype
    return [y, *torch.autograd.grad(y, [x, *norm.parameters()], cotangent)]


def group_norm(groups: int, channels: int, dtype: torch.dtype) -> nn.GroupNorm:
    norm = nn.GroupNorm(groups, channels)
    nn.init.normal_(norm.weight, 1.0)
    nn.init.normal_(norm.bias)
    return norm.to(dtype)


def check(found: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> None:
    """right: in float64."""
    slack = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
    for ours, want in zip(found, right, strict=True):
        atol = slack * want.abs().max().item()
        torch.testing.assert_close(ours.double(), want, rtol=slack, atol=atol)


# --- numbers ------------------------------------------------------------------------------------

SHAPES = {
    "rows are shared": (16, 12, 4, 5),
    "pixels are shared": (2, 12, 7, 3),
    "one image": (1, 64, 9, 9),
    "lanes are left over": (9, 18, 3, 7),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_group_norm_and_silu(shape: str, dtype: torch.dtype) -> None:
    n, c, h, w = SHAPES[shape]
    norm = group_norm(c // 3 if c % 3 == 0 else c // 2, c, dtype)
    x = torch.randn(n, c, h, w).to(dtype).contiguous(memory_format=LAST)

    def function(x: Tensor) -> Tensor:
        return F.silu(norm(x))

    found = gradients(compile_fused(function), norm, x)
    assert count_fused("group_norm") == 2
    check(found, gradients(function, norm.double(), x.double()), dtype)


def test_it_is_fused_by_default() -> None:
    """Groups of two channels: Inductor has such pieces unless lanes run along all of them."""
    norm = group_norm(32, 64, torch.float32)
    x = torch.randn(8, 64, 32, 32).contiguous(memory_format=LAST)
    found = gradients(torch.compile(norm, backend="normpass"), norm, x)
    assert count_fused("group_norm") == 2
    check(found, gradients(norm, norm.double(), x.double()), torch.float32)


def test_of_any_size() -> None:
    norm = group_norm(4, 12, torch.float64)
    function = compile_fused(norm, dynamic=True)
    for shape in ((16, 12, 4, 5), (3, 12, 9, 2), (1, 12, 2, 2)):
        x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=LAST)
        found, right = gradients(function, norm, x), gradients(norm, norm, x)
        for ours, want in zip(found, right, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-10)
    assert count_fused("group_norm") >= 2


def test_a_nan_stays_in_its_group() -> None:
    norm = group_norm(4, 12, torch.float32)
    x = torch.randn(2, 12, 4, 5).contiguous(memory_format=LAST)
    x[1, 4, 2, 2] = torch.nan  # the second of four groups
    y = compile_fused(norm)(x)
    bad = y.isnan().flatten(2).any(-1)
    assert bad.nonzero().tolist() == [[1, 3], [1, 4], [1, 5]]


def test_long_sums_lose_no_digits() -> None:
    """A million pixels, far from zero."""
    x = (torch.randn(1, 8, 1024, 1024) + 30).contiguous(memory_format=LAST)
    norm = nn.GroupNorm(4, 8)
    right = norm.double()(x.double())
    norm = norm.float()

    def error(function: Callable[[Tensor], Tensor]) -> float:
        with torch.no_grad():
            return (function(x).double() - right).abs().max().item()

    assert error(compile_fused(norm)) <= 1.1 * error(norm)


def test_extrema_by_group() -> None:
    text = """
        region example; axes r=9 q=4 c=3 p=20; input x: f32[r p q c]
        a = amax[c p](x); b = amin[c p](x); d = sub(a, b)
        y = div(x, d); output y0: f32[r p q c] = y; output y1: f32[r q] = d
    """
    assert regrouped(make_plan(parse(text)))
    x = torch.randn(9, 20, 4, 3)
    y, d = kernel(text, ())([x], [])
    want = x.amax((1, 3)) - x.amin((1, 3))
    torch.testing.assert_close(d, want)
    torch.testing.assert_close(y, x / want[:, None, :, None])


def test_weights_that_are_summed_by_group() -> None:
    """An input that is looked at by other axes, and not in a loop over pixels."""
    text = """
        region example; axes r=9 q=4 c=3 p=20; input x: f32[r p q c]; input w: f32[q c]
        s = sum[c p](x); t = sum[c](w); u = mul(s, t)
        y = sub(x, u); output y0: f32[r p q c] = y
    """
    assert regrouped(make_plan(parse(text)))
    x, w = torch.randn(9, 20, 4, 3), torch.randn(4, 3)
    (y,) = kernel(text, ())([x, w], [])
    factor = x.sum((1, 3)) * w.sum(-1)
    torch.testing.assert_close(y, x - factor[:, None, :, None], rtol=1e-5, atol=1e-4)


# --- near misses --------------------------------------------------------------------------------

PLAIN = "a = sum[c p](x); y = sub(x, a); output y0: f32[r p q c] = y"
NEAR_MISSES = {
    "groups are far apart": ("r=9 q=4 c=3 p=20", "x: f32[r q p c]", PLAIN),
    "pieces are long": ("r=9 q=4 c=300 p=20", "x: f32[r p q c]", PLAIN),
    "channels do not fit in cache": ("r=2 q=2000 c=3 p=4", "x: f32[r p q c]", PLAIN),
    "gaps between groups": ("r=9 q=4 c=3 p=20", "x: f32[r p q c] (320, 16, 4, 1)", PLAIN),
    "no pixels": (
        "r=9 q=4 c=3",
        "x: f32[r q c]",
        "a = sum[c](x); y = sub(x, a); output y0: f32[r q c] = y",
    ),
    "a sum for each pixel": (
        "r=9 q=4 c=3 p=20",
        "x: f32[r p q c]",
        "a = sum[c p](x); b = sum[c](x); d = mul(a, b); y = sub(x, d); output y0: f32[r p q c] = y",
    ),
    "a truth value of a group": (
        "r=9 q=4 c=3 p=20",
        "x: f32[r p q c]",
        "a = sum[c p](x); b = gt(a, 0.0); y = where(b, x, 0.0); output y0: f32[r p q c] = y",
    ),
    "a name that meets another": (
        "r=9 q=4 c=3 p=20",
        "a_p: f32[r p q c]",
        "a = sum[c p](a_p); y = sub(a_p, a); output y0: f32[r p q c] = y",
    ),
    "members across groups": (
        "r=9 q=4 c=3 p=20",
        "x: f32[r p q c]",
        "a = sum[c p](x); b = sub(x, a); d = sum[q](b); output y0: f32[r p q c] = b; "
        "output y1: f32[r p c] = d",
    ),
}


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_near_misses(miss: str) -> None:
    axes, buffer, body = NEAR_MISSES[miss]
    region = parse(f"region example; axes {axes}; input {buffer}; {body}")
    assert not regrouped(make_plan(region))


def test_the_original_is_regrouped() -> None:
    region = parse(f"region e; axes r=9 q=4 c=3 p=20; input x: f32[r p q c]; {PLAIN}")
    assert regrouped(make_plan(region))


def test_two_loops_may_compute_the_same_array() -> None:
    """Both see the groups' sums by lanes; a second declaration would not compile."""
    text = """region group_norm_backward
axes    r=64 q=8 c=8 d=7 e=7
input   x: f32[(q c)]
input   x_1: f32[r (q c) d e] (3136, 1, 448, 64)
input   x_2: f32[r (q c) d e] (3136, 1, 448, 64)
sum     = sum[c](x)
sum_1   = sum[c d e](x_2)
sub     = sub(sum, x_1)
sub_1   = sub(sum_1, sub)
output  y0: f32[r (q c) d e] (3136, 1, 448, 64) = sum_1
output  y1: f32[r (q c) d e] (3136, 1, 448, 64) = sub_1"""
    x = torch.randn(64)
    x_1, x_2 = (torch.randn(64, 64, 7, 7).contiguous(memory_format=LAST) for _ in range(2))
    found = kernel(text, ())([x, x_1, x_2], [])
    of_groups = x.double().view(8, 8).sum(1).repeat_interleave(8).view(64, 1, 1)
    sums = x_2.double().view(64, 8, 8, 7, 7).sum((2, 3, 4)).repeat_interleave(8, 1)[..., None, None]
    check(found, [sums.expand(x_1.shape), sums - (of_groups - x_1)], torch.float32)
