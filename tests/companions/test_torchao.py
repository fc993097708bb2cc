"""torchao: its optimizers, which compile their own steps, and linears in float8 around norms.

What it rounds to few bits can fall to the other side for a difference in the last bit of float32:
results are compared with how much the few bits themselves change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from companions.loops import assert_fused, loss_of, rows, weights
from torch import Tensor, nn
from torch._dynamo.utils import counters

import normpass

pytest.importorskip("torchao", reason="torchao is not installed (the extra `companions`)")
optim = pytest.importorskip("torchao.optim")
float8 = pytest.importorskip("torchao.float8")

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Of torch and of torchao, none of them about what is tested here.
pytestmark = pytest.mark.filterwarnings("default")

WIDTH = 64  # optimizers quantize the state of 4096 numbers and more


def model() -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(
        linears[0], nn.LayerNorm(WIDTH), nn.Tanh(), linears[1], nn.RMSNorm(WIDTH), linears[2]
    )


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="normpass")


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far two sets of tensors are from each other, of their length."""
    first, second = (torch.cat([x.flatten() for x in each.values()]) for each in (one, other))
    return float((first - second).norm() / second.norm())


def train(run: Callable[[nn.Module], Any], kind: Callable[..., Any]) -> dict[str, Tensor]:
    net = model()
    start, compute = weights(net), run(net)
    optimizer = kind(net.parameters(), lr=1e-2)
    for x in rows(WIDTH, dtype=torch.float32).split(8)[:3]:
        loss_of(compute(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value - start[name] for name, value in weights(net).items()}


def test_an_optimizer_of_a_compiled_model() -> None:
    exact = train(nn.Module.train, torch.optim.AdamW)
    right = train(nn.Module.train, optim.AdamW8bit)
    found = train(compiled, optim.AdamW8bit)
    bits = apart(right, exact)
    assert bits > 1e-3
    assert apart(found, right) <= 0.05 * bits
    assert_fused()


def codes(width: int) -> list[Tensor]:
    """What an optimizer keeps in float8, by its own compiled step."""
    torch._dynamo.reset()
    weight = nn.Parameter(torch.zeros(width, width))
    optimizer = optim.AdamWFp8([weight])
    weight.grad = rows(width, width, torch.float32)
    optimizer.step()
    state = optimizer.state[weight]
    return [state[name].codes.float() for name in ("exp_avg", "exp_avg_sq")]


def test_an_optimizer_with_the_rules_registered() -> None:
    """Its quantization is a region like a norm's, and large enough here to be fused."""
    right = codes(512)
    with normpass.registered():
        found = codes(512)
    assert counters["normpass"]["fused norm"] == 1
    for one, other in zip(found, right, strict=True):
        assert other.any()
        assert (one != other).double().mean() <= 1e-4  # rounded to the other side
        torch.testing.assert_close(one, other, rtol=0.15, atol=0.002)  # and by one code at most


def gradients(run: Callable[[nn.Module], Any], config: Any = None) -> dict[str, Tensor]:
    net = model()
    if config is not None:
        float8.convert_to_float8_training(net, config=config)
    loss_of(run(net)(rows(WIDTH, dtype=torch.float32))).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linears_in_float8(recipe: str) -> None:
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=True)
    exact = gradients(nn.Module.train)
    right = gradients(nn.Module.train, config)
    found = gradients(compiled, config)
    bits = apart(right, exact)
    assert bits > 0.01
    assert apart(found, right) <= 0.05 * bits
    fused = [key for key in counters["normpass"] if key.startswith("fused")]
    assert {"fused layer_norm", "fused rms_norm"} <= set(fused)
    assert {"fused layer_norm_backward", "fused rms_norm_backward"} <= set(fused)
