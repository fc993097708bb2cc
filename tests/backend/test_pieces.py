"""Parts of a norm's result inside of its kernel: rotary embedding, gated units. Against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from piecewise import (
    HEADS,
    SIZE,
    as_exact,
    both,
    compiled,
    gated,
    heads,
    in_triton,
    inputs,
    is_joined,
    many,
    rms_rope,
    rope,
    rotated,
)
from torch import Tensor

from normpass.backend.explain import record
from normpass.backend.run.op import region_op
from normpass.backend.run.reference import evaluate, out_of_place
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def layer_norm_rope_chunked(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.layer_norm(heads(x), (SIZE,), w, w.sin()).transpose(1, 2)
    first, last = y.chunk(2, -1)
    return y * cos + torch.cat([-last, first], -1) * sin


def rope_norm(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.rms_norm(rope(heads(x), cos[:, None], sin[:, None]), (SIZE,), w)


def in_thirds(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Cut in two ways, so that there are four pieces in all."""
    y = F.layer_norm(heads(x), (SIZE,), w)
    return torch.cat([y[..., 32:], y[..., :32]], -1) * cos[:, None] + y


def largest(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A largest and a smallest number of pieces, and a variance."""
    y = rope(heads(x), cos[:, None], sin[:, None])
    y = (y - y.amin(-1, keepdim=True)) / y.var(-1, keepdim=True).sqrt() * w
    return rotated(y) + y.amax(-1, keepdim=True)


def scattered(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.layer_norm(heads(x), (SIZE,), w)
    y = torch.slice_scatter(y, y[..., :24] * cos[:, None, :24], -1, 24)
    return y + rotated(y) * sin[:, None]


CASES = [rms_rope, layer_norm_rope_chunked, rope_norm, gated, largest, scattered]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("f", CASES, ids=lambda f: f.__name__)
def test_as_exact_as_eager_mode(f: Callable[..., Tensor]) -> None:
    args = inputs(torch.float32)
    found, fused = compiled(f, args)
    as_exact(found, f, args)
    assert len(fused) == 2, "a kernel for the forward and one for the backward"
    # A gate's result is one piece. Of a variance's, gradients of parts stay with Inductor.
    assert is_joined(fused[0]) == (f is not gated)
    assert is_joined(fused[1]) == (f is not largest)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("f", [rms_rope, in_thirds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_types(f: Callable[..., Tensor], dtype: torch.dtype) -> None:
    args = inputs(dtype)
    found, fused = compiled(f, args)
    as_exact(found, f, args)
    assert all(map(is_joined, fused))


def test_any_number_of_rows() -> None:
    """One graph for batches and sequences of other lengths, flattened heads included."""
    compiler = torch.compile(rms_rope, backend="normpass", options={"least_bytes": 0}, dynamic=None)
    torch._dynamo.reset()
    with record.listen() as decisions:
        for batch, length in ((3, 7), (2, 5), (4, 11)):
            x, w, cos, sin = inputs(torch.float32)
            x = torch.randn(batch, length, HEADS * SIZE, requires_grad=True)
            cos, sin = torch.randn(length, SIZE), torch.randn(length, SIZE)
            for tensor, dims in ((x, (0, 1)), (cos, (0,)), (sin, (0,))):
                for dim in dims:
                    torch._dynamo.mark_dynamic(tensor, dim)
            as_exact(both(compiler, (x, w, cos, sin)), rms_rope, (x, w, cos, sin))
    assert [is_joined(each) for each in decisions if isinstance(each, Fused)] == [True, True]


def test_nan_goes_where_it_belongs() -> None:
    x, w, cos, sin = inputs(torch.float32)
    with torch.no_grad():
        x[0, 0, 3] = float("nan")
    found, _ = compiled(rms_rope, (x, w, cos, sin))
    eager = rms_rope(x, w, cos, sin)
    assert torch.equal(found[0].isnan(), eager.isnan())
    assert bool(found[0].isnan().any())
    assert not bool(found[0].isnan().all())


# What fits in no piece, or is better as it was: name, function.
WHOLE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a part leaves": lambda x, w: F.layer_norm(x, w.shape, w).chunk(2, -1),
    "one part": lambda x, w: F.layer_norm(x, w.shape, w)[..., :24] * 2,
    "longer than a row": lambda x, w: torch.cat([F.layer_norm(x, w.shape, w), x], -1),
    "a part that meets another leaves": lambda x, w: (
        lambda y: (y[..., :24] * y[..., 24:], y[..., :24])
    )(F.layer_norm(x, w.shape, w)),
    "a result of a split leaves": lambda x, w: (
        lambda first, last: (first * last, last @ x[:24, :24])
    )(*F.layer_norm(x, w.shape, w).split([24, 24], -1)),
    "rows are halved": lambda x, w: (lambda y: torch.cat([-y[32:], y[:32]]) + y)(
        F.layer_norm(x, w.shape, w)
    ),
    "rows are cut": lambda x, w: torch.roll(F.layer_norm(x, w.shape, w), 3, 0) * 2,
    "many pieces": lambda x, w: (lambda y: y + torch.cat([y[..., 1:], y[..., :1]], -1))(
        F.layer_norm(x, w.shape, w)
    ),
    "steps of three": lambda x, w: (lambda y: y[..., ::3] * y[..., 1::3] + y[..., 2::3])(
        F.layer_norm(x, w.shape, w)
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole(name: str) -> None:
    x, w = torch.randn(64, SIZE), torch.randn(SIZE)
    torch._dynamo.reset()
    with record.listen() as decisions:
        found = torch.compile(WHOLE[name], backend="normpass", options={"least_bytes": 0})(x, w)
    torch.testing.assert_close(found, WHOLE[name](x, w))
    fused = [each for each in decisions if isinstance(each, Fused)]
    assert len(fused) == 1
    assert f"c={SIZE}" in fused[0].text


def test_every_part_of_a_split() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        one, other, rest = F.layer_norm(x, w.shape, w).split([16, 16, 16], -1)
        return one * other + rest

    x, w = torch.randn(64, SIZE), torch.randn(SIZE)
    torch._dynamo.reset()
    with record.listen() as decisions:
        found = torch.compile(f, backend="normpass", options={"least_bytes": 0})(x, w)
    torch.testing.assert_close(found, f(x, w))
    assert ["c=16" in each.text for each in decisions if isinstance(each, Fused)] == [True]


def fused_of(f: Callable[..., Tensor], *args: Tensor) -> list[Fused]:
    """The regions of a function whose result is eager mode's."""
    torch._dynamo.reset()
    with record.listen() as decisions:
        found = torch.compile(f, backend="normpass", options={"least_bytes": 0})(*args)
    torch.testing.assert_close(found, f(*args))
    return [each for each in decisions if isinstance(each, Fused)]


def test_a_product_over_pieces() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = rotated(F.layer_norm(x, w.shape, w)) * w.cos() + 1
        return y / (2 + y.prod(-1, keepdim=True)) + rotated(y)

    fused = fused_of(f, torch.randn(64, SIZE), torch.randn(SIZE) / 8)
    assert [is_joined(each) and "prod[" in each.text for each in fused] == [True]


def test_positions_are_those_of_the_whole_row() -> None:
    """Integers are not cut: the first of a second piece would be the number 0."""

    def f(x: Tensor, w: Tensor, word: Tensor) -> Tensor:
        hot = torch.where(word[:, None] == torch.arange(SIZE), 1.0, 0.0)
        y = F.layer_norm(x, w.shape, w) - hot
        return rotated(y) * w + y - (y * hot).sum(-1, keepdim=True)

    fused_of(f, torch.randn(64, SIZE), torch.randn(SIZE), torch.arange(64) % SIZE)


def test_truth_values_beside_numbers() -> None:
    """They are no region's: it stays whole."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, w.shape, w)
        return torch.cat([(y > 0)[..., :24], y[..., 24:]], -1) * rotated(y)

    fused = fused_of(f, torch.randn(64, SIZE), torch.randn(SIZE))
    assert not any(map(is_joined, fused))


def test_flattened_heads_leave() -> None:
    """Their dimension has the heads as well: no part of it is one view."""

    def f(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rms_rope(x, w, cos, sin).transpose(1, 2).flatten(2)

    args = inputs(torch.float32)
    found, _ = compiled(f, args)
    as_exact(found, f, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_of_two_dimensions(dynamic: bool) -> None:
    """One of them cut, and the other of unknown length."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = (x - x.mean((1, 2), keepdim=True)) * x.var((1, 2), keepdim=True).rsqrt() * w
        return y + rotated(y).sin()

    x, w = torch.randn(4, 7, SIZE), torch.randn(SIZE)
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    with record.listen() as decisions:
        found = torch.compile(f, backend="normpass", options={"least_bytes": 0})(x, w)
    torch.testing.assert_close(found, f(x, w))
    assert [is_joined(each) for each in decisions if isinstance(each, Fused)] == [True]


@pytest.mark.parametrize("rows", [1, 64])
def test_what_dies_is_not_written_over(rows: int) -> None:
    """It is as large as a part of the result; of a single row it also lies as that does."""

    def f(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.layer_norm(x, w.shape, w)
        return torch.cat([y[..., 512:] * (a @ b), y[..., :512]], -1) * x

    x, w = torch.randn(rows, 1024), torch.randn(1024)
    fused = fused_of(f, x, w, torch.randn(rows, 8), torch.randn(8, 512))
    assert [is_joined(each) for each in fused] == [True]


def test_splits_of_one_part_cut_nothing() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, w.shape, w)
        return y.split([SIZE], -1)[0] * x.split([SIZE], -1)[0]

    assert fused_of(f, torch.randn(64, SIZE), torch.randn(SIZE))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("f", [rms_rope, layer_norm_rope_chunked], ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch", [0, 1])
def test_few_rows(f: Callable[..., Tensor], batch: int) -> None:
    args = inputs(torch.float32)
    args[0] = args[0].detach()[:batch].requires_grad_()
    found, fused = compiled(f, args)
    for one, eager in zip(found, both(f, args), strict=True):
        torch.testing.assert_close(one, eager)
    assert all(map(is_joined, fused))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_than_caches_hold(dtype: torch.dtype) -> None:
    """Written around the caches, where parts begin at addresses that no line of memory does."""
    args = many(dtype)
    found, fused = compiled(rms_rope, args)
    as_exact(found, rms_rope, args)
    assert all(map(is_joined, fused))


JOINED = """
region softmax_halves
axes    r=? c=24
input   x: f32[r c] (48, 1)
input   y: f32[r c] (48, 1)
a       = exp(x)
b       = exp(y)
both    = add(a, b)
sum     = sum[c](both)
one     = div(a, sum)
two     = div(b, sum)
output  y0: f32[r 1] = sum
output  y1: f32[r c] (48, 1) = two
output  y2: f32[r c] (48, 1) = one
joined  y1 y2 [1]
"""


def exact_halves(x: Tensor) -> list[Tensor]:
    y = torch.softmax(x.double(), -1)
    return [x.double().exp().sum(-1, keepdim=True), torch.cat([y[:, 24:], y[:, :24]], -1)]


@pytest.mark.parametrize("run", ["kernel", "reference", "out of place", "shapes"])
def test_one_tensor_of_two_outputs(run: str) -> None:
    """The operator returns what is joined as one, however it is run."""
    x = torch.randn(9, 48)
    halves = [x[:, :24], x[:, 24:]]
    if run == "shapes":
        found = region_op([each.to("meta") for each in halves], [9], JOINED)
        assert [(y.shape, y.stride()) for y in found] == [((9, 1), (1, 1)), ((9, 48), (48, 1))]
        return
    evaluated: Any = evaluate if run == "reference" else out_of_place
    call = region_op if run == "kernel" else lambda *args: evaluated(parse(args[2]), *args[:2])
    for one, exact in zip(call(halves, [9], JOINED), exact_halves(x), strict=True):
        torch.testing.assert_close(one, exact.float())


def test_in_triton(tmp_path: Path) -> None:
    x = torch.randn(9, 48)
    found = in_triton([x[:, :24], x[:, 24:]], JOINED, tmp_path)
    for one, exact in zip(found, exact_halves(x), strict=True):
        torch.testing.assert_close(one, exact.float())
