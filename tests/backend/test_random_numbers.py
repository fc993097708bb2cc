"""Random numbers that are drawn a vector at a time are Inductor's, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled import compile_fused
from torch import nn
from torch._inductor import config, cpu_vec_isa
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from normpass.backend.inductor import random_numbers
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

VECTORS = "_mul_epu32"  # the instruction that multiplies a vector's counters
WIDTHS = {
    256: cpu_vec_isa.VecAVX2,
    512: cpu_vec_isa.VecAVX512,
}


@pytest.fixture(autouse=True)
def without_faults() -> Iterator[None]:
    faults.forget()
    yield
    assert not faults.reported()


def drawn(backend: str, draw: Callable[..., Any], x: Tensor) -> tuple[list[Any], str]:
    """A function's results for two seeds, and the code that it was compiled to."""
    torch._dynamo.reset()
    compiled = torch.compile(draw, backend=backend, fullgraph=True)
    with config.patch(fx_graph_cache=False):
        _, code = run_and_get_code(compiled, x)
    results = []
    for seed in (0, 2**40 + 1):
        torch.manual_seed(seed)
        results.append(compiled(x))
    return results, "\n".join(code)


def widths() -> list[Any]:
    """Of the vectors that this processor has and whose instructions are written down."""
    valid = cpu_vec_isa.valid_vec_isa_list()
    return [bits for bits, kind in WIDTHS.items() if any(isinstance(isa, kind) for isa in valid)]


@pytest.mark.skipif(not widths(), reason="the processor has neither AVX2 nor AVX-512")
@pytest.mark.parametrize("bits", widths())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dropout_is_inductors(dtype: torch.dtype, bits: int) -> None:
    x = torch.ones(3, 37, 41, dtype=dtype)  # a tail, whatever a vector holds
    with config.patch({"cpp.simdlen": bits}):
        found, code = drawn("normpass", dropout, x)
        stock, theirs = drawn("inductor", dropout, x)
    assert f"_mm{bits}{VECTORS}" in code
    assert VECTORS not in theirs
    for ours, inductors in zip(found, stock, strict=True):
        assert torch.equal(ours, inductors)
        assert 0.1 < (ours == 0).double().mean() < 0.3
    assert not torch.equal(*found)


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.2)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "twice": lambda x: F.dropout(F.dropout(x, 0.5) + 1, 0.1),
    "of channels": lambda x: F.dropout1d(x, 0.5),
    "after a softmax": lambda x: F.dropout(torch.softmax(x, -1), 0.3),
    "before a norm": lambda x: F.layer_norm(x + F.dropout(x, 0.3), x.shape[-1:]),
    "transposed": lambda x: F.dropout(x, 0.3).transpose(1, 2).contiguous(),
    "uniform": lambda x: torch.rand_like(x) + torch.randn_like(x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_whatever_draws(name: str) -> None:
    x = torch.linspace(-1, 1, 5 * 64 * 96).view(5, 64, 96)
    found, _ = drawn("normpass", DRAWS[name], x)
    stock, _ = drawn("inductor", DRAWS[name], x)
    torch.testing.assert_close(found, stock, rtol=1e-5, atol=1e-5)


def test_sizes_that_vary() -> None:
    compiled = torch.compile(dropout, backend="normpass", dynamic=True)
    stock = torch.compile(dropout, backend="inductor", dynamic=True)
    for n in (3, 64, 1000, 4099):
        x = torch.ones(n, 5)
        results = []
        for draw in (compiled, stock):
            draw(x)
            torch.manual_seed(n)
            results.append(draw(x))
        assert torch.equal(*results)


def test_a_training_step_drops_what_inductors_does() -> None:
    """Forward and backward, where a softmax and norms are regions."""

    def step(backend: str) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.3, batch_first=True)
        x = torch.randn(4, 16, 32, requires_grad=True)
        compiled = compile_fused(net) if backend == "normpass" else torch.compile(net)
        compiled(x)
        torch.manual_seed(1)
        return list(torch.autograd.grad(compiled(x).square().sum(), [x, *net.parameters()]))

    for ours, theirs in zip(step("normpass"), step("inductor"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_fault_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(random_numbers, "_vector", fail)
    x = torch.ones(33, 65)
    found, code = drawn("normpass", dropout, x)
    assert VECTORS not in code
    torch.testing.assert_close(found, drawn("inductor", dropout, x)[0], rtol=0, atol=0)
    if widths():
        (fault,) = faults.reported()
        assert fault[0] == "drawing a vector"
    faults.forget()
