"""Collectives in a graph: no region holds one, and none waits for what came after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import normpass
from normpass.backend.run.op import region_op
from normpass.passes.region_text import parse
from normpass.passes.regions import is_collective

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)
X, G, W = torch.randn(8, 6, 16), torch.randn(8, 6, 16), torch.randn(16)


def all_reduce(x: Tensor) -> Tensor:
    """Started and waited for."""
    started = torch.ops._c10d_functional.all_reduce(x, "sum", "0")
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return waited


def all_gather(x: Tensor) -> Tensor:
    started = torch.ops._c10d_functional.all_gather_into_tensor(x, 1, "0")
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return waited


def normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x_hat and rstd."""
    mean = x.mean(-1, keepdim=True)
    rstd = (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return (x - mean) * rstd, rstd


def gradients(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Of a layer norm, as its operator has them but one after the other: dx, dw, db."""
    x_hat, rstd = normalized(x)
    gw = g * w
    dx = rstd * (gw - gw.mean(-1, keepdim=True) - x_hat * (gw * x_hat).mean(-1, keepdim=True))
    return dx, (g * x_hat).sum([0, 1]), g.sum([0, 1])


def each_sent_at_once(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """As DTensor has the gradients of a replicated weight: dw is on its way before db begins."""
    x_hat, rstd = normalized(x)
    gw = g * w
    dx = rstd * (gw - gw.mean(-1, keepdim=True) - x_hat * (gw * x_hat).mean(-1, keepdim=True))
    dw = all_reduce((g * x_hat).sum([0, 1]))
    return dx, dw, all_reduce(g.sum([0, 1]))


def gathered_late(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The weight arrives when statistics of the same rows are on their way already."""
    mean = x.mean(-1, keepdim=True)
    sent = all_reduce(mean)
    weight = all_gather(w)
    rstd = (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return (x - mean) * rstd * weight + b, sent


def between_two_norms(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Sums of parts, as after a row-wise divided linear layer."""
    y = F.layer_norm(x, w.shape, w, b)
    return (F.layer_norm(all_reduce(y * g) + x, w.shape, w, b),)


def sharded(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Weights gathered where they are used, gradients scattered as soon as they are there."""
    w, b = all_gather(w), all_gather(b)
    y = F.layer_norm(x, w.shape, w, b)
    z = F.layer_norm(x + torch.tanh(y), w.shape, w, b)
    dx, *others = torch.autograd.grad(z, [x, w, b], g)
    return dx, *map(all_reduce, others)


FUNCTIONS = [each_sent_at_once, gathered_late, between_two_norms, sharded]


def before_each(graph: Graph) -> dict[str, set[str]]:
    """The operators that stand before each collective, by their names."""
    found, names = {}, set[str]()
    for node in graph.nodes:
        if is_collective(node):
            found[node.name] = set(names)
        if node.op == "call_function":
            names.add(node.name)
    return found


def fused(function: Callable[..., Any]) -> tuple[Graph, Graph]:
    """The graph of a function, and what becomes of it."""
    inputs = [x.clone().requires_grad_(function is sharded) for x in (X, G, W, W)]
    table = normpass.decompositions()
    gm = make_fx(function, decomposition_table=table, tracing_mode="fake")(*inputs)
    return gm.graph, normpass.fuse(gm, least_bytes=0).graph


@pytest.mark.parametrize("function", FUNCTIONS)
def test_none_waits_for_what_came_after_it(function: Callable[..., Any]) -> None:
    traced, now = fused(function)
    now.lint()
    assert [n.name for n in traced.nodes if is_collective(n)] == [
        n.name for n in now.nodes if is_collective(n)
    ]
    assert now.find_nodes(op="call_function", target=region_op)
    new = {n.name for n in now.nodes} - {n.name for n in traced.nodes}
    old = before_each(traced)
    for name, before in before_each(now).items():
        assert before - new <= old[name]
        # Nor does a region stand before it that reads what came after it.
        for call in now.find_nodes(op="call_function", target=region_op):
            if call.name in before:
                reads = {x.name for x in call.all_input_nodes if x.op == "call_function"}
                assert reads - new <= old[name]


def test_what_is_on_its_way_takes_the_others_along() -> None:
    """dw and db come from one region with dx though dw is sent before db was computed."""
    _, now = fused(each_sent_at_once)
    (call,) = now.find_nodes(op="call_function", target=region_op)
    assert len(parse(call.args[2]).results) == 3  # type: ignore[arg-type]
    order = list(now.nodes)
    first = next(node for node in order if is_collective(node))
    assert order.index(call) < order.index(first)


def test_without_collectives_it_is_the_same_region() -> None:
    _, now = fused(gradients)
    (call,) = now.find_nodes(op="call_function", target=region_op)
    assert len(parse(call.args[2]).results) == 3  # type: ignore[arg-type]


def test_statistics_on_their_way_do_not_wait_for_a_weight() -> None:
    _, now = fused(gathered_late)
    order = list(now.nodes)
    (call,) = now.find_nodes(op="call_function", target=region_op)
    (weight,) = (n for n in order if "all_gather" in n.name)
    reads = {node.name for node in call.all_input_nodes}
    assert not any("wait" in name for name in reads) or order.index(call) > order.index(weight)
    sent = next(node for node in order if "all_reduce" in node.name)
    assert order.index(sent) < order.index(weight)
