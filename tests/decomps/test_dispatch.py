"""Rules for autograd while something is traced: put in, asked, taken out to the last entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C import DispatchKey

from normpass.decomps.activate import register, registered, unregister
from normpass.decomps.registry import compositions

aten = torch.ops.aten
NORMS = list(compositions())


def kernels() -> dict[Any, dict[Any, Any]]:
    return {op: dict(op.py_kernels) for op in NORMS}


def test_the_norms_have_compositions() -> None:
    assert {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._batch_norm_with_update.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
        aten._fused_rms_norm.default,
    } == set(NORMS)


def test_everything_is_put_back() -> None:
    before = kernels()
    with registered():
        changed = kernels()
        register()
        with registered():
            assert kernels() == changed
        unregister()
    assert kernels() == before
    assert all(changed[op] != before[op] for op in NORMS)


def test_what_another_library_entered_meanwhile_stays() -> None:
    op, key = aten.native_layer_norm.default, DispatchKey.AutogradCPU
    before = kernels()

    def theirs(*args: Any) -> None:
        raise AssertionError("not called")

    try:
        with registered():
            op.py_kernels[key] = theirs
        assert op.py_kernels[key] is theirs
    finally:
        op.py_kernels.pop(key)
        op._dispatch_cache.clear()
    assert kernels() == before


def jvp_of_layer_norm() -> torch.Tensor:
    """Compiled: the operator's own formula cannot be traced with weights that are no duals."""
    torch._dynamo.reset()
    norm, x = torch.nn.LayerNorm(5).double(), torch.linspace(-1, 2, 20, dtype=torch.float64)
    x = x.reshape(4, 5) ** 2

    def function(v: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(norm, (v,), (v * v,))[1]

    return torch.compile(function, backend="aot_eager", fullgraph=True)(x) - function(x)


def test_rules_hold_from_register_to_unregister() -> None:
    with registered():
        assert jvp_of_layer_norm().abs().max() < 1e-12
    with pytest.raises(Exception, match="_fw_primal"):
        jvp_of_layer_norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_as_a_composition(dtype: torch.dtype, training: bool) -> None:
    """Results and running statistics are those of the operator."""
    op = aten.native_batch_norm.default
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype) * 3 + 1
    weight, bias = torch.tensor([1.0, 2, 3], dtype=dtype), torch.tensor([0.5, 0, -1], dtype=dtype)
    runs = []
    for function in (op, compositions()[op]):
        mean, var = torch.tensor([0.1, 0.2, 0.3]).to(dtype), torch.tensor([1.0, 2, 3]).to(dtype)
        results = function(x, weight, bias, mean, var, training, 0.3, 1e-5)
        runs.append((*results, mean, var))
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    for ours, stock in zip(*reversed(runs), strict=True):
        torch.testing.assert_close(ours, stock, check_dtype=False, **tolerance)
