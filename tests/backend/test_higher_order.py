"""Compiled code that is differentiated again, against the same code in eager mode.

Stock torch.compile raises an error for all of it that asks for more than one derivative, for a
batched backward, and, where Inductor has donated buffers, for retain_graph=True. Where eager mode
itself is wrong (layer norm from the third order on), the oracle is written from primitives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from higher_order_cases import IGNORED, W, X, assert_same, compiled, derivatives, model, numbers
from higher_order_programs import PROGRAMS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import normpass
from normpass.backend.explain import record

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]


pytestmark = IGNORED


EYE = torch.eye(12, dtype=torch.float64).view(12, 3, 4)


# --- what a graph may do ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_derivatives(name: str) -> None:
    function = PROGRAMS[name]
    assert_same(derivatives(compiled(function), X, W), derivatives(function, X, W))


@pytest.mark.parametrize("name", ["composition", "graph breaks and a shared weight"])
def test_third_derivatives(name: str) -> None:
    function = PROGRAMS[name]
    assert_same(
        derivatives(compiled(function), X, W, order=3), derivatives(function, X, W, order=3)
    )


def test_layer_norm_is_right_to_the_third_order() -> None:
    """The rules hold in what is compiled for higher orders; eager mode is wrong there."""

    def primitives(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh()
        centred = h - h.mean(-1, keepdim=True)
        return (centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt()).sin()

    ours = compiled(lambda x, w: F.layer_norm((x @ w).tanh(), (4,)).sin())
    right = derivatives(primitives, X, W, order=3)
    scale = max(g.abs().max().item() for g in right if g is not None)
    for found, want in zip(derivatives(ours, X, W, order=3), right, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9 * scale)
    assert not normpass.decomps.activation.is_registered()


def test_batch_norm_updates_its_statistics_once() -> None:
    def run(make: Callable[[Function], Function]) -> tuple[list[Tensor | None], nn.BatchNorm1d]:
        norm = nn.BatchNorm1d(4).double()
        found = derivatives(make(lambda x, w: norm(x @ w).tanh()), X, W)
        return found, norm

    (ours, norm), (right, reference) = run(compiled), run(lambda f: f)
    assert_same(ours, right)
    assert_same(list(norm.buffers()), list(reference.buffers()))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_complex_numbers(inner: str) -> None:
    """The cotangent is conjugated lazily: its memory holds other numbers."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) * (x @ w).conj() * torch.exp(x @ w)

    x, w = (torch.complex(t, t.cos()).detach().requires_grad_() for t in (X, W))
    cotangent = torch.complex(X, X.sin()).detach().conj()

    def both(f: Function) -> list[Tensor]:
        gradients = torch.autograd.grad(f(x, w), (x, w), cotangent, create_graph=True)
        return [*gradients, *torch.autograd.grad(sum(g.abs().sum() for g in gradients), (x, w))]

    assert_same(both(compiled(function, inner=inner)), both(function))


