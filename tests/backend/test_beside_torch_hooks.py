"""Hooks of users around compiled code and inside of Inductor, with this backend: called as often as
with stock, with the same values, and with graphs whose nodes say where they came from.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled import count_fused
from higher_order_cases import IGNORED
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.traceback import annotate
from torch.nn import functional as F

import normpass
from normpass.backend.run.op import region_op

if TYPE_CHECKING:
    from torch.fx import Graph, Node

pytestmark = IGNORED
WIDTH = 8
UNCOMPILED = {"least_bytes": 0, "inner": "eager"}
UNCACHED = {"fx_graph_cache": False}
OURS: dict[str, Any] = {"backend": "normpass", "options": UNCOMPILED}
STOCK: dict[str, Any] = {"backend": "aot_eager"}


class Net(nn.Module):
    """A norm, in a place that is annotated, between linear layers and an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate({"stage": 3}):
            x = self.norm(self.first(x))
        return self.last(F.gelu(x))


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(net: nn.Module, function: Any, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    function(x).sin().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


# ---- of modules, tensors and parameters


def heard(how: dict[str, Any] | None, **flags: bool) -> list[tuple[str, Tensor]]:
    """What each hook was called with, in turn, over two steps."""
    net, x = Net(), inputs()
    calls: list[tuple[str, Tensor]] = []

    def note(name: str, value: Tensor) -> None:
        calls.append((name, value.detach().clone()))

    net.norm.register_forward_pre_hook(lambda _, args: note("before", args[0]))
    net.norm.register_forward_hook(lambda _, args, y: note("after", y))
    net.norm.register_full_backward_pre_hook(lambda _, given: note("backward before", given[0]))
    net.norm.register_full_backward_hook(lambda _, found, given: note("backward", found[0]))
    net.norm.weight.register_hook(lambda g: note("weight", g))
    net.norm.bias.register_post_accumulate_grad_hook(lambda p: note("bias", p.grad))
    x.register_hook(lambda g: note("input", g))
    with torch._dynamo.config.patch(**flags):
        function = torch.compile(net, **how) if how else net
        for _ in range(2):
            gradients(net, function, x)
    torch._dynamo.reset()
    return calls


def test_hooks_of_modules_and_tensors() -> None:
    """Dynamo ends graphs at a module with backward hooks, whose norm is a graph of its own, or runs
    uncompiled on torch 2.11.
    """
    ours, right = heard(OURS), heard(None)
    norms = 0 if torch.__version__ < (2, 12) else 1  # type: ignore[operator]
    assert (count_fused("forward"), count_fused("backward")) == (norms, norms)
    stock = heard(STOCK)
    assert [name for name, _ in ours] == [name for name, _ in stock]
    assert sorted(name for name, _ in ours) == sorted(name for name, _ in right)
    for kind in {name for name, _ in right}:
        found, want = ([value for name, value in calls if name == kind] for calls in (ours, right))
        torch.testing.assert_close(found, want)


def test_hooks_that_change_values() -> None:
    """In the graph: what a forward hook returns, and what hooks of tensors make of gradients."""

    def function(x: Tensor) -> Tensor:
        y = net(x)
        y.register_hook(lambda g: g * 2)
        return y

    net, x = Net(), inputs()
    net.norm.register_forward_hook(lambda _, args, y: y * 3)
    net.norm.weight.register_hook(lambda g: g * 5)
    right = gradients(net, function, x)
    compiled = torch.compile(function, **OURS)
    for _ in range(2):
        torch.testing.assert_close(gradients(net, compiled, x), right)
    assert (count_fused("forward"), count_fused("backward")) == (1, 1)


# ---- of what is saved


@pytest.mark.parametrize("double_backward", [True, False])
def test_saved_tensors(double_backward: bool) -> None:
    """Packed as often as with stock; an input once more where further derivatives may ask for it,
    which is unpacked only then. (Not on torch 2.11, which lets only its own code pack.)
    """

    def packed(how: dict[str, Any]) -> tuple[list[int], list[int]]:
        net, x, packs, unpacks = Net(), inputs(), list[int](), list[int]()
        right = gradients(net, net, x)
        compiled = torch.compile(net, **how)

        def pack(x: Tensor) -> Tensor:
            packs.append(x.numel())
            return x * 2

        def unpack(x: Tensor) -> Tensor:
            unpacks.append(x.numel())
            return x / 2

        def function(x: Tensor) -> Any:
            with saved_tensors_hooks(pack, unpack):
                return compiled(x * 1)

        torch.testing.assert_close(gradients(net, function, x), right)
        torch._dynamo.reset()
        return sorted(packs), sorted(unpacks)

    inductor = {"fx_graph_cache": False}
    options = {"least_bytes": 0, "double_backward": double_backward, "inductor": inductor}
    packs, unpacks = packed({"backend": "normpass", "options": {**options, "recompute": False}})
    assert count_fused("backward") == 1
    stock_packs, stock_unpacks = packed({"backend": "inductor", "options": UNCACHED})
    assert unpacks == stock_unpacks
    packs_inputs = double_backward and hasattr(torch._C._autograd, "_make_saved_tensor")
    assert packs == sorted(stock_packs + [16 * WIDTH] * packs_inputs)


@pytest.mark.parametrize("inside", [True, False])
def test_save_on_cpu(inside: bool) -> None:
    net, x = Net(), inputs()

    def function(x: Tensor) -> Any:
        with save_on_cpu():
            return compiled(x)

    right = gradients(net, net, x)
    compiled: Any = net if inside else torch.compile(net, **OURS)
    whole = torch.compile(function, **OURS) if inside else function
    for _ in range(2):
        torch.testing.assert_close(gradients(net, whole, x), right)
    assert count_fused("backward") == 1


# ---- of Inductor

PLACES = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


@pytest.mark.parametrize("where", ["options", "config", "config and registered"])
def test_passes_of_inductor(where: str) -> None:
    """Each once for each graph: the pre-passes see graphs as they were, the post-passes ours."""
    seen: list[tuple[str, int]] = []

    def passes(place: str) -> Any:
        return lambda graph: seen.append((place, len(regions(graph))))

    theirs = {place: passes(place) for place in PLACES}
    net, x = Net(), inputs()
    inductor = {**UNCACHED, **theirs} if where == "options" else UNCACHED
    options = {"least_bytes": 0, "inductor": inductor}
    right = gradients(net, net, x)
    compiled = torch.compile(net, backend="normpass", options=options)
    if where == "options":
        found = gradients(net, compiled, x)
    else:
        with inductor_config.patch(theirs):
            if "registered" in where:
                normpass.register()
            found = gradients(net, compiled, x)
            normpass.unregister()
            assert all(getattr(inductor_config, place) is theirs[place] for place in PLACES)
    torch.testing.assert_close(found, right)
    joint, post = PLACES[:2], PLACES[2:]
    each = [(post[0], 0), (post[1], 1)]
    assert seen == [(joint[0], 0), (joint[1], 0), *each, *each]
    assert (count_fused("forward"), count_fused("backward")) == (1, 1)


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"),
    reason="this version of torch tells passes nothing but the graph",
)
def test_passes_that_are_told_of_inference() -> None:
    seen: list[tuple[bool, int]] = []

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):  # type: ignore[misc]
        def __call__(self, graph: Graph, is_inference: bool) -> None:
            seen.append((is_inference, len(regions(graph))))

        def uuid(self) -> str:
            return "aware"

    net, x = Net(), inputs()
    options = {"least_bytes": 0, "inductor": {**UNCACHED, PLACES[2]: [Aware()], PLACES[3]: Aware()}}
    compiled = torch.compile(net, backend="normpass", options=options)
    torch.testing.assert_close(gradients(net, compiled, x), gradients(net, net, x))
    with torch.no_grad():
        compiled(x)
    assert seen == [(False, 0), (False, 1)] * 2 + [(True, 0), (True, 1)]


