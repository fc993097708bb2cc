"""torch.ops.normpass.region as an operator: schema, fake kernel, layouts, refusals."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from normpass.backend.run import reference
from normpass.backend.run.op import region_op
from normpass.passes.region_text import parse

CENTRE = """\
region centre
axes    r=? c=19
input   x: f32[r c]
input   m: b8[r 1]
sum     = sum[c](x)
div     = div(sum, 19.0)
sub     = sub(x, div)
where   = where(m, sub, 0.0)
gt      = gt(where, 0.0)
amax    = amax[r](where)
output  y0: bf16[c r] (1, 19) = where
output  y1: b8[(r c)] = gt
output  y2: f32[c] = amax"""
STRIDED = """\
region strided
axes    r=? q=5 c=?
sizes   t0=?
input   x: f32[r q c] (t0, 0, 2)
sum     = sum[c](x)
mul     = mul(x, sum)
output  y: f32[(q c) r] = mul"""


def centre_inputs(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, 19), torch.randn(rows, 1) > 0]


def strided_input(r: int, c: int) -> torch.Tensor:
    return torch.randn(r, 1, 2 * c).expand(r, 5, 2 * c)[..., ::2]


@pytest.mark.parametrize("rows", [1, 7])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(region_op, (centre_inputs(rows), [rows], CENTRE))


def test_opcheck_of_strides_given_at_run_time() -> None:
    x = strided_input(4, 3)
    torch.library.opcheck(region_op, ([x], [4, 3, x.stride(0)], STRIDED))


@pytest.mark.parametrize("symbolic", [False, True])
def test_the_fake_kernel_agrees_with_the_real_one(symbolic: bool) -> None:
    real = region_op(centre_inputs(7), [7], CENTRE)
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None, static_shapes=not symbolic)
    with mode:
        inputs = [mode.from_tensor(x) for x in centre_inputs(7)]
        fake = region_op(inputs, [inputs[0].shape[0]], CENTRE)
    for a, b in zip(real, fake, strict=True):
        assert (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)


def test_outputs_alias_nothing() -> None:
    text = "region copy\naxes r=4\ninput x: f32[r]\noutput y: f32[r] = x\noutput z: f32[r] = x"
    x = torch.randn(4)
    y, z = region_op([x], [], text)
    assert len({t.untyped_storage().data_ptr() for t in (x, y, z)}) == 3
    assert torch.equal(x, y)
    assert torch.equal(x, z)


def test_one_tensor_as_two_inputs() -> None:
    text = """\
region twice
axes    r=6 c=5
input   a: f32[r c]
input   b: f32[r c]
mul     = mul(a, b)
sum     = sum[c](mul)
sub     = sub(a, sum)
output  y: f32[r c] = sub"""
    x = torch.randn(6, 5)
    (y,) = region_op([x, x], [], text)
    torch.testing.assert_close(y, x - (x * x).sum(1, keepdim=True))


def test_a_tensor_with_other_strides_is_laid_out_first() -> None:
    inputs = centre_inputs(7)
    expected = region_op(inputs, [7], CENTRE)
    inputs[0] = inputs[0].t().contiguous().t()
    for a, b in zip(region_op(inputs, [7], CENTRE), expected, strict=True):
        assert torch.equal(a, b)


def test_strides_of_short_axes_do_not_matter() -> None:
    x = torch.randn(1, 19).as_strided((1, 19), (7, 1))
    assert torch.equal(
        region_op([x, torch.tensor([[True]])], [1], CENTRE)[0],
        region_op([x.clone(), torch.tensor([[True]])], [1], CENTRE)[0],
    )


def test_a_storage_offset_counts() -> None:
    x = torch.randn(8, 19)
    mask = torch.ones(7, 1, dtype=torch.bool)
    a, b = (
        region_op([x[1:], mask], [7], CENTRE)[0],
        region_op([x[1:].clone(), mask], [7], CENTRE)[0],
    )
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([torch.randn(19, 7), torch.randn(7, 1) > 0], r"expected x of shape \(7, 19\)"),
        ([torch.randn(7, 19), torch.randn(7, 1)], "torch.bool, found shape .* and torch.float32"),
        ([torch.randn(6, 19), torch.randn(7, 1) > 0], r"found shape \(6, 19\)"),
    ],
)
def test_another_tensor_is_an_error_with_the_sizes(
    inputs: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        region_op(inputs, [7], CENTRE)


def test_a_wrong_number_of_tensors_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected 2 tensors, found 1"):
        region_op([torch.randn(7, 19)], [7], CENTRE)


def test_the_unfused_path_serves_other_devices() -> None:
    inputs = [x.to("meta") for x in centre_inputs(7)]
    assert [t.shape for t in region_op(inputs, [7], CENTRE)] == [(19, 7), (133,), (19,)]


def test_numbers_on_the_unfused_path_are_in_the_regions_precision() -> None:
    """0.3 of float64: PyTorch's tensor of a number is float32."""
    region = parse(
        """\
region moved
axes    r=?
input   x: f64[r]
add     = add(x, 0.3)
output  y: f64[r] = add"""
    )
    x = torch.randn(5, dtype=torch.float64)
    (found,) = reference.evaluate(region, [x], [5])
    assert torch.equal(found, x + 0.3)


SPREAD = """\
region spread
axes    r=? c=19
input   x: f32[r c]
input   e: f32[r c] (0, 0)
mul     = mul(x, e)
sum     = sum[r](mul)
output  y0: f32[r c] = mul
output  y1: f32[c] = sum"""


@pytest.mark.parametrize("rows", [0, 3])
def test_one_element_for_all_of_none(rows: int) -> None:
    """A kernel reads it in front of its loops; of no rows there is none, and no memory."""
    x, e = torch.randn(rows, 19), torch.randn(rows, 1)[:1].expand(rows, 19)
    e = e.as_strided((rows, 19), (0, 0))
    found = region_op([x, e], [rows], SPREAD)
    for one, exact in zip(found, [x * e, (x * e).sum(0)], strict=True):
        torch.testing.assert_close(one, exact)
