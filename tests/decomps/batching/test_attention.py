"""Attention's fused kernels for the CPU under vmap, against attention in primitives."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.testing import assert_close

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from torch import Tensor

V, B, H, L, S, D = 3, 2, 2, 5, 7, 8


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=0.3)


def primitives(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    weights = 0.3 * q @ k.mT
    if mask is not None:
        weights = weights + mask
    if causal:
        hidden = torch.ones(L, S, dtype=torch.bool).triu(1)
        weights = weights.masked_fill(hidden, -torch.inf)
    return weights.softmax(-1) @ v


MASKS = {
    "none": None,
    "l s": (L, S),
    "1 1 l s": (1, 1, L, S),
    "1 h l s": (1, H, L, S),
    "b 1 l s": (B, 1, L, S),
    "b h l s": (B, H, L, S),
}


def tensors(sizes: tuple[int, ...] | None, dims: tuple[int | None, ...]) -> list[Any]:
    every = (B, H, L, D), (B, H, S, D), (B, H, S, D), sizes
    return [
        None if s is None else torch.randn(s if d is None else (V, *s), dtype=torch.float64)
        for s, d in zip(every, dims, strict=True)
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batched", ["qkv", "qkvm", "q", "kv", "m"])
def test_every_mask_wherever_it_is_batched(mask: str, batched: str) -> None:
    if mask == "none" and "m" in batched:
        pytest.skip("there is none to be batched")
    dims = tuple(0 if name in batched else None for name in "qkvm")
    args = tensors(MASKS[mask], dims)

    def gradients(attend: Any, *args: Any) -> Any:
        def total(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
            y = attend(q, k, v, m, False)
            return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), y

        return vmap(grad(total, (0, 1, 2), has_aux=True), dims)(*args)

    with registered():
        compiled = torch.compile(
            lambda *a: gradients(attention, *a), backend="aot_eager", fullgraph=True
        )(*args)
    assert_close(compiled, gradients(primitives, *args))


@pytest.mark.parametrize("dims", list(product((0, 2, None), (0, -1))), ids=str)
def test_causal_wherever_v_lies(dims: tuple[int | None, int]) -> None:
    at_q, at_k = dims
    q, k, v, _ = tensors(None, (at_q, 0, 0, None))
    q = q if at_q is None else q.movedim(0, at_q)
    args, places = (q, k.movedim(0, at_k), v), (at_q, at_k, 0)

    def causal(attend: Any) -> Any:
        return vmap(lambda q, k, v: attend(q, k, v, None, True), places)

    with registered():
        compiled = torch.compile(
            lambda *a: causal(attention)(*a), backend="aot_eager", fullgraph=True
        )(*args)
    assert_close(compiled, causal(primitives)(*args))


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_no_example_is_attended_to_by_itself() -> None:
    q, k, v, _ = tensors(None, (0, 0, 0, None))
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    loss = grad(lambda q, k, v: attention(q, k, v, None, False).sum(), (0, 1, 2))
    with registered():
        torch.compile(vmap(loss), backend=aot_autograd(fw_compiler=backend), fullgraph=True)(
            q, k, v
        )
    (graph,) = graphs
    called = [n for n in graph.graph.nodes if "flash_attention_for_cpu" in str(n.target)]
    assert len(called) == 2  # forward and backward
