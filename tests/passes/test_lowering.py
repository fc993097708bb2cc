"""From nodes to a region: what each kind of node means. Every graph is run fused and unfused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F
from tracing import functions, fuse, fused, trace

from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

X = torch.linspace(-2, 3, 6 * 4 * 10, dtype=torch.float64).view(6, 4, 10).sin()
MASK = X > 0
ROW = X[0, 0]


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


# Functions of x and of a mask of its shape; each is one region.
WHOLE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "an axis that a tensor is expanded over": lambda x, m: centred(
        x[..., None].expand(6, 4, 10, 3)
    ),
    "a sum over an expanded tensor": lambda x, m: (
        x * x.sum(-1, keepdim=True).expand(6, 4, 10).sum(-1, keepdim=True)
    ),
    "a mean over an expanded tensor": lambda x, m: (
        x - x.mean(-1, keepdim=True).expand(6, 4, 10).mean((0, 2), keepdim=True)
    ),
    "a sum of ones": lambda x, m: centred(x) / torch.ones_like(x).sum(-1, keepdim=True),
    "axes apart, kept": lambda x, m: x - x.mean((0, 2), keepdim=True),
    "axes apart, not kept": lambda x, m: x - x.mean((0, 2)).view(1, -1, 1),
    "all axes": lambda x, m: x / x.square().sum().sqrt(),
    "all axes, by an empty list": lambda x, m: x - x.sum([]),
    "a negative axis": lambda x, m: x - x.amax(-2, keepdim=True),
    "variance": lambda x, m: x * x.var(-1, keepdim=True),
    "variance, no correction": lambda x, m: x * x.var(-1, keepdim=True, correction=0),
    "variance, large correction": lambda x, m: x * x.var(-1, keepdim=True, correction=10),
    "variance with mean": lambda x, m: (
        torch.var_mean(x, (0, 1), keepdim=True)[0] * x - torch.var_mean(x, (0, 1), keepdim=True)[1]
    ),
    "mean of truth values": lambda x, m: (
        torch.where(m, x, 0.0) * m.to(x.dtype).mean(-1, keepdim=True)
    ),
    "sum of a comparison": lambda x, m: x * (x > 0.1).to(x.dtype).sum(-1, keepdim=True),
    "sums of truth values are truth values": lambda x, m: centred(x) * ((m + (x > 0.2)) * 1.0),
    "products of truth values": lambda x, m: centred(x) * ((m * (x > 0.2)).to(x.dtype) + 1),
    "truth of a number": lambda x, m: centred(x) * (x.round(decimals=0) * 0 + x).bool(),
    "not, and, or": lambda x, m: centred(x) * (~m & (x < 0.5) | (x > 0.9)).to(x.dtype),
    "truth values leave": lambda x, m: (centred(x), centred(x) > 0.1, ~m & (centred(x) > 0)),
    "where with a number first": lambda x, m: torch.where(m, 2.5, centred(x)),
    "where with a number last": lambda x, m: torch.where(m, centred(x), -torch.inf),
    "where with two numbers": lambda x, m: centred(x) * torch.where(m, 2.0, 3.0),
    "clamp from below": lambda x, m: centred(x).clamp(min=0.1),
    "clamp from above": lambda x, m: centred(x).clamp(max=0.1),
    "clamp with bounds that cross": lambda x, m: centred(x).clamp(0.3, 0.1),
    "a number minus a tensor": lambda x, m: 1 - centred(x),
    "scaled addition": lambda x, m: torch.add(centred(x), x, alpha=-2.5),
    "scaled subtraction": lambda x, m: torch.sub(centred(x), x, alpha=0.5),
    "a copy": lambda x, m: centred(x) + torch.ops.aten.copy(x, centred(x).exp()),
    "a copy as truth values": lambda x, m: (
        centred(x) * torch.ops.aten.copy(m, torch.where(m, 0.5, 0.0) * x).to(x.dtype)
    ),
    "a power of zero": lambda x, m: centred(x) * (x / 0 * 0) ** 0,
    "powers": lambda x, m: centred(x) ** 3 + x**2 + (x.abs() + 0.1) ** -0.5 + (x**2 + 1) ** -1.7,
    "a power of a sum": lambda x, m: x * (x.square().sum(-1, keepdim=True) + 1) ** 0.5,
    "zeros of both signs": lambda x, m: (
        1 / (torch.where(m, 0.0, 0.0) * centred(x)),
        1 / (torch.where(m, -0.0, -0.0) * centred(x)),
    ),
    "one tensor twice": lambda x, m: x * x - (x * x).mean(-1, keepdim=True) + x,
    "transposed and grouped": lambda x, m: centred(x.permute(2, 0, 1).reshape(10, 24)),
    "a permuted result": lambda x, m: centred(x).permute(2, 0, 1),
    "a permuted copy": lambda x, m: centred(x).permute(2, 0, 1).contiguous(),
    "views as results": lambda x, m: (centred(x).view(24, 10), centred(x).view(6, 40).t()),
    "an expanded result": lambda x, m: centred(x)[:, None].expand(6, 3, 4, 10),
    "a number as a tensor": lambda x, m: centred(x) * torch.tensor(1.5),
    "half and back": lambda x, m: centred(x.half().float()).bfloat16().double(),
    "softmax": lambda x, m: F.softmax(x, 1),
    "log softmax": lambda x, m: F.log_softmax(x, -1),
    "standardized twice": lambda x, m: F.layer_norm(F.layer_norm(x, (10,)), (4, 10)),
    "tiny axes": lambda x, m: x[:, :1, :2] - x[:, :1, :2].mean(-1, keepdim=True),
}
# These contain what a region does not, so the graph is only run and compared.
PARTLY = {
    "tiny axes",
    "truth of a number",
    "zeros of both signs",
    "a number as a tensor",
    "an axis that a tensor is expanded over",
    "a sum over an expanded tensor",
    "a mean over an expanded tensor",
    "half and back",
}


# torch 2.15 says so of a correction that is too large, and returns infinity as before.
@pytest.mark.one_in(3)
@pytest.mark.filterwarnings(r"ignore:var\(\). degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_what_nodes_mean(name: str, dynamic: bool) -> None:
    graph = trace(WHOLE[name], X, MASK, dynamic=dynamic)
    expected = graph(X, MASK)
    decisions = fuse(graph)
    found = graph(X, MASK)
    tolerance = 1e-2 if name == "half and back" else 1e-9
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if name not in PARTLY:
        assert [type(decision) for decision in decisions] == [Fused], decisions


def test_a_detour_through_float64_keeps_its_precision() -> None:
    """The float32 tensors of this graph hide that it computes in float64."""

    def wide(x: Tensor) -> Tensor:
        return centred(x.double()).float()

    x = (X + 1e6).float()
    graph = trace(wide, x)
    fuse(graph)
    torch.testing.assert_close(graph(x), wide(x), rtol=1e-6, atol=1e-6)


def test_numbers_as_tensors_of_no_dimensions() -> None:
    """0-d tensors are values that vary over nothing."""

    def scaled(x: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return centred(x) * s + t, (centred(x) * s).sum() * t

    (region,) = fused(scaled, X, torch.tensor(2.0, dtype=torch.float64), X.sum())
    assert sum(not buffer.dims for buffer in region.inputs) == 2


def test_equal_values_are_computed_once() -> None:
    (region,) = fused(lambda x: centred(x).exp() / centred(x).exp().sum(-1, keepdim=True), X)
    assert sum(op.fn == "exp" for op in region.ops) == 1


def test_what_nobody_needs_is_not_computed() -> None:
    """A variance whose mean alone is used."""
    (region,) = fused(lambda x: x - torch.var_mean(x, -1, keepdim=True)[1], X)
    assert functions(region) == {"sum", "div", "sub"}


def test_dynamic_extents_are_counted_at_run_time() -> None:
    region = fused(lambda x: x - x.mean((0, 1), keepdim=True), X, dynamic=True)[0]
    assert "numel" in functions(region)
    assert {axis.extent for axis in region.axes} == {None}


def test_numbers_of_run_time_sizes_are_computed_from_them() -> None:
    """What a double backward of a variance divides by, in one region with all else."""

    def unbiased(x: Tensor) -> Tensor:
        n = x.shape[0] * x.shape[2]
        return centred(x) * (2.0 / x.shape[2]) / (n - 1) * x.shape[2] ** 0.5

    (region,) = fused(unbiased, X, dynamic=True)
    assert {axis.extent for axis in region.axes} == {None}


def axis_after_axis(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True).sum(2, keepdim=True).sum(1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sum_of_sums_is_one(dynamic: bool) -> None:
    (region,) = fused(lambda x: x - axis_after_axis(x), X, dynamic=dynamic)
    (total,) = (op for op in region.ops if op.is_reduction)
    assert len(total.axes) == 3


def test_a_sum_of_sums_and_the_sum_of_all_are_computed_once() -> None:
    (region,) = fused(lambda x: x - axis_after_axis(x) * x.sum(), X)
    assert sum(op.is_reduction for op in region.ops) == 1


def test_a_sum_that_others_read_is_added_up_once() -> None:
    """Group norm's sums over pixels, for channels and again for groups."""

    def both(x: Tensor) -> Tensor:
        rows = x.sum(2, keepdim=True)
        return x - rows.sum(1, keepdim=True) * rows

    (region,) = fused(both, X)
    assert sorted(len(op.axes) for op in region.ops if op.is_reduction) == [1, 1]


def test_masked_attention_is_one_region() -> None:
    """Which rows see nothing, their maximum tells: no truth values are written and looked at."""

    def attend(x: Tensor, seen: Tensor) -> Tensor:
        masked = x.masked_fill(~seen, -torch.inf)
        return torch.ops.aten._safe_softmax.default(masked, -1) @ x.mT

    seen = MASK.clone()
    seen[:, 1] = False
    (region,) = fused(attend, X, seen)
    assert [output.buffer.dtype for output in region.outputs] == [torch.float64]
    assert sum(op.is_reduction for op in region.ops) == 2  # the maximum and the sum
    torch.testing.assert_close(attend(X, seen)[:, 1], torch.zeros(6, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_region_computes_in_float32_or_float64(dtype: torch.dtype) -> None:
    graph = trace(centred, X.to(dtype))
    (decision,) = fuse(graph)
    assert isinstance(decision, Fused)
    wanted = centred(X.to(dtype).double())
    torch.testing.assert_close(graph(X.to(dtype)), wanted.to(dtype))
