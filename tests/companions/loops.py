"""A small network, its data, and what is asked of it after some steps of a package's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from collections.abc import Mapping

OPTIONS = {"least_bytes": 0, "inner": "eager"}
# In float64, of the largest number of each weight: what other orders of sums may add up to.
ROUNDING = 1e-12
# What compilers and wrappers put into the names of parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "base_model.model.")


class Block(nn.Module):
    """b c -> b c."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def network(width: int = 16, blocks: int = 2) -> Net:
    """The same weights each time; in float64, where a difference is a mistake."""
    torch.manual_seed(0)
    return Net(width, blocks).double()


def rows(width: int, count: int = 32, dtype: torch.dtype = torch.float64) -> Tensor:
    """Examples, b c, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, width, generator=generator, dtype=dtype)


def loss_of(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, by the names that they have without wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        found[name] = parameter.detach().clone()
    return found


def off(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """How far tensors are from the right ones, of the largest number of each."""
    assert found.keys() == right.keys()
    return max(
        float((found[name] - right[name]).abs().max() / right[name].abs().max()) for name in right
    )


def assert_same_training(
    found: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    rounding: float = ROUNDING,
) -> None:
    """The weights have moved from where they started, and to where eager mode takes them."""
    assert all(not torch.equal(right[name], start[name]) for name in right)
    assert off(found, right) <= rounding


def assert_fused() -> None:
    """Norms were fused, forward and backward, and none was refused."""
    found = list(counters["normpass"])
    assert not [key for key in found if key.startswith("refused")], found
    fused = [key for key in found if key.startswith("fused")]
    assert any(key.endswith("norm_backward") for key in fused), found
    assert any(key.endswith("norm") for key in fused), found
