"""grad_graph and jvp_graph: whole models against autograd and forward mode, in double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import normpass
from normpass.decomps.registry import UnknownRule
from normpass.decomps.torch_versions import LSTM_TRACE_HAS_AN_AXIS_MORE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.place = nn.Parameter(torch.randn(1, 5, 16))
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return F.cross_entropy(self.head(self.blocks(x)[:, 0]), label)


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 16), nn.Embedding(6, 16)
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU("tanh"), nn.Linear(64, 16))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = self.ln3(x + self.mlp(self.ln2(x)))
        logits = x @ self.words.weight.mT  # tied
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c, d, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(d),
            nn.ReLU(inplace=True),
            nn.Conv2d(d, d, 3, padding=1, bias=False),
            nn.BatchNorm2d(d),
        )
        self.short = nn.Conv2d(c, d, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.short(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Block(4, 6), Block(6, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 6, 2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (_, c) = self.cell(x)
        return self.head(y), c


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(inplace=True))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.up(self.middle(self.down(F.pad(y, (1, 1, 1, 1), "reflect"))))[..., 1:-1, 1:-1]
        return F.interpolate(self.last(torch.cat([y, z], 1)), scale_factor=2, mode="bilinear")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "ViT": (ViT, lambda: (torch.randn(2, 3, 8, 8), torch.tensor([0, 2]))),
    "GPT-2": (GPT2, lambda: (torch.randint(11, (2, 6)),)),
    "ResNet": (ResNet, lambda: (torch.randn(2, 3, 15, 15),)),
    "LSTM": (LSTM, lambda: (torch.randn(2, 5, 4),)),
    "U-Net": (UNet, lambda: (torch.randn(2, 3, 6, 6),)),
}


def made(name: str) -> tuple[nn.Module, list[Tensor], list[Tensor], list[Tensor]]:
    """A model, its parameters, its buffers and its inputs."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    net = make().double()
    xs = [x.double() if x.is_floating_point() else x for x in inputs()]
    return net, [*net.parameters()], [*net.buffers()], xs


def called(net: nn.Module) -> Callable[..., Any]:
    """The model as a function of its parameters, its buffers and its inputs."""
    held = [n for n, _ in [*net.named_parameters(), *net.named_buffers()]]

    def call(*args: Tensor) -> Any:
        state = {n: t.clone() for n, t in zip(held, args, strict=False)}
        return functional_call(net, state, args[len(held) :])

    return call


Traced = tuple[fx.GraphModule, list["Tensor"], list[int], "Callable[..., Any]"]


def traced(name: str, mode: str) -> Traced:
    """Its graph and arguments, which of these are no buffers but numbers, and the function."""
    net, parameters, buffers, xs = made(name)
    args = [t.detach() for t in (*parameters, *buffers)] + xs
    chosen = [
        k
        for k, t in enumerate(args)
        if t.is_floating_point() and not 0 <= k - len(parameters) < len(buffers)
    ]
    return make_fx(called(net), tracing_mode=mode)(*args), args, chosen, called(net)


def skip_if_torch_is_wrong(name: str, mode: str) -> None:
    if name == "LSTM" and mode == "symbolic" and LSTM_TRACE_HAS_AN_AXIS_MORE:
        pytest.skip("torch 2.11 traces an LSTM to a graph whose states have an axis too many")


def names(gm: fx.GraphModule, chosen: list[int]) -> list[str]:
    inputs = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    return [inputs[k] for k in chosen]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_model(name: str, mode: str) -> None:
    skip_if_torch_is_wrong(name, mode)
    gm, args, chosen, call = traced(name, mode)
    leaves = [t.clone().requires_grad_(k in chosen) for k, t in enumerate(args)]
    wanted = [t for t in leaves if t.requires_grad]
    outs = [y for y in tree_leaves(call(*leaves)) if y.requires_grad]
    cotangents = [torch.randn_like(y) for y in outs]
    if outs[0].dim() == 0:
        cotangents = [torch.ones_like(outs[0])]
    right = torch.autograd.grad(outs, wanted, cotangents, allow_unused=True)
    graph = normpass.grad_graph(gm, names(gm, chosen))
    found_outs, found = graph(*args, *(cotangents if outs[0].dim() else []))
    assert_close([y for y in found_outs if y.is_floating_point()], [y.detach() for y in outs])
    for f, r, x in zip(found, right, wanted, strict=True):
        assert_close(f, torch.zeros_like(x) if r is None else r, rtol=1e-9, atol=1e-11)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_tangents_of_a_model(name: str) -> None:
    skip_if_torch_is_wrong(name, "symbolic")
    gm, args, chosen, call = traced(name, "symbolic")
    tangents = [torch.randn_like(args[k]) for k in chosen]
    h = 1e-6

    def along(sign: float) -> list[Tensor]:
        moved = dict(zip(chosen, tangents, strict=True))
        return tree_leaves(
            call(*(t + sign * h * moved[k] if k in moved else t for k, t in enumerate(args)))
        )

    outs, found = normpass.jvp_graph(gm, names(gm, chosen))(*args, *tangents)
    assert_close(outs, tree_leaves(call(*args)))
    for f, a, b in zip(found, along(1), along(-1), strict=True):
        assert_close(f, (a - b) / (2 * h), rtol=1e-6, atol=1e-7)


def test_it_runs_at_other_sizes() -> None:
    gm, args, _, call = traced("U-Net", "symbolic")
    args[-1] = torch.randn(3, 3, 10, 8, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in args]
    y = call(*leaves)
    g = torch.randn_like(y)
    _, found = normpass.grad_graph(gm)(*args, g)
    assert_close(found, list(torch.autograd.grad(y, leaves, g)), rtol=1e-9, atol=1e-11)


