"""Norm operators for which torch.vmap has no rule of its own, in compiled functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass.decomps.activation import registered
from normpass.decomps.registry import find_op

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

V, N, C, S = 3, 4, 6, 5
MASK = [True, True, True]


def with_update(x: Tensor, c: Tensor) -> Any:
    mean, var = x.amax((0, 2)) * 2, x.amax((0, 2)) ** 2  # batched with x, and written in place
    return *aten._batch_norm_with_update(x, c, None, mean, var, 0.3, 0.25)[:3], mean, var


FUNCTIONS = {
    "_fused_rms_norm": lambda x, c: aten._fused_rms_norm(x.mT, [C], c, None),
    "_batch_norm_with_update": with_update,
    "_batch_norm_no_update": lambda x, c: aten._batch_norm_no_update(x, c, c, c, c + 1, 0.3, 0.25),
    "_native_batch_norm_legit_no_training": lambda x, c: aten._native_batch_norm_legit_no_training(
        x, c, c, c, c + 1, 0.3, 0.25
    ),
    "_native_batch_norm_legit_functional": lambda x, c: aten._native_batch_norm_legit_functional(
        x, c, c, c, c + 1, True, 0.3, 0.25
    ),
    "_batch_norm_with_update_functional": lambda x, c: aten._batch_norm_with_update_functional(
        x, c, c, c, c + 1, 0.3, 0.25
    ),
    "batch_norm_backward": lambda x, c: aten.batch_norm_backward(
        x.sin(), x, c, None, None, c, c + 1, True, 0.25, MASK, x.new_empty(0, dtype=torch.uint8)
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dims", [(0, 0), (2, 1), (1, None)], ids=str)
def test_a_compiled_vmap_is_the_loop(name: str, dims: tuple[int, int | None]) -> None:
    if find_op(f"aten.{name}.default") is None:
        pytest.skip(f"this torch has no {name}")
    function = FUNCTIONS[name]
    x, c = torch.randn(V, N, C, S).double(), torch.rand(V, C).double() + 0.5
    c = c[0] if dims[1] is None else c
    expected = [
        torch.stack(r)
        for r in zip(
            *(function(x[i], c if dims[1] is None else c[i]) for i in range(V)), strict=True
        )
    ]
    torch._dynamo.reset()
    with registered():
        vmapped = torch.compile(torch.vmap(function, dims), backend="aot_eager", fullgraph=True)
        found = vmapped(x.movedim(0, dims[0]), c if dims[1] is None else c.movedim(0, dims[1]))
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-11)
