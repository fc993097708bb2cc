"""Whose rules vmap goes by in eager mode: functorch's own wherever they are right, else ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from torch import Tensor


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


def test_what_torch_has_no_kernel_for_is_an_error_here_too() -> None:
    def norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    for dtype in (torch.int64, torch.complex64):
        with registered(eager=True), pytest.raises(RuntimeError, match="not implemented for"):
            vmap(norm)(torch.ones(2, 3, 4, dtype=dtype))


def test_a_norm_does_not_reach_into_the_examples() -> None:
    """PyTorch 2.13 takes the mean over all examples, without a word."""

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (3, 4))

    x = torch.randn(3, 4)
    torch.testing.assert_close(vmap(norm)(x), norm(x))
    with registered(eager=True), pytest.raises(RuntimeError, match=r"input of size\[4\]"):
        vmap(norm)(x)
