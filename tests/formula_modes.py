"""What every formula owes, whatever it computes: derivatives in every mode, vmap, one trace for all
sizes, fake results like real ones, halves rounded once.

`call` is a formula's operator as a function of tensors; `tensors(n)` are float64 arguments for it
of size n, new ones at each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass.decomps.registry import decompositions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Call = Callable[..., Any]
    Tensors = Callable[[int], list[Tensor]]

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def results(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def check_derivatives(call: Call, tensors: Tensors) -> None:
    """In all of its tensors, by finite differences: backward, forward, and batches of both."""

    def of_all(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(r + 0 * sum(v.sum() for v in given) for r in results(call(*given)))

    assert torch.autograd.gradcheck(
        of_all,
        [v.requires_grad_() for v in tensors(2)],
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        fast_mode=True,
    )


def check_vmap(call: Call, tensors: Tensors, size: int, shared: int = 0) -> None:
    """vmap over all but the first `shared` tensors, batched along their last axis, is a loop."""
    a, b = tensors(size), tensors(size)
    b[:shared] = a[:shared]
    stacked = [torch.stack(pair, -1) for pair in zip(a[shared:], b[shared:], strict=True)]
    in_dims = (*(None,) * shared, *(-1,) * len(stacked))
    found = torch.vmap(call, in_dims)(*a[:shared], *stacked)
    for f, *pair in zip(*map(results, (found, call(*a), call(*b))), strict=True):
        assert_close(f, torch.stack(pair), **TIGHT)


def check_trace(call: Call, tensors: Tensors, sizes: tuple[int, int]) -> None:
    """Traced symbolically at the first size it runs at the second, by primitives alone."""
    traced = make_fx(call, decompositions(), tracing_mode="symbolic")(*tensors(sizes[0]))
    assert not any("normpass" in str(node.target) for node in traced.graph.nodes)
    for size in sizes:
        given = tensors(size)
        for pair in zip(results(traced(*given)), results(call(*given)), strict=True):
            assert_close(*pair, **TIGHT)


def check_fake(call: Call, given: list[Tensor]) -> None:
    """Fake tensors tell shape, dtype and strides of what comes out."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    both = call(*given), call(*map(mode.from_tensor, given))
    for real, fake in zip(*map(results, both), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def check_half(call: Call, given: list[Tensor], dtype: torch.dtype) -> None:
    """In half precision the result is float64's, rounded once."""
    half = [v.to(dtype) for v in given]
    both = call(*half), call(*(v.double() for v in half))
    for found, expected in zip(*map(results, both), strict=True):
        assert found.dtype == dtype
        scale = max(expected.abs().max().item(), 1.0)
        assert (found.double() - expected).abs().max().item() <= torch.finfo(dtype).eps * scale
