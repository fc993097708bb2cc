"""How code that Inductor prints calls a region."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from compiled import compile_fused, count_fused
from torch import nn
from torch._inductor.utils import run_and_get_code
from tracing import trace

from normpass.backend import entry
from normpass.backend.explain import record
from normpass.backend.inductor import inductor_call
from normpass.backend.options import Options
from normpass.backend.run import toolchain
from normpass.passes.pipeline import Refused

OPERATOR = "torch.ops.normpass.region.default("

# Prints how many regions were fused and how often Inductor was told of them.
EAGER = """
import torch
from torch._dynamo.utils import counters
from normpass.backend.inductor import inductor_call
norm = torch.nn.LayerNorm(37)
options = {"inner": "eager", "least_bytes": 0}
torch.compile(norm, backend="normpass", options=options)(torch.randn(6, 37))
fused = sum(n for name, n in counters["normpass"].items() if name.startswith("fused"))
print(fused, inductor_call.install.cache_info().misses)
"""


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
    assert all(f"= {inductor_call.CALL_SITE}(" in text for text in code)
    assert not any(OPERATOR in text for text in code)
    assert not any(f"'{OPERATOR[:-1]}" in text for text in code)  # its results are not checked


def test_a_profiler_sees_the_operator() -> None:
    module, x = Turned(), torch.randn(5, 24, 8)
    compiled = compile_fused(module)
    gradients(compiled, module, x)
    with torch.profiler.profile(acc_events=True) as profile:
        gradients(compiled, module, x)
    assert [event.count for event in profile.key_averages() if event.key == "normpass::region"] == [
        2
    ]


def test_a_graph_as_wrapper_gets_inductors_own() -> None:
    """Stock Inductor has it on GPUs alone, so this asks the pass."""
    from torch._inductor import config

    graph = trace(lambda x: nn.functional.layer_norm(x, (24,)), torch.randn(5, 24))
    with config.patch(fx_wrapper=True), record.listen() as heard:
        entry.FusionPass(Options(least_bytes=0))(graph.graph)
    (decision,) = heard
    assert isinstance(decision, Refused)
    assert decision.reason.startswith("fx_wrapper: ")


def test_half_precision_is_rounded_where_inductor_is_told_so() -> None:
    """emulate_precision_casts: every result is rounded as in eager mode, inside of a region too."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * x + x) * x  # in half precision, rounded three times
        wide = y.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)

    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(8, 200).to(dtype)
        y = ((x * x + x) * x).double()
        exact = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        own = float((function(x) - exact).abs().max())

        def distance(emulate: bool, x: torch.Tensor = x, exact: torch.Tensor = exact) -> float:
            torch._dynamo.reset()
            settings = {"fx_graph_cache": False, "emulate_precision_casts": emulate}
            found = compile_fused(function, inductor=settings)(x)
            assert count_fused() >= 1
            return float((found - exact).abs().max())

        assert distance(emulate=True) <= 2 * own  # of sums of float32 in another order
        assert distance(emulate=False) > torch.finfo(dtype).eps / 8


def test_without_what_it_needs_of_inductor_the_operator_is_called(monkeypatch: Any) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    from normpass.backend.run.op import region_op

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


def test_with_eager_inside_inductor_is_not_told() -> None:
    """In a process of its own: here other tests have told it."""
    done = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0"]


def test_without_a_compiler_inductor_is_not_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(inductor_call, "install", lambda: pytest.fail("Inductor was told"))
    monkeypatch.setattr(toolchain, "missing_compiler", lambda: "no compiler for this test")
    module, x = nn.LayerNorm(24), torch.randn(5, 24)
    torch.testing.assert_close(compile_fused(module)(x), module(x))
