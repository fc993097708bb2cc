"""How code that Inductor prints calls a region."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from normpass.backend import inductor_call
from tests.compiled import compile_fused

OPERATOR = "torch.ops.normpass.region.default("


class Turned(nn.Module):
    """The norm's input is made inside of the graph and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).tanh()


def gradients(function: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = function(x)
    return list(
        torch.autograd.grad(y, list(module.parameters()), torch.linspace(-1, 1, 8)[:, None] * y)
    )


def check(module: nn.Module, x: torch.Tensor, **options: Any) -> list[str]:
    """Compiles, compares with eager in float64, and returns the code that Inductor printed."""
    compiled = compile_fused(module, **options)
    found, code = run_and_get_code(gradients, compiled, module, x)
    right = module.double()
    for got, want in zip(found, gradients(right, right, x.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    return code


def test_regions_are_called_without_the_dispatcher() -> None:
    code = check(Turned(), torch.randn(5, 24, 8))
    assert len(code) == 2
    assert all(f"{inductor_call.NAME}([" in text for text in code)
    assert not any(OPERATOR in text.replace(f"'{OPERATOR[:-1]}'", "") for text in code)


def test_a_profiler_sees_the_operator() -> None:
    module, x = Turned(), torch.randn(5, 24, 8)
    compiled = compile_fused(module)
    gradients(compiled, module, x)
    with torch.profiler.profile() as profile:
        gradients(compiled, module, x)
    assert [event.count for event in profile.key_averages() if event.key == "normpass::region"] == [
        2
    ]


def test_cpp_wrapper() -> None:
    check(Turned(), torch.randn(5, 24, 8), inductor={"fx_graph_cache": False, "cpp_wrapper": True})


def test_without_what_it_needs_of_inductor_the_operator_is_called(monkeypatch: Any) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    from normpass.backend.op import region_op

    monkeypatch.delitem(lowerings, region_op, raising=False)
    monkeypatch.delattr(ir, "FallbackKernel")
    inductor_call.install.cache_clear()
    inductor_call.install()
    monkeypatch.undo()
    monkeypatch.delitem(lowerings, region_op, raising=False)
    try:
        code = check(Turned(), torch.randn(5, 24, 8))
        assert all(OPERATOR in text for text in code)
    finally:
        inductor_call.install.cache_clear()
