"""A formula from its signature: what the record then says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from normpass.decomps import registry
from normpass.decomps.derivatives.binary import pow_backward
from normpass.decomps.manual import Gradient, Number, manual
from normpass.decomps.neutral import ZERO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def test_the_record_of_a_formula() -> None:
    """Of one that is written so: name, schema, source, what None stands for, dtypes of results."""
    rule = registry.derivative("clamp_backward_min_max")
    assert rule.kind == "vjp"
    assert rule.source == "torch/csrc/autograd/FunctionsManual.cpp: clamp_backward_min_max"
    assert rule.linear == ("grad",)
    assert str(rule.op._schema if rule.op else "") == (
        "normpass::clamp_backward_min_max(Tensor? grad, Tensor self, Tensor? min, Tensor? max, "
        "bool[] grad_input_mask) -> (Tensor, Tensor)"
    )
    assert registry.derivative("softplus_double_backward").kind == "double_backward"
    assert registry.derivative("clamp_jvp").linear == ("self_t", "min_t", "max_t")


def test_a_weight_of_ones_and_a_mask() -> None:
    name = "infinitely_differentiable_native_rms_norm_backward"
    rule = registry.derivative(name)
    assert rule.linear == ("dY", "drstd")
    assert str(rule.op._schema if rule.op else "") == (
        f"normpass::{name}(Tensor? dY, Tensor? drstd, Tensor input, SymInt[] normalized_shape, "
        "Tensor rstd, Tensor? weight_opt, bool[2] grad_input_mask) -> (Tensor, Tensor)"
    )
    g, x, rstd = torch.ones(2, 3), torch.arange(6.0).view(2, 3), torch.ones(2, 1)
    dx, dweight = rule(g, None, x, [3], rstd, torch.ones(3).double(), (True, True))
    assert (dx.dtype, dweight.dtype) == (torch.float32, torch.float64)
    without = rule(g, None, x, [3], rstd, None, (True, True))
    assert without[1] is None
    torch.testing.assert_close(without[0], dx)


def test_overloads_and_defaults() -> None:
    assert registry.derivative("clamp_backward.Tensor").op is not None
    schema = str(torch.ops.normpass.div_tensor_other_backward.default._schema)
    assert "str? rounding_mode=None" in schema


def test_numbers_and_options() -> None:
    """*numbers have the schema that the decorator says; **options are those of a new tensor."""
    schema = str(torch.ops.normpass.var_mean_backward.default._schema)
    assert "Tensor self, int[1]? dim_opt, Scalar? correction_opt, bool keepdim) ->" in schema
    schema = str(torch.ops.normpass.split_backward.default._schema)
    assert "SymInt[] sym_sizes, *, ScalarType? dtype=None, Layout? layout=None, Device?" in schema


def test_without_a_gradient_there_is_no_call() -> None:
    """Neither of the operator's formula, nor by its name: None, and ZERO, for every result."""
    x, d = torch.ones(3), torch.float32
    assert torch.ops.normpass.pow_backward(None, x, 0) is None
    assert pow_backward(ZERO, x, 0) is ZERO
    assert torch.ops.normpass.polar_backward(None, x) == (None, None)
    assert registry.derivative("cat_tensors_backward")(None, [[1], [2]], [d, d], 0) == [None, None]
    assert torch.ops.normpass.split_with_sizes_backward([None, None], [1, 2], 0, [3]) is None


def test_a_weight_that_is_not_there_is_one() -> None:
    g, x, y = torch.rand(3, 4).unbind()
    op = torch.ops.normpass.binary_cross_entropy_target_backward
    assert torch.equal(op(g, x, y, None, 0), op(g, x, y, torch.ones(4), 0))


def test_a_result_has_the_dtype_of_its_argument() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    grad, mask = torch.ones(3), [True, True]
    low, high = torch.zeros(3, dtype=torch.float16), torch.ones(3) / 2
    found = torch.ops.normpass.clamp_backward_min_max(grad, x, low, high, mask)
    assert [t.dtype for t in found] == [torch.float16, torch.float32]


def test_an_annotation_that_no_schema_has() -> None:
    def made_up_backward(grad: Gradient, sizes: Sequence[Number]) -> Tensor:
        return grad

    with pytest.raises(TypeError, match=r"made_up_backward: expected sizes .* found Sequence\[Num"):
        manual("grad: *n -> dself: *n")(made_up_backward)
