"""as_strided and as_strided_scatter, against autograd's own and against differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import gradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass.decomps.registry import rules
from normpass.decomps.table.binding import vjp

if TYPE_CHECKING:
    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops, aten = torch.ops.normpass, torch.ops.aten
TIGHT = {"rtol": 1e-12, "atol": 1e-14}
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128, torch.bfloat16], ids=str
)

# A tensor made from a storage of 24, the view's sizes, strides and offset.
CASES: dict[str, tuple[Any, list[int], list[int], int | None]] = {
    "transposed": (lambda s: s.view(4, 6), [6, 4], [1, 6], None),
    "windows": (lambda s: s.view(24), [10, 4], [2, 1], 1),
    "repeated": (lambda s: s.view(4, 6), [3, 4, 2], [0, 6, 1], 2),
    "a number": (lambda s: s.view(4, 6), [], [], 7),
    "a number of its own offset": (lambda s: s[5:].view(19), [], [], None),
    "a diagonal": (lambda s: s.view(4, 6), [4], [7], 0),
    "a later part": (lambda s: s[8:20].view(3, 4), [2, 2], [4, 1], 13),
    "an earlier offset": (lambda s: s[8:20].view(3, 4), [2, 2], [4, 1], 8),
    "beyond the input": (lambda s: s[8:20].view(3, 4), [6, 4], [4, 1], 0),
    "of columns": (lambda s: s.view(4, 6)[:, 1:4].t(), [3, 2], [2, 6], 1),
    "of every other": (lambda s: s.view(4, 6)[::2, ::3], [24], [1], 0),
    "of an expanded": (lambda s: s[:6].view(6, 1).expand(6, 3), [4], [1], 1),
    "of windows": (lambda s: s.as_strided([5, 3], [2, 1], 2), [4, 2], [3, 1], 1),
    "windows of windows": (lambda s: s.as_strided([5, 3], [2, 1], 2), [6, 4], [1, 1], 2),
    "nothing": (lambda s: s.view(4, 6), [0, 4], [1, 6], 0),
    "of nothing": (lambda s: s[:0].view(0, 6), [2], [1], 0),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Any]]:
    make, *numbers = case
    x = make(torch.randn(24, dtype=dtype))
    return x, numbers


@by_dtype
@by_case
def test_as_strided_backward_is_autograds_own(case: Any, dtype: torch.dtype) -> None:
    x, numbers = made(case, dtype)
    leaf = x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    y = leaf.as_strided(*numbers)
    g = torch.randn_like(y)
    found = ops.as_strided_backward(g, x, *numbers)
    expected = torch.autograd.grad(y, leaf, g)[0]
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else TIGHT
    assert_close(found, expected, **tolerance)
    assert found.dtype is dtype
    assert_close(vjp(aten.as_strided)((g,), (x, *numbers), y)["self"], expected, **tolerance)
    assert ops.as_strided_backward(None, x, *numbers) is None


@by_case
def test_as_strided_backward_can_be_differentiated(case: Any) -> None:
    x, numbers = made(case)
    g = torch.randn_like(x.as_strided(*numbers)).requires_grad_()
    if g.numel() and x.numel():
        assert gradcheck(lambda g: ops.as_strided_backward(g, x, *numbers), g)


def test_a_trace_at_one_size_runs_at_another() -> None:
    def call(g: Tensor, x: Tensor) -> Tensor:
        n = x.shape[0]
        return ops.as_strided_backward(g, x, [n - 2, 3], [1, 1], 0)

    traced = make_fx(call, tracing_mode="symbolic")(torch.randn(4, 3), torch.randn(6))
    g, x = torch.randn(7, 3), torch.randn(9)
    assert_close(traced(g, x), call(g, x))


WRITTEN: dict[str, tuple[Any, list[int], list[int], int | None]] = {
    name: CASES[name]
    for name in ("transposed", "a number", "a diagonal", "a later part", "of columns", "nothing")
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("case", WRITTEN.values(), ids=WRITTEN)
def test_what_as_strided_scatter_writes_to(case: Any, dtype: torch.dtype) -> None:
    """It is linear: the gradient along a step is that of the step."""
    x, numbers = made(case, dtype)
    src = torch.randn_like(x.as_strided(*numbers))
    g, step = torch.randn(x.shape, dtype=dtype), torch.randn_like(src)
    found = ops.as_strided_scatter_backward(g, x, src, *numbers)
    storage = x.new_zeros(x.untyped_storage().nbytes() // x.element_size())
    moved = storage.normal_().as_strided(x.shape, x.stride(), x.storage_offset())
    rest = torch.as_strided_scatter(moved, step * 0, *numbers)
    assert_close((g.conj() * rest).sum(), (found.conj() * moved).sum(), **TIGHT)


def test_pytorchs_gradient_of_what_as_strided_scatter_writes_to() -> None:
    """It is that of the part which is written over, and nothing for what stays."""
    x = torch.randn(3, dtype=torch.float64).requires_grad_()
    src, g = torch.randn(1, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0]).double()
    y = torch.as_strided_scatter(x, src, [1], [1], 1)
    args = (x, src, [1], [1], 1)
    found = vjp(aten.as_strided_scatter)((g,), args, y, ["self"])["self"]
    assert_close(found, torch.tensor([1.0, 0.0, 3.0]).double(), **TIGHT)
    assert_close(torch.autograd.grad(y, x, g)[0], torch.tensor([0.0, 2.0, 0.0]).double(), **TIGHT)
