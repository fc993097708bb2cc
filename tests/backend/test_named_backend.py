"""The ways to name the backend: by its name, as a function, with options in a partial."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from compiled import count_fused
from torch import Tensor, nn
from torch._dynamo.utils import counters

from normpass.backend.entry import normpass as backend

WIDTH = 8
UNCOMPILED = {"least_bytes": 0, "inner": "eager"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def rows() -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(16))


def gradients(net: nn.Module, function: Any) -> list[Tensor]:
    net.zero_grad()
    function(rows()).sin().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def test_the_function_as_a_backend() -> None:
    """As torch's registry finds it, with options beside it or in a partial, as wrappers pass them
    on.
    """
    net = model()
    right = gradients(net, net)
    assert "normpass" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("normpass") is backend
    ways: list[dict[str, Any]] = [
        {"backend": backend, "options": UNCOMPILED},
        {"backend": partial(backend, options=UNCOMPILED)},
        {"backend": partial(backend, options=UNCOMPILED, mode=None), "dynamic": True},
        {"backend": lambda graph, inputs, **rest: backend(graph, inputs, options=UNCOMPILED)},
    ]
    for way in ways:
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(gradients(net, torch.compile(net, **way)), right)
        assert (count_fused("forward"), count_fused("backward")) == (1, 1)


def test_a_wrong_keyword() -> None:
    graph = torch.fx.symbolic_trace(model())
    with pytest.raises(TypeError, match=r"normpass\(\) got an unexpected keyword.*'optoins'"):
        backend(graph, [rows()], optoins={})  # type: ignore[call-arg]
    compiled: Any = torch.compile(model(), backend=partial(backend, least_bytes=0))
    with pytest.raises(Exception, match=r"normpass\(\) got an unexpected keyword.*'least_bytes'"):
        compiled(rows())
