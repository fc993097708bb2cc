"""The loop of torchtitan and torchtune without them: blocks are compiled one by one, in place and
as whole graphs, around what recomputes their activations, and the loss is compiled apart.
"""

from __future__ import annotations

import pytest
import torch
from companions.loops import (
    Block,
    assert_fused,
    assert_same_training,
    loss_of,
    network,
    rows,
    weights,
)
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

# Dynamo looks at the gradient of a block's input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def train(backend: str | None, recomputed: bool) -> dict[str, Tensor]:
    net, loss = network(), loss_of
    assert all(isinstance(block, Block) for block in net.blocks)
    if recomputed:
        for name, block in net.blocks.named_children():
            net.blocks.register_module(name, checkpoint_wrapper(block))
    if backend:
        for block in net.blocks:
            block.compile(backend=backend, fullgraph=True)
        loss = torch.compile(loss_of, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in rows(16).split(8)[:3]:
        loss(net(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_training(recomputed: bool) -> None:
    right = train(None, recomputed)
    found = train("normpass", recomputed)
    assert_same_training(found, right, weights(network()))
    assert_fused()
    assert not counters["graph_break"]
