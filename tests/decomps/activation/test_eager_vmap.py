"""Whose rules vmap goes by in eager mode: functorch's own wherever they are right, else ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


def grouped(x: Tensor) -> Tensor:
    return F.group_norm(x, 1)


def _copies(x: Tensor) -> set[str]:
    """torch's own rule copies the input, whose example axis is not in front."""
    with torch.profiler.profile(acc_events=True) as profile:
        vmap(lambda v: F.batch_norm(v, None, None, training=True), in_dims=2)(x)
    return {event.key for event in profile.key_averages()} & {"aten::clone", "aten::contiguous"}


def test_vmap_goes_by_our_rules_where_they_are_needed() -> None:
    """Which rule was used: torch's own is in C++, and as good where no derivative is asked for."""
    x = torch.randn(2, 3, 5, 4)
    with registered(eager=True):
        assert _copies(x)
        assert not _copies(x.bfloat16())
        assert not _copies(x.requires_grad_())
    assert _copies(x)


@pytest.mark.parametrize("norm", [lambda x: F.batch_norm(x, None, None, training=True), grouped])
def test_integers_are_an_error_as_without_vmap(norm: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="not implemented for 'Long'"):
        norm(x)
    with registered(eager=True), pytest.raises(RuntimeError, match=r"found \['torch.int64'\]"):
        vmap(norm)(x[None])


def test_complex_numbers_go_through_rms_norm_as_without_vmap() -> None:
    op = torch.ops.aten._fused_rms_norm.default
    x = torch.randn(2, 3, 4, dtype=torch.complex64)
    with registered(eager=True):
        found = vmap(lambda v: op(v, [4], None, 1e-5)[0])(x)
    torch.testing.assert_close(found, op(x, [4], None, 1e-5)[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: aten.native_batch_norm(x, None, None, None, None, False, 0.1, 1e-5),
        lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, False, 0.1, 1e-5),
        lambda x: aten.native_batch_norm_backward(
            x, x, None, None, None, None, None, False, 1e-5, [True] * 3
        ),
        lambda x: aten.native_batch_norm_backward(
            x, x, None, None, None, None, None, True, 1e-5, [True] * 3
        ),
    ],
    ids=["forward", "no_stats", "backward", "backward in training"],
)
def test_a_batch_norm_without_the_statistics_it_needs(call: Callable[[Tensor], Any]) -> None:
    """PyTorch 2.13 ends the process, or asserts."""
    with registered(eager=True), pytest.raises((RuntimeError, ValueError), match=r"running|save_"):
        vmap(call)(torch.randn(2, 3, 4))


def test_a_norm_does_not_reach_into_the_examples() -> None:
    """PyTorch 2.13 takes the mean over all examples, without a word."""

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (3, 4))

    x = torch.randn(3, 4)
    torch.testing.assert_close(vmap(norm)(x), norm(x))
    with registered(eager=True), pytest.raises(RuntimeError, match=r"input of size\[4\]"):
        vmap(norm)(x)


@pytest.mark.parametrize("dim", [0, 1])
def test_running_statistics_are_updated_wherever_their_examples_lie(dim: int) -> None:
    """PyTorch 2.13 writes into a copy unless the examples are in front, without a word."""
    x = torch.randn(5, 3, 4, 6, dtype=torch.float64)

    def updated() -> list[Tensor]:
        shape = (5, 4) if dim == 0 else (4, 5)
        mean, var = torch.zeros(shape, dtype=x.dtype), torch.ones(shape, dtype=x.dtype)
        vmap(lambda x, m, v: F.batch_norm(x, m, v, training=True), (0, dim, dim))(x, mean, var)
        return [mean.movedim(dim, 0), var.movedim(dim, 0)]

    right = [0.1 * x.mean((1, 3)), 0.9 + 0.1 * x.var((1, 3))]
    with registered(eager=True):
        torch.testing.assert_close(updated(), right)
    if dim == 1:
        assert not torch.allclose(updated()[0], right[0])