# ---- what nodes say of themselves

NORM, GELU = "aten.native_layer_norm", "aten.gelu"


def regions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target is region_op]


def test_regions_say_where_they_came_from() -> None:
    """In a pass of the user's, after ours: what it could read off the nodes that were replaced."""
    before: list[list[dict[str, Any]]] = []
    after: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []

    def look(graph: Graph) -> None:
        before.append([dict(node.meta) for node in graph.nodes if node.op == "call_function"])

    def look_again(graph: Graph) -> None:
        (call,) = regions(graph)
        assert all(item.target is operator.getitem for item in call.users)
        items = sorted(call.users, key=lambda item: item.args[1])  # type: ignore[arg-type]
        after.append((dict(call.meta), [dict(item.meta) for item in items]))

    net, x = Net(), inputs()
    inductor = {**UNCACHED, PLACES[2]: look, PLACES[3]: look_again}
    options = {"least_bytes": 0, "inductor": inductor}
    gradients(net, torch.compile(net, backend="normpass", options=options), x)
    for nodes, (call, items), phase in zip(before, after, ("", "fwd_"), strict=True):
        for item, value in zip(items, call["val"], strict=True):
            assert item["val"].shape == value.shape
            assert item["val"].stride() == value.stride()
            assert item["val"].dtype is value.dtype
        for found in (call, *items):
            assert __file__ in found["stack_trace"]
            assert found["partitioner_tag"] == ("is_backward" if phase else "is_forward")
        norms = [node for node in nodes if NORM in str(node["original_aten"])]
        for kind in ("original_aten", "seq_nr", "stack_trace", f"{phase}nn_module_stack"):
            assert str(call[kind]) == str(norms[-1][kind])
        assert call["custom"] == {"stage": 3}
        of_region = [*norms, *(node for node in nodes if GELU in str(node["original_aten"]))]
        assert {id(source) for source in call["from_node"]} == {
            id(source) for node in of_region for source in node.get("from_node", ())
        }
        assert len(call["from_node"]) == 2
