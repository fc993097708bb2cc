"""Graphs that others traced and hand over as they are: operators whole, written in place, forward
and backward of one step together.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import normpass
from normpass.backend.run.op import region_op
from normpass.passes.expand import Expander, out_of_place
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, GraphModule

aten = torch.ops.aten
WIDTH = 16


class Block(nn.Module):
    """b s c -> b s c, with a norm of each kind that ATen has an operator or a composite for."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-5)
        self.group = nn.GroupNorm(4, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(F.silu(self.up(self.rms(self.layer(x)))))
        return self.group(y.transpose(1, 2)).transpose(1, 2).softmax(-1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def training_step(net: nn.Module) -> Callable[..., list[Tensor]]:
    names = [name for name, _ in net.named_parameters()]

    def step(x: Tensor, target: Tensor, *parameters: Tensor) -> list[Tensor]:
        held = dict(zip(names, parameters, strict=True))
        y = torch.func.functional_call(net, held, (x,))
        loss = F.cross_entropy(y.flatten(0, 1), target.flatten())
        return [loss, *torch.autograd.grad(loss, parameters)]

    return step


def regions(graph: Graph) -> list[str]:
    return [parse(n.args[2]).name for n in graph.nodes if n.target == region_op]  # type: ignore[arg-type]


def targets(graph: Graph) -> set[Any]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


def assert_same(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for one, other in zip(found, right, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * max(scale, 1e-3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_whole_training_step(dynamic: bool) -> None:
    """As make_fx traces it: norms as operators, and an epsilon that rms norm adds in place."""
    model = net()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    inputs = x, torch.randint(WIDTH, (2, 3)), *model.parameters()
    step = training_step(model)
    traced = make_fx(step, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    assert aten.native_layer_norm.default in targets(traced.graph)
    fused = normpass.fuse(traced, inputs, least_bytes=0)
    fused.graph.lint()
    found = regions(fused.graph)
    assert {name.removesuffix("_backward") for name in found} >= {"layer_norm", "group_norm"}
    assert any(name.endswith("_backward") for name in found)
    left = targets(fused.graph)
    assert not left & {
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
    }
    # What no region takes in is what it was.
    assert {aten.addmm.default, aten.silu.default, aten.silu_backward.default} <= left
    others = inputs
    if dynamic:
        x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
        others = x, torch.randint(WIDTH, (3, 5)), *model.parameters()
    assert_same(fused(*others), step(*others))
    assert_same(traced(*others), step(*others))  # which was not written to


def test_what_pays_nothing_is_left_whole() -> None:
    model = net()
    inputs = torch.randn(2, 3, WIDTH).double(), torch.randint(WIDTH, (2, 3)), *model.parameters()
    traced = make_fx(training_step(model), tracing_mode="fake")(*inputs)
    fused = normpass.fuse(traced, least_bytes=1 << 40)
    assert not regions(fused.graph)
    rms_written_in_place = {aten.add_.Scalar, aten.add.Scalar}
    assert targets(fused.graph) - rms_written_in_place == (
        targets(traced.graph) - rms_written_in_place
    )


def test_parts_that_change_nothing_are_none() -> None:
    """As the factor 1 of silu's derivative on torch 2.11: they vanish, and no region has them."""
    gm = make_fx(lambda x: F.silu(x), tracing_mode="fake")(torch.randn(4))
    (silu,) = gm.graph.find_nodes(op="call_function", target=aten.silu.default)
    expander = Expander({aten.silu.default: lambda x: x * 1 * x.sigmoid()})
    (parts,) = expander.expand(gm.graph, {silu.name}).values()
    assert [part.target for part in parts] == [aten.sigmoid.default, aten.mul.Tensor]
    gm.recompile()
    torch.testing.assert_close(gm(x := torch.randn(4)), F.silu(x))


def test_meta_and_what_was_traced_with_it_stays() -> None:
    def f(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) @ x.t()

    traced = make_fx(f, tracing_mode="fake")(torch.randn(8, 8))
    traced.meta["whose"] = "theirs"
    (norm,) = traced.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    norm.meta["custom"] = {"of": "others"}
    fused = normpass.fuse(traced, least_bytes=0)
    assert fused.meta["whose"] == "theirs"
    fused = normpass.fuse(traced, least_bytes=1 << 40)
    (norm,) = fused.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    assert norm.meta["custom"] == {"of": "others"}


joint = pytest.importorskip("torch._functorch.aot_autograd")
needs_joint = pytest.mark.skipif(
    not hasattr(joint, "aot_compile_joint_with_descriptors"),
    reason="this torch has no aot_compile_joint_with_descriptors",
)


@pytest.mark.one_in(2)
@needs_joint
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_joint_graph(decomposed: bool) -> None:
    """Fused before it is taken apart: no part of the forward waits for a gradient, or AOTAutograd
    could not.
    """
    model = net()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    table = normpass.decompositions() if decomposed else {}
    seen: list[list[str]] = []

    def compiler(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        seen.append(regions(gm.graph))
        return make_boxed_func(gm.forward)

    with ExitStack() as stack:
        traced = joint.aot_export_joint_with_descriptors(stack, model, (x,), decompositions=table)
        traced.graph_module = normpass.fuse(traced.graph_module, least_bytes=0)
        run = joint.aot_compile_joint_with_descriptors(
            traced, fw_compiler=compiler, bw_compiler=compiler
        )
    y = run(*model.parameters(), x)
    y = y[0] if isinstance(y, tuple | list) else y
    g = torch.randn_like(y)
    inputs = [x, *model.parameters()]
    assert_same(torch.autograd.grad(y, inputs, g), torch.autograd.grad(model(x), inputs, g))
    forward, backward = seen
    assert {"layer_norm", "group_norm"} <= set(forward)
    assert not any(name.endswith("_backward") for name in forward)
    assert all(name.endswith("_backward") for name in backward)
    assert len(backward) >= 3


def test_a_region_of_both_phases_is_of_the_backward() -> None:
    """Whatever its last node is: what the forward computed of it is computed in the backward."""

    def f(x: Tensor, tangents_1: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return tangents_1 * 2 * (centred * centred.square().mean(1, keepdim=True).rsqrt())

    gm = make_fx(f, tracing_mode="fake")(torch.randn(64, 48), torch.randn(64, 48))
    for node in gm.graph.nodes:
        tangent = any("tangents" in arg.name for arg in node.all_input_nodes)
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward" if tangent else "is_forward"
    fused = normpass.fuse(gm, least_bytes=0)
    (call,) = fused.graph.find_nodes(op="call_function", target=region_op)
    tags = [node.meta["partitioner_tag"] for node in (call, *call.users)]
    assert tags == ["is_backward"] * 2
    x, g = torch.randn(64, 48), torch.randn(64, 48)
    torch.testing.assert_close(fused(x, g), f(x, g))


def written(function: Callable[..., Any], *inputs: Tensor) -> tuple[Graph, bool]:
    """A graph with its writes in place turned, and whether one is left; checked against eager."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    out_of_place(gm.graph)
    gm.graph.lint()
    gm.recompile()
    mine, theirs = ([x.clone() for x in inputs] for _ in range(2))
    for one, other in zip(tree_leaves(gm(*mine)), tree_leaves(function(*theirs)), strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    return gm.graph, any(str(target).split(".")[1].endswith("_") for target in targets(gm.graph))


@pytest.mark.parametrize(
    ("function", "stays"),
    [
        (lambda x: (x * 2).add_(1), False),
        (lambda x: (x * 2).add_(1).mul_(x).exp_(), False),
        (lambda x: (y := x * 2, y.add_(1), y * 3)[2], False),  # read again under its old name
        (lambda x: (y := x * 2, z := y * 5, y.add_(1), y + z)[3], False),
        (lambda x: x.add_(1), True),  # the caller's
        (lambda x: (y := x * 2, v := y[0], y.add_(1), v * 3)[3], True),  # a view of it is read
        (lambda x: (y := x * 2, y[0].add_(1), y * 3)[2], True),  # written to through a view
        (lambda x: (y := x.detach(), y.add_(1), x * 3)[2], True),
        (lambda x: (x.to(torch.float64) * 2).to(torch.float32).div_(x), False),
    ],
)
def test_writes_in_place(function: Callable[..., Any], stays: bool) -> None:
    assert written(function, torch.rand(3, 4))[1] == stays
