"""The derivatives of nested tensors, by the rows that call them, against autograd's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.table.binding import Vjp
from normpass.decomps.table.rows import row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten
SIZES = ((2, 4), (3, 4), (1, 4))
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")


def nested(sizes: Sequence[Sequence[int]] = SIZES) -> Tensor:
    parts = [torch.randn(*size, dtype=torch.float64) for size in sizes]
    return torch.nested.nested_tensor(parts)


def jagged(values: Tensor | None = None) -> Any:
    x = torch.randn(6, 4, dtype=torch.float64) if values is None else values
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5, 6]))


def holed() -> Any:
    """Rows of the buffer that belong to no part: after the first, and after the last."""
    x = torch.randn(9, 4, dtype=torch.float64)
    ends, lengths = torch.tensor([0, 4, 7, 8]), torch.tensor([2, 3, 1])
    return torch.nested.nested_tensor_from_jagged(x, ends, lengths)


def vjp_of(op: Any) -> Vjp:
    return Vjp(row_of(op, "AutogradNestedTensor"))


def each_subset(count: int) -> list[list[bool]]:
    return [[bool(k >> n & 1) for n in range(count)] for k in range(1, 2**count)]


def same(found: Tensor, expected: Tensor) -> None:
    assert found.layout == expected.layout
    pairs = zip(found.unbind(), expected.unbind(), strict=True)
    for a, b in pairs:
        assert_close(a, b)


def check_parts(op: Any, args: tuple[Any, ...], x: Tensor) -> None:
    """Where the gradients of some of the parts are not there, too."""
    x = x.detach().requires_grad_()
    parts = op(x, *args)
    grads = [torch.randn_like(part.detach().contiguous()) for part in parts]
    for there in each_subset(len(parts)):
        chosen = [(y, g) for y, g, t in zip(parts, grads, there, strict=True) if t]
        ys, gs = zip(*chosen, strict=True)
        (expected,) = torch.autograd.grad(ys, x, gs, retain_graph=True)
        asked = [g if t else None for g, t in zip(grads, there, strict=True)]
        same(vjp_of(op)((asked,), (x.detach(), *args), parts)["self"], expected)


def test_unbind() -> None:
    check_parts(aten.unbind.int, (), nested())


@pytest.mark.parametrize("make", [jagged, holed])
def test_unbind_of_jagged(make: Any) -> None:
    check_parts(aten.unbind.int, (), make())


def test_unbind_of_jagged_with_the_ragged_axis_last() -> None:
    check_parts(aten.unbind.int, (), jagged().transpose(1, 2))
    with pytest.raises(ValueError, match="expected a jagged tensor to be unbound along dim 0"):
        torch.ops.normpass.unbind_backward_nested_jagged([torch.ones(1)], jagged(), 1)


def test_the_gradient_of_jagged_has_the_buffers_shape() -> None:
    """And its offsets, by which it may be added to another."""
    x = holed()
    found = vjp_of(aten.unbind.int)(([*x.unbind()],), (x,), [*x.unbind()])["self"]
    assert found.shape == x.shape
    assert found.values().shape == x.values().shape
    same(found, x)


@pytest.mark.parametrize("dim", [2, -1])
def test_split_with_sizes(dim: int) -> None:
    check_parts(aten.split_with_sizes.default, ([1, 2, 1], dim), nested())


@pytest.mark.parametrize("transformed", [False, True])
def test_nested_from_padded(transformed: bool) -> None:
    shape = (3, 2, 3, 4) if transformed else (3, 3, 4)
    sizes = torch.tensor([[2, 8], [3, 8], [1, 8]] if transformed else SIZES)
    padded = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = aten._nested_from_padded(padded, sizes, transformed)
    g = nested(sizes.tolist())
    (expected,) = torch.autograd.grad(y, padded, g)
    args = (padded.detach(), sizes, transformed)
    found = Vjp(row_of(aten._nested_from_padded))((g,), args, y.detach())["padded"]
    assert_close(found, expected)


def test_second_derivatives() -> None:
    """The formulas are linear in the gradients, and autograd goes through them."""
    x = jagged()
    g = [torch.randn_like(part).requires_grad_() for part in x.unbind()]
    found = torch.ops.normpass.unbind_backward_nested_jagged([*g[:2], None], x, 0)
    assert_close(
        torch.autograd.grad(found.values().sin().sum(), g[:2]), tuple(v.cos() for v in g[:2])
    )
    x = nested()
    g = [torch.randn_like(part).requires_grad_() for part in x.unbind()]
    like = {"dtype": x.dtype, "layout": x.layout, "device": x.device}
    found = torch.ops.normpass.unbind_backward_nested(
        [None, *g[1:]], x._nested_tensor_size(), 0, **like
    )
    h = [torch.randn_like(part) for part in g]
    pulled = torch.autograd.grad(found, g[1:], torch.nested.nested_tensor(h))
    assert_close(pulled, tuple(h[1:]))
