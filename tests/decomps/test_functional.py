"""Modules that write to their buffers, inside transforms of torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from orders import fixed
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.nn.utils.parametrizations import spectral_norm

from normpass import functional_call_with_buffers

X, V = fixed(8, 5), fixed(8, 5).flip(0)


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    return net.double()


def after_a_call(net: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    """Its buffers after it was called as a module."""
    net(*args)
    return dict(net.named_buffers())


def assert_same(found: Any, right: Any) -> None:
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("wrap", [lambda function: function, compiled], ids=["eager", "compiled"])
def test_gradients_and_new_buffers(wrap: Any) -> None:
    net, other = model(), model()

    def loss(parameters: Any, buffers: Any, x: Tensor) -> Any:
        y, buffers = functional_call_with_buffers(net, {**parameters, **buffers}, (x,))
        return y.square().mean(), buffers

    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    found, new = wrap(grad(loss, has_aux=True))(parameters, buffers, X)
    other(X).square().mean().backward()
    assert_same(found, {name: p.grad for name, p in other.named_parameters()})
    assert_same(new, dict(other.named_buffers()))
    assert new["1.num_batches_tracked"] == 1
    assert buffers["1.num_batches_tracked"] == 0


@pytest.mark.parametrize("transform", ["jvp", "jacrev", "hessian"])
def test_they_move_once(transform: str) -> None:
    net = model()

    def call(x: Tensor) -> Any:
        y, buffers = functional_call_with_buffers(net, {}, x)
        return y.square().sum(), buffers

    new: dict[str, Tensor]
    if transform == "jvp":
        _, _, new = jvp(call, (X,), (V,), has_aux=True)
    elif transform == "jacrev":
        _, new = jacrev(call, has_aux=True)(X)
    else:
        _, new = jacfwd(jacrev(call, has_aux=True), has_aux=True)(X)
    assert_same(new, after_a_call(model(), X))


def test_each_example_has_its_own_under_vmap() -> None:
    net, batches = model(), torch.stack([X, V, X + V])
    _, new = vmap(lambda x: functional_call_with_buffers(net, {}, (x,)))(batches)
    assert new["1.running_mean"].shape == (3, 5)
    for i, x in enumerate(batches):
        assert_same({name: b[i] for name, b in new.items()}, after_a_call(model(), x))


def test_an_ensembles_parameters_are_batched() -> None:
    nets = [model(), model()]
    with torch.no_grad():
        nets[1][0].weight.mul_(2)
    stacked = {
        name: torch.stack([p, dict(nets[1].named_parameters())[name]])
        for name, p in nets[0].named_parameters()
    }
    _, new = vmap(lambda p: functional_call_with_buffers(nets[0], p, X))(stacked)
    for i, net in enumerate(nets):
        own = {name: b[i] for name, b in new.items()}
        fresh = model()
        fresh.load_state_dict({**dict(net.named_parameters()), **dict(fresh.named_buffers())})
        assert_same(own, after_a_call(fresh, X))


def test_spectral_norm_iterates_on_a_copy() -> None:
    def layer() -> nn.Module:
        torch.manual_seed(0)
        return spectral_norm(nn.Linear(5, 3)).double()

    net, other = layer(), layer()
    original = net.parametrizations.weight.original

    def total(weight: Tensor) -> Any:
        name = "parametrizations.weight.original"
        y, buffers = functional_call_with_buffers(net, {name: weight}, (X,))
        return y.sin().sum(), buffers

    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    found, new = grad(total, has_aux=True)(original)
    other(X).sin().sum().backward()
    assert_same(found, other.parametrizations.weight.original.grad)
    assert_same(new, dict(other.named_buffers()))
    assert_same(dict(net.named_buffers()), before)


def test_torch_refuses_a_module_that_writes() -> None:
    net = model()
    with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
        grad(lambda x: functional_call(net, {}, (x,)).sum())(X)