def test_the_gradient_of_a_gradient() -> None:
    """What comes out is a graph of operators: it can be differentiated again."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (F.layer_norm(x, (4,), w).tanh() ** 2).sum()

    x, w = torch.randn(3, 4).double(), torch.rand(4).double() + 0.5
    first = normpass.grad_graph(make_fx(f, tracing_mode="symbolic")(x, w), ["x_1"])
    second = normpass.grad_graph(first, ["x_1", "w_1"])
    gy, gx = torch.randn(()).double(), torch.randn(3, 4).double()
    (y, dx), found = second(x, w, gy, gx)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    value = f(a, b)
    (grad,) = torch.autograd.grad(value, a, create_graph=True)
    right = torch.autograd.grad((value, grad), (a, b), (gy, gx))
    assert_close([y, dx], [value.detach(), grad.detach()])
    assert_close(found, list(right), rtol=1e-9, atol=1e-11)


def test_parameters_by_their_names() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    x = torch.randn(2, 3).double()
    gm = torch.export.export(net, (x,), strict=True).module()
    assert isinstance(gm, fx.GraphModule)
    graph = normpass.grad_graph(gm, ["1.weight", "0.bias"])
    g = torch.randn(2, 4).double()
    (y,), found = graph(x, g)
    right = torch.autograd.grad(net(x), (net[1].weight, net[0].bias), g)
    assert_close(y, net(x).detach())
    assert_close(found, list(right))
    assert dict(graph.named_parameters()).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    with torch.no_grad():
        net[0].weight += 1
    assert_close(graph(x, g)[0][0], net(x).detach())


def test_only_operators_and_only_what_is_needed() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin()

    x, w = torch.randn(2, 3), torch.randn(3, 4)
    graph = normpass.grad_graph(make_fx(f)(x, w), wrt=["w_1"])
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert targets.count("aten.mm.default") == 2  # forward, and the gradient of w
    assert all(target.startswith("aten.") for target in targets)


X = torch.linspace(-1.5, 1.4, 24, dtype=torch.float64).reshape(4, 6).sin() * 2
V = torch.cos(X * 3)


def _written(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = y[1] * 3
    y[1:, :2].copy_(x[0, :2])
    return y.add_(x)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "views that are written to": _written,
    "an embedding bag": lambda x: F.embedding_bag(torch.tensor([[0, 1], [3, 3]]), x, mode="mean"),
    "an argument as it is, twice": lambda x: (x, x * 2, x),
    "no gradient needed": lambda x: (x.detach() * 3, x.cos(), None),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_functions_of_other_kinds(name: str) -> None:
    function = OTHERS[name]
    x = X.clone().requires_grad_()
    torch.manual_seed(1)
    ys = [y for y in tree_leaves(function(x)) if isinstance(y, torch.Tensor)]
    grads = [torch.full_like(y, k + 1).cos() + y.detach().sin() for k, y in enumerate(ys)]
    pairs = [(y, g) for y, g in zip(ys, grads, strict=True) if y.requires_grad]
    (right,) = torch.autograd.grad([y for y, _ in pairs], x, [g for _, g in pairs])
    gm = make_fx(function, {}, tracing_mode="symbolic")(X)  # detach as it is
    graph = normpass.grad_graph(gm)
    torch.manual_seed(1)
    outs, (found,) = graph(X, *grads)
    assert_close([y for y in outs if y is not None], [y.detach() for y in ys])
    assert_close(found, right)
    if name == "an embedding bag":
        with pytest.raises(NotImplementedError, match=r"_embedding_bag\.default has no forward"):
            normpass.jvp_graph(gm)
        return
    torch.manual_seed(1)
    _, tangents = normpass.jvp_graph(gm)(X, V)
    pairing = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    assert_close(pairing, (right * V).sum())


def test_a_result_that_does_not_depend_on_it() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach() * 2, y.argmax()

    x, y = torch.randn(3), torch.randn(3)
    gm = make_fx(f, {})(x, y)
    _, found = normpass.grad_graph(gm)(x, y, torch.ones(3))
    assert_close(found, [torch.zeros(3), torch.zeros(3)])
    _, found = normpass.jvp_graph(gm)(x, y, x, y)
    assert_close(found, [torch.zeros(3)])


def test_messages() -> None:
    gm = make_fx(lambda x, k: x[k])(torch.randn(3), torch.tensor([1]))
    with pytest.raises(ValueError, match="expected wrt among x_1, k_1; found y"):
        normpass.grad_graph(gm, ["y"])
    with pytest.raises(ValueError, match="floating or complex dtype; found k_1"):
        normpass.jvp_graph(gm, ["k_1"])
    with pytest.raises(ValueError, match="placeholder x to have its tensor in meta"):
        normpass.grad_graph(fx.symbolic_trace(lambda x: x + 1))


def test_an_operator_without_a_derivative() -> None:
    library = torch.library.Library("normpass_graphs", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    x = torch.randn(3)
    gm = make_fx(torch.ops.normpass_graphs.twice)(x)
    with pytest.raises(UnknownRule, match=r"no row for normpass_graphs\.twice"):
        normpass.grad_graph(gm)
    gm = make_fx(torch.igamma)(x.abs(), x.abs())
    with pytest.raises(NotImplementedError, match="igamma: input"):
        normpass.grad_graph(gm)
