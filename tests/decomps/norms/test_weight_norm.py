"""Weight norm taken apart: PyTorch's results in every dtype and layout, and derivatives by
differences, which PyTorch's second one fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from normpass.decomps.activation import registered
from normpass.decomps.norms.weight_norm import weight_norm

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten
SHAPES = [((4, 3), (4, 1), 0), ((4, 3), (1, 3), 1), ((5, 4, 3, 2), (5, 1, 1, 1), 0)]


def numbers(*shape: int) -> Tensor:
    n = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(n * n + 0.5 * n).reshape(shape)


def layouts(v: Tensor) -> list[Tensor]:
    found = [v, v.t().contiguous().t() if v.dim() == 2 else v, torch.stack([v, v], -1)[..., 0]]
    return [*found, v.contiguous(memory_format=torch.channels_last)] if v.dim() == 4 else found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("of_v", "of_g", "dim"), SHAPES)
def test_it_is_the_operator(
    of_v: tuple[int, ...], of_g: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    """Dtypes and strides as they are, of what torch._weight_norm gives it: contiguous tensors."""
    v, g = numbers(*of_v).to(dtype), numbers(*of_g).to(dtype)
    own, right = weight_norm(v, g, dim), aten._weight_norm_interface(v, g, dim)
    for ours, want in zip(own, right, strict=True):
        assert (ours.dtype, ours.stride()) == (want.dtype, want.stride())
        torch.testing.assert_close(ours, want)


@pytest.mark.parametrize(("of_v", "of_g", "dim"), SHAPES)
def test_weights_of_every_layout(of_v: tuple[int, ...], of_g: tuple[int, ...], dim: int) -> None:
    g = numbers(*of_g).requires_grad_()
    for v in layouts(numbers(*of_v)):
        v.requires_grad_()
        right = torch._weight_norm(v, g, dim)
        with registered(eager=True):
            ours = torch._weight_norm(v, g, dim)
        assert ours.stride() == right.stride()
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("of_v", "of_g", "dim"), SHAPES)
def test_derivatives_in_eager_mode(of_v: tuple[int, ...], of_g: tuple[int, ...], dim: int) -> None:
    inputs = [numbers(*of_v).requires_grad_(), (numbers(*of_g) + 2).requires_grad_()]

    def function(v: Tensor, g: Tensor) -> Any:
        return torch._weight_norm(v, g, dim)

    assert not gradgradcheck(function, inputs, raise_exception=False), "PyTorch is right by now"
    with registered(eager=True):
        assert gradcheck(function, inputs, check_forward_ad=True)
        assert gradgradcheck(function, inputs)


def test_a_view_of_a_weight_in_channels_last() -> None:
    """Dynamo has seen PyTorch's contiguous result."""
    v = numbers(5, 4, 3, 2).contiguous(memory_format=torch.channels_last)

    def function(v: Tensor, g: Tensor) -> Tensor:
        return torch.func.grad(lambda v: torch._weight_norm(v, g, 0).view(-1).sin().sum())(v)

    compiled = torch.compile(function, backend="normpass", fullgraph=True)
    g = numbers(5, 1, 1, 1)
    torch.testing.assert_close(compiled(v, g), function(v, g), rtol=1e-10, atol=1e-10)
