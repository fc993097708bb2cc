"""Maxima, medians and pools where values are equal, NaN, or none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import table_calls
import torch
from torch.testing import assert_close

from normpass.decomps.registry import derivative
from normpass.decomps.table.binding import jvp, vjp
from normpass.decomps.table.derivatives_yaml import entries

aten = torch.ops.aten
NAN = float("nan")
HAS_AMINMAX = "aminmax" in entries()  # torch 2.11 has not
X = torch.tensor([[1.0, 3.0, 3.0, -2.0], [-2.0, 0.5, -2.0, 0.5]], dtype=torch.float64)
WITH_NAN = torch.tensor([[1.0, NAN, 3.0, NAN], [-2.0, 0.5, -2.0, 0.5]], dtype=torch.float64)


def checked(op: Any, **args: Any) -> None:
    for check in (table_calls.check_vjp, table_calls.check_jvp):
        assert check(table_calls.Call(op, args)) == table_calls.RIGHT


@pytest.mark.parametrize("x", [X, WITH_NAN, X[0, 0]], ids=["ties", "nan", "a number"])
@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
def test_one_of_all(name: str, x: torch.Tensor) -> None:
    checked(getattr(aten, name).default, self=x)


@pytest.mark.parametrize("x", [X, WITH_NAN, X[:, :0].T, X[0, 0]], ids=["ties", "nan", "none", "0d"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_one_along_an_axis(x: torch.Tensor, keepdim: bool) -> None:
    dim = -1
    for op in (aten.amax.default, aten.amin.default):
        checked(op, self=x, dim=[dim], keepdim=keepdim)
    if x.numel():
        for op in (aten.amax.default, aten.amin.default):
            checked(op, self=x, dim=[], keepdim=keepdim)
    if HAS_AMINMAX:
        for chosen in (dim, None) if x.numel() else (dim,):
            checked(aten.aminmax.default, self=x, dim=chosen, keepdim=keepdim)
    checked(aten.max.dim, self=x, dim=dim, keepdim=keepdim)


def test_the_gradients_of_nan_go_where_it_is() -> None:
    rule = derivative("evenly_distribute_backward")
    found = rule(X[0, 1], WITH_NAN, torch.tensor(NAN, dtype=torch.float64))
    assert_close(found, WITH_NAN.isnan().double() * 1.5)
    assert rule(torch.tensor(torch.inf), X[0].float(), X[0, 1].float()).tolist() == [
        *(0, torch.inf, torch.inf, 0)
    ]


@pytest.mark.skipif(not HAS_AMINMAX, reason="torch has no row of it")
def test_one_end_alone() -> None:
    ends = aten.aminmax(X, dim=1)
    for k, end in enumerate(("amin", "amax")):
        grads = [X[:, 0] if j == k else None for j in range(2)]
        found = vjp(aten.aminmax)(grads, (X, 1), ends)["self"]
        alone = getattr(aten, end).default
        assert_close(found, vjp(alone)((X[:, 0],), (X, [1]), ends[k])["self"])


# --- pools --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 6, 5), (3, 6, 5), (0, 3, 6, 5)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gradient_of_a_pool_is_read_back(shape: tuple[int, ...], channels_last: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    if channels_last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    window: dict[str, Any] = {"kernel_size": [2, 2], "stride": [1, 2], "padding": [1, 0]}
    window |= {"dilation": [1, 1], "ceil_mode": False}
    y, places = aten.max_pool2d_with_indices(x, *window.values())
    args = {"grad_output": torch.randn_like(y), "self": x, **window, "indices": places}
    checked(aten.max_pool2d_with_indices_backward.default, **args)


def test_a_pool_of_three_axes() -> None:
    x = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    window = ([2, 2, 2], [2, 1, 2], [0, 1, 0], [1, 1, 1], False)
    y, places = aten.max_pool3d_with_indices(x, *window)
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    args = {"grad_output": torch.randn_like(y), "self": x, **dict(zip(names, window, strict=True))}
    checked(aten.max_pool3d_with_indices_backward.default, **args, indices=places)


def test_what_upstream_refuses() -> None:
    """A pool that did not keep its indices; its message is PyTorch's."""
    x = torch.randn(1, 4, 4)
    op = aten.max_pool2d_backward.default
    args = {"grad_output": x[:, :2, :2], "self": x, "kernel_size": [2, 2]}
    with pytest.raises(NotImplementedError, match=r"set `return_indices=True`\."):
        vjp(op)((x,), args, x, ["grad_output"])


def test_an_operator_that_warns() -> None:
    """PyTorch's own, for its tests."""
    op = aten._test_warn_in_autograd.default
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = vjp(op)((X,), (X,), X)["self"]
    assert [str(w.message) for w in seen] == ["Warn from backward"]
    assert_close(found, X)


def test_no_tangent_makes_none() -> None:
    assert jvp(aten.max.dim)({}, (X, 1), aten.max.dim(X, 1)) == (None, None)
    assert derivative("gather_with_keepdimed_indices")(None, 1, X.argmax(1), False) is None