def test_a_buffer_that_is_put_on_the_tape() -> None:
    def function(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
        buffer.copy_((x @ w).tanh())
        return (x @ w).sin()

    def both(f: Function) -> list[Tensor]:
        buffer = torch.zeros(3, 4, dtype=torch.float64)
        y = f(X, W, buffer)
        total = y.sum() + buffer.sin().sum()
        gradients = torch.autograd.grad(total, (X, W), create_graph=True)
        return [*gradients, *torch.autograd.grad(sum(g.sin().sum() for g in gradients), (X, W))]

    assert_same(both(compiled(function)), both(function))


def test_an_input_that_is_written_to() -> None:
    def function(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
        h = x @ w + buffer.clone()
        buffer.mul_(2)
        return h.tanh() * buffer.sin()

    ours, right = numbers(3, 4).detach(), numbers(3, 4).detach()
    assert_same(derivatives(compiled(function), X, W, ours), derivatives(function, X, W, right))
    assert torch.equal(ours, right)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda h: F.layer_norm(h, (4,)),
    "group_norm": lambda h: F.group_norm(h, 2),
}


@pytest.mark.parametrize("norm", NORMS)
def test_other_sizes_compile_nothing_more(norm: str) -> None:
    if norm == "group_norm" and TorchVersion(torch.__version__) >= "2.15":
        pytest.skip("torch 2.15's double backward of group norm takes sizes for constants")

    def function(x: Tensor, w: Tensor) -> Tensor:
        return NORMS[norm]((x @ w).tanh())

    ours = torch.compile(function, backend="normpass", options={"inner": "eager"}, dynamic=True)
    with record.watch() as graphs:
        derivatives(ours, numbers(3, 4), W)
        first = len(graphs)
        for rows in (5, 9, 2):
            x = numbers(rows, 4)
            assert_same(derivatives(ours, x, W), derivatives(function, x, W))
        assert len(graphs) == first


def test_weight_norm_is_right_where_eager_is_not() -> None:
    """PyTorch's second derivative of a normalized weight takes the norms for constants."""
    lengths = numbers(4, 1).detach() + 2

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return (x @ torch._weight_norm(w, lengths, 0)).tanh()

    def in_primitives(x: Tensor, w: Tensor) -> Tensor:
        return (x @ (lengths * w / w.square().sum(1, keepdim=True).sqrt())).tanh()

    right = derivatives(in_primitives, X, W, order=3)
    assert_same(derivatives(compiled(layer), X, W, order=3), right)
    with pytest.raises(AssertionError):
        assert_same(derivatives(layer, X, W, order=3), right)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dropout_has_the_same_masks(inner: str) -> None:
    """Both masks are told by zeros, of the result and of its first gradient; with them as factors
    the same function has no randomness.
    """
    ours = compiled(lambda x, w: F.dropout(F.dropout(x, 0.5) @ w, 0.3).sin(), inner=inner)
    for _ in range(2):
        y = ours(X, W)
        first = torch.autograd.grad(y.sum(), (X, W), retain_graph=True)
        state = torch.get_rng_state()
        outer = (y != 0).double() / 0.7
        through = (outer.sum(1, keepdim=True) > 0).expand_as(X)
        inside = torch.where(through, first[0] != 0, True).double() / 0.5

        masked = (((X * inside) @ W) * outer).sin()

        def both(result: Tensor) -> list[Tensor]:
            gradients = torch.autograd.grad(result.sum(), (X, W), create_graph=True)
            total = gradients[0].sin().sum() + gradients[1].cos().sum()
            return [*gradients, *torch.autograd.grad(total, (X, W))]

        found = both(y)
        assert_same(found[:2], first)
        assert_same(found, both(masked))
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dropout_has_the_same_mask_behind_one_that_no_gradient_needs(inner: str) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x.detach(), 0.5), F.dropout(x @ w, 0.5)

    ours = compiled(function, inner=inner)
    for _ in range(2):
        _, y = ours(X, W)
        mask = (y != 0).double() / 0.5
        assert_same([*second(y)], [*second((X @ W) * mask)])


