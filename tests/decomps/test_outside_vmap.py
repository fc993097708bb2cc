"""Derivatives of what torch.func.vmap has over a norm's gradient: by the tape, by levels around it,
and of its graph.

Below vmap a norm's backward is a batching rule: primitives, to which the saved mean and deviation
are numbers. Their derivatives are x's all the same. PyTorch 2.13 forgets them: a gradient of layer
or batch norm's weight that vmap has taken is wrong when it is differentiated again, without a word
(`test_pytorch_is_wrong`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import normpass
from normpass.decomps.activation import registered
from normpass.decomps.norms import batch, layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
    Function = Callable[[Tensor, Tensor, Tensor], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

aten = torch.ops.aten
V, N, C, S, EPS = 3, 4, 6, 2, 0.25


def fixed(*shape: int) -> Tensor:
    n = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(n * n + 0.5 * n).reshape(shape)


X, W, B = fixed(V, N, C, S), fixed(V, C) + 1.5, fixed(V, C)


def _standardized(x: Tensor, dims: list[int]) -> Tensor:
    x = x - x.mean(dims, keepdim=True)
    return x * (x.square().mean(dims, keepdim=True) + EPS).rsqrt()


def _affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * w[:, None] + b[:, None]


# A norm of x: n c s with weight and bias per c, and the same in primitives.
NORMS: dict[str, tuple[Norm, Norm]] = {
    "layer": (
        lambda x, w, b: F.layer_norm(x.mT, (C,), w, b, EPS).mT,
        lambda x, w, b: _affine(_standardized(x, [1]), w, b),
    ),
    "batch": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, EPS),
        lambda x, w, b: _affine(_standardized(x, [0, 2]), w, b),
    ),
    "batch, eval": (
        lambda x, w, b: F.batch_norm(x, fixed(C), fixed(C) ** 2, w, b, False, 0.1, EPS),
        lambda x, w, b: _affine(
            (x - fixed(C)[:, None]) * (fixed(C)[:, None] ** 2 + EPS).rsqrt(), w, b
        ),
    ),
    "group": (
        lambda x, w, b: F.group_norm(x, 2, w, b, EPS),
        lambda x, w, b: _affine(
            _standardized(x.reshape(N, 2, C // 2 * S), [2]).reshape(x.shape), w, b
        ),
    ),
    "rms": (
        lambda x, w, b: F.rms_norm(x.mT, (C,), w, EPS).mT + b[:, None],
        lambda x, w, b: _affine(x * (x.square().mean(1, keepdim=True) + EPS).rsqrt(), w, b),
    ),
}


def _loss(norm: Norm) -> Function:
    return lambda x, w, b: norm(x, w, b).sin().cumsum(-1).square().sum()


def _per_example(wrt: int, *, shared: bool) -> Callable[[Norm], Function]:
    def make(norm: Norm) -> Function:
        if shared:
            inner = vmap(grad(_loss(norm), wrt), (0, None, None))
            return lambda x, w, b: inner(x, w[0], b[0]).sin().sum()
        return lambda x, w, b: vmap(grad(_loss(norm), wrt))(x, w, b).sin().sum()

    return make


def _jacobian(norm: Norm) -> Function:
    def rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return jacrev(lambda u: norm(u, w, b).sin().sum((0, 2)))(x)

    return lambda x, w, b: rows(x[0], w[0], b[0]).sin().sum()


def _tangents(norm: Norm) -> Function:
    def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return jvp(lambda u: norm(u, w, b).sin(), (x,), (x.cos(),))[1]

    return lambda x, w, b: vmap(one)(x, w, b).sin().sum()


# Functions x, w, b -> a number, with vmap and a derivative in them.
INNER: dict[str, Callable[[Norm], Function]] = {
    "vmap(grad x)": _per_example(0, shared=False),
    "vmap(grad x), shared weights": _per_example(0, shared=True),
    "vmap(grad weight)": _per_example(1, shared=False),
    "vmap(grad weight), shared weights": _per_example(1, shared=True),
    "vmap(grad bias)": _per_example(2, shared=False),
    "jacrev": _jacobian,
    "vmap(jvp)": _tangents,
}

Gradients = tuple["Tensor | None", ...]


def _by_tape(function: Function, order: int = 1) -> Gradients:
    leaves = [value.clone().requires_grad_() for value in (X, W, B)]
    value: Any = function(*leaves)
    for n in range(order):
        found = torch.autograd.grad(
            value, leaves, create_graph=n + 1 < order, allow_unused=True, materialize_grads=True
        )
        value = sum((g.cos() * (1 + i)).sum() for i, g in enumerate(found))
    return found


def _by_func_grad(function: Function) -> Gradients:
    return grad(function, (0, 1, 2))(X, W, B)


def _by_func_jvp(function: Function) -> Gradients:
    return (jvp(function, (X, W, B), (X.cos(), W.cos(), B.cos()))[1],)


def _by_tape_batched(function: Function) -> Gradients:
    """The second order by is_grads_batched, which is vmap of the backward."""
    leaves = [value.clone().requires_grad_() for value in (X, W, B)]
    first = torch.autograd.grad(
        function(*leaves), leaves, create_graph=True, allow_unused=True, materialize_grads=True
    )
    several = [torch.stack([g.detach().cos(), g.detach().sin()]) for g in first]
    used = [g for g in first if g.requires_grad]
    with_graph = [v for v, g in zip(several, first, strict=True) if g.requires_grad]
    return torch.autograd.grad(
        used, leaves, with_graph, is_grads_batched=True, allow_unused=True, materialize_grads=True
    )


OUTER: dict[str, Callable[[Function], Gradients]] = {
    "tape": _by_tape,
    "tape, twice": lambda f: _by_tape(f, 2),
    "tape, batched": _by_tape_batched,
    "func.grad": _by_func_grad,
    "func.jvp": _by_func_jvp,
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("norm", NORMS)
def test_eager_rules(norm: str, inner: str, outer: str) -> None:
    if (norm, inner, outer) == ("group", "jacrev", "tape, batched"):
        pytest.skip("PyTorch cannot take is_grads_batched through group norm's second derivative")
    function, expected = (INNER[inner](n) for n in NORMS[norm])
    with registered(eager=True):
        found = OUTER[outer](function)
    torch.testing.assert_close(found, OUTER[outer](expected), rtol=1e-9, atol=1e-9)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("norm", NORMS)
def test_compiled(norm: str, inner: str) -> None:
    function, expected = (INNER[inner](n) for n in NORMS[norm])
    torch._dynamo.reset()
    with registered():
        found = _by_tape(torch.compile(function, backend="aot_eager"))
    torch.testing.assert_close(found, _by_tape(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("inner", [name for name in INNER if "jvp" not in name])
@pytest.mark.parametrize("norm", NORMS)
def test_graphs(norm: str, inner: str) -> None:
    """The gradient of a graph that make_fx has made."""
    function, expected = (INNER[inner](n) for n in NORMS[norm])
    with registered(), enable_python_dispatcher():
        graph = make_fx(function, decomposition_table={})(X, W, B)
    _, found = normpass.grad_graph(graph)(X, W, B)
    torch.testing.assert_close(tuple(found), _by_tape(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inner", ["vmap(grad weight)", "vmap(grad weight), shared weights"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_pytorch_is_wrong(norm: str, inner: str) -> None:
    """Why the rules are there. Once this fails, PyTorch has mended it: the notes are to change."""
    function, expected = (INNER[inner](n) for n in NORMS[norm])
    (found, *_), (right, *_) = _by_tape(function), _by_tape(expected)
    assert found is not None
    assert right is not None
    assert (found - right).abs().max() > 0.01


def _layer_backward(x: Tensor, g: Tensor) -> Tensor:
    _, mean, rstd = aten.native_layer_norm(x, [S], None, None, EPS)
    return aten.native_layer_norm_backward(g, x, [S], mean, rstd, None, None, [True, False, False])[
        0
    ]


def _batch_backward(x: Tensor, g: Tensor) -> Tensor:
    _, mean, rstd = aten.native_batch_norm(x, None, None, None, None, True, 0.1, EPS)
    return aten.native_batch_norm_backward(
        g, x, None, None, None, mean, rstd, True, EPS, [True, False, False]
    )[0]


BACKWARDS = {"layer": (_layer_backward, [2]), "batch": (_batch_backward, [0, 2])}


@pytest.mark.parametrize("norm", BACKWARDS)
@pytest.mark.parametrize("how", ["func.jvp", "jvp of jvp", "func.grad", "dual numbers"])
def test_a_backward_that_is_called_by_name(norm: str, how: str) -> None:
    """Its derivatives go through the statistics, by each mode around vmap."""
    backward, axes = BACKWARDS[norm]

    def primitives(x: Tensor, g: Tensor) -> Tensor:
        return grad(lambda x: (_standardized(x, axes) * g).sum())(x)

    def outside(function: Callable[[Tensor, Tensor], Tensor]) -> Any:
        def total(x: Tensor) -> Tensor:
            return vmap(function)(x, X.cos()).sin()

        if how == "func.jvp":
            return jvp(total, (X,), (X.sin(),))
        if how == "jvp of jvp":
            return jvp(lambda x: jvp(total, (x,), (X.sin(),))[1], (X,), (X.cos(),))
        if how == "func.grad":
            return grad(lambda x: total(x).sum())(X)
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(total(forward_ad.make_dual(X, X.sin()))))

    with registered(eager=True):
        found = outside(backward)
    torch.testing.assert_close(found, outside(primitives), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_only_who_asks_pays(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without a tape the graph is that of statistics which are numbers."""

    def operators(*, taped: bool) -> Counter[str]:
        seen: Counter[str] = Counter()

        def look(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.update(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
            return graph

        torch._dynamo.reset()
        leaves = [value.clone().requires_grad_(taped) for value in (X, W, B)]
        torch.compile(function, backend=aot_autograd(fw_compiler=look, bw_compiler=look))(*leaves)
        return seen

    function = INNER["vmap(grad weight)"](NORMS[norm][0])
    with registered():
        found, taped = operators(taped=False), operators(taped=True)
        for module in (layer, batch):
            monkeypatch.setattr(module, "attached", lambda x, mean, rstd, *_: (mean, rstd))
        assert found == operators(taped=False)
        assert taped != operators(taped=True)
