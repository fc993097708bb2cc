"""The first training step of a small model, as a user's script has it: nothing but torch is
imported. `normpass bench --warm-start` (warm_start.py) runs this file in new processes.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, BLOCKS = 256, 3


class Block(nn.Module):
    """Four norms, and linear layers of other sizes in each block: b s c -> b s c."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.group = nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.rms(self.layer(x)))))
        return x + self.group(x.transpose(1, 2)).transpose(1, 2).softmax(-1)


def main(backend: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(WIDTH, WIDTH + 64 * k) for k in range(BLOCKS)))
    torch.compile(model, backend=backend)(torch.randn(8, 512, WIDTH)).sum().backward()


if __name__ == "__main__":
    main(sys.argv[1])