def second(y: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(y.sin().sum(), (X, W), create_graph=True)
    return [*gradients, *torch.autograd.grad(sum(g.sin().sum() for g in gradients), (X, W))]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_batched_backwards_have_the_same_mask(inner: str) -> None:
    ours = compiled(lambda x, w: F.dropout(x, 0.5) @ w, inner=inner)
    y = ours(X, W)
    (of_all,) = torch.autograd.grad(y.sum(), X, retain_graph=True)
    (rows,) = torch.autograd.grad(y, X, EYE, is_grads_batched=True, retain_graph=True)
    again = torch.func.vmap(lambda v: torch.autograd.grad(y, X, v, retain_graph=True)[0])(EYE)
    assert (of_all == 0).any()
    assert_same([rows.sum(0), again.sum(0)], [of_all, of_all])


def test_autocast_is_that_of_the_forward() -> None:
    """No further from float64 than eager mode under autocast, which rounds to bfloat16 too."""
    x, w = X.detach().float().requires_grad_(), W.detach().float().requires_grad_()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh() @ w

    def errors(f: Function) -> list[float]:
        def under_autocast(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = f(*args)
            assert y.dtype == torch.bfloat16
            return y.double()

        exact = derivatives(function, x.detach().double().requires_grad_(), w64)
        found = derivatives(under_autocast, x, w)
        return [(a - b).norm().item() for a, b in zip(found, exact, strict=True)]  # type: ignore

    w64 = w.detach().double().requires_grad_()
    ours, eager = errors(compiled(function)), errors(function)
    assert all(e > 1e-4 for e in eager)  # bfloat16's
    for found, allowed in zip(ours, eager, strict=True):
        assert found <= 1.5 * allowed  # another order of the same roundings


# --- how it is asked for ------------------------------------------------------------------------


def retained(f: Function) -> Any:
    y = f(X, W).sum()
    first = torch.autograd.grad(y, (X, W), retain_graph=True)
    return *first, *torch.autograd.grad(y, (X, W))


def batched(f: Function) -> Any:
    return torch.autograd.grad(f(X, W), (X, W), EYE, is_grads_batched=True)


def vmapped(f: Function) -> Any:
    y = f(X, W)
    return torch.func.vmap(lambda v: torch.autograd.grad(y, (X, W), v, retain_graph=True))(EYE)


def batched_and_again(f: Function) -> Any:
    (rows,) = torch.autograd.grad(f(X, W), (X,), EYE, is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(rows.sin().sum(), (X, W))


def accumulated(f: Function) -> Any:
    x, w = (t.detach().clone().requires_grad_() for t in (X, W))
    (g,) = torch.autograd.grad(f(x, w).sum(), x, create_graph=True)
    g.square().sum().backward()
    return x.grad, w.grad


def saved_elsewhere(f: Function) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return derivatives(f, X, W)


def checkpointed_around(f: Function) -> Any:
    return derivatives(
        lambda x, w: checkpoint(lambda x, w: f(f(x, w), w), x, w, use_reentrant=False), X, W
    )


def vmapped_twice(f: Function) -> Any:
    y = f(X, W)

    def row(v: Tensor, u: Tensor) -> Any:
        return torch.autograd.grad(y, (X, W), v * u, retain_graph=True)

    by_both = torch.func.vmap(torch.func.vmap(row, in_dims=(0, None)), in_dims=(None, 0))
    return by_both(EYE, numbers(2, 3, 4).detach())


def of_a_result(f: Function) -> Any:
    """Of a tensor that is no leaf."""
    h = X * 1.5
    (g,) = torch.autograd.grad(f(h, W).sum(), h, create_graph=True)
    return g, *torch.autograd.grad(g.sin().sum(), (X, W))


def of_an_edge(f: Function) -> Any:
    edge = torch.autograd.graph.get_gradient_edge(X)
    (g,) = torch.autograd.grad(f(X, W).sum(), [edge], create_graph=True)
    return g, *torch.autograd.grad(g.sin().sum(), (X, W))


def hooked(f: Function) -> Any:
    h = X * 1.0
    h.register_hook(lambda g: g * 2)
    (g,) = torch.autograd.grad(f(h, W).sum(), X, create_graph=True)
    return g, *torch.autograd.grad(g.sin().sum(), (X, W))


def not_retained(f: Function) -> Any:
    return torch.autograd.grad(f(X, W).sum(), (X, W), create_graph=True, retain_graph=False)


functional = torch.autograd.functional
ASKED: dict[str, Callable[[Function], Any]] = {
    "retain_graph": retained,
    "is_grads_batched": batched,
    "vmap over a backward": vmapped,
    "two vmaps over a backward": vmapped_twice,
    "a batched backward, and again": batched_and_again,
    "of a result": of_a_result,
    "of a gradient edge": of_an_edge,
    "hooks on tensors": hooked,
    "create_graph without retain_graph": not_retained,
    "a penalty's backward": accumulated,
    "saved-tensor hooks": saved_elsewhere,
    "a checkpoint around it": checkpointed_around,
    "hessian": lambda f: [functional.hessian(lambda x: f(x, W).sum(), X)],
    "vectorized jacobian": lambda f: [functional.jacobian(lambda x: f(x, W), X, vectorize=True)],
    "hvp": lambda f: functional.hvp(lambda x: f(x, W).sum(), X, X.cos())[1:],
    "vhp": lambda f: functional.vhp(lambda x: f(x, W).sum(), X, X.cos())[1:],
    "jvp": lambda f: functional.jvp(lambda x: f(x, W), X, X.cos())[1:],
    "torch.func.hessian": lambda f: [torch.func.hessian(lambda x: f(x, W).sum())(X)],
    "torch.func.jvp": lambda f: torch.func.jvp(lambda x: f(x, W), (X,), (X.cos(),)),
}
NEEDS_PACKING = {"a checkpoint around it"}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("how", ASKED)
def test_however_it_is_asked_for(how: str, inner: str) -> None:
    ours = compiled(model, inner=inner)
    if how in NEEDS_PACKING and not hasattr(torch._C._autograd, "_make_saved_tensor"):
        with pytest.raises(RuntimeError, match=r"expected torch 2.12 or newer, found"):
            ASKED[how](ours)
        return
    assert_same(ASKED[how](ours), ASKED[how](model))


def test_only_what_is_asked_for_is_computed() -> None:
    """A penalty on the gradient of the input alone needs no gradient of the weight first."""
    ours = compiled(lambda x, w: (x @ w).tanh())
    with record.watch() as graphs:
        (g,) = torch.autograd.grad(ours(X, W).sum(), X, create_graph=True)
    texts = [[line.text for line in graph.before] for graph in graphs]
    forwards = [text for text in texts if any("= tanh(" in line for line in text)]
    products = [sum("= mm(" in line for line in text) for text in forwards]
    assert g.shape == X.shape
    assert products == [1, 2]  # the model's; the model's again and the gradient of x


def test_it_can_be_turned_off() -> None:
    """Then it is as in stock: an error, or a gradient that is said not to depend on the input."""
    ours = compiled(model, double_backward=False)
    (g,) = torch.autograd.grad(ours(X, W).sum(), X, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"not currently support double|been used in|not require grad"
    ):
        torch.autograd.grad(g.sin().sum(), X)
