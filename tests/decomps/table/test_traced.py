"""Operators that have the table's derivatives in a trace, against finite differences.

PyTorch's own are no oracle here. Of a product by scatter_reduce it has a wrong tangent, of a
maximum in which self takes no part half a gradient, of householder_product a wrong grad of jvp, and
of logcumsumexp and of a determinant no third derivative: all silently, in torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import normpass
from normpass.decomps.registry import find_op
from normpass.decomps.table.nodes import differentiated
from normpass.decomps.table.traced import BETTER, BETTER_IN_TRANSFORMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Function = Callable[[Tensor], Tensor]

# PyTorch says so at the first call in a process.
pytestmark = pytest.mark.filterwarnings(r"ignore:index_reduce\(\) is in beta")


def fixed(*shape: int) -> Tensor:
    n = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(n * n + 0.5 * n).reshape(shape) + 0.2


X, V = fixed(4, 5), fixed(4, 5).flip(0)
X[1, 2] = X[2, 0] = X[2, 3] = 0  # zeros, of which one group has two
INDEX = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 2, 3], [2, 2, 2, 2, 0], [3, 3, 3, 0, 1]])
SLICES = torch.tensor([0, 0, 2, 1])
A = fixed(5, 4) * 0.3


def scattered(reduce: str, include_self: bool) -> Function:
    base = fixed(4, 5).flip(1)
    return lambda x: base.scatter_reduce(0, INDEX, x, reduce, include_self=include_self)


def convolution_backward(x: Tensor) -> Tensor:
    """Its input, its weight and its gradient depend on x."""
    weight = fixed(4, 4, 3) * x.sum()
    numbers = [1], [1], [1], False, [0], 1
    dx, dw, db = torch.ops.aten.convolution_backward(
        (x + V)[None], x[None], weight, [4], *numbers, [True, True, True]
    )
    return dx[0] + dw.sum(2).sum(1, keepdim=True) + db[:, None]


FUNCTIONS: dict[str, tuple[str, Function]] = {
    "convolution_backward": ("convolution_backward.default", convolution_backward),
    "cumprod": ("cumprod.default", lambda x: x.cumprod(1)),
    "logcumsumexp": ("logcumsumexp.default", lambda x: (x * 3).logcumsumexp(0)),
    "det": (
        "_linalg_det.default",
        lambda x: torch.linalg.det(x @ x.mT + torch.eye(4, dtype=x.dtype)) * 0.01,
    ),
    "prod of scatter_reduce": ("scatter_reduce.two", scattered("prod", True)),
    "the same without self": ("scatter_reduce.two", scattered("prod", False)),
    "mean of scatter_reduce": ("scatter_reduce.two", scattered("mean", True)),
    "amax of scatter_reduce": ("scatter_reduce.two", lambda x: scattered("amax", True)(x + V)),
    "index_reduce": (
        "index_reduce.default",
        lambda x: fixed(4, 5).index_reduce(0, SLICES, x, "prod"),
    ),
    "householder_product": (
        "linalg_householder_product.default",
        lambda x: torch.linalg.householder_product(A[:, :3] * x[1, 1], x[0, :3]),
    ),
    "ormqr": ("ormqr.default", lambda x: torch.ormqr(A * x[1, 1], x[0, :4], x.mT)),
}


def test_each_has_a_case() -> None:
    assert {f"aten.{name}" for name, _ in FUNCTIONS.values()} == {*BETTER, *BETTER_IN_TRANSFORMS}


def traced(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """As AOTAutograd traces: with the Python dispatcher."""
    with normpass.registered(), enable_python_dispatcher():
        return make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*args)


def along(function: Callable[[Tensor], Any], x: Tensor, h: float = 1e-5) -> Any:
    return (function(x + h * V) - function(x - h * V)) / (2 * h)


def scalar(function: Function) -> Function:
    return lambda x: function(x).sin().sum()


def of_tape(function: Function) -> Function:
    def gradient(x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(scalar(function)(y), y)[0]

    return gradient


cases = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.one_in(2)
@cases
def test_reverse_mode(name: str) -> None:
    function = FUNCTIONS[name][1]
    gradient = traced(grad(scalar(function)), X)(X)
    assert_close((gradient * V).sum(), along(scalar(function), X), rtol=1e-7, atol=1e-8)
    assert_close(traced(of_tape(function), X)(X), gradient)


@pytest.mark.one_in(6)
@cases
def test_second_order_in_reverse_mode(name: str) -> None:
    function = FUNCTIONS[name][1]
    first = traced(grad(scalar(function)), X)
    second = traced(grad(lambda x: (grad(scalar(function))(x) * V).sum()), X)
    assert_close(second(X), along(first, X), rtol=1e-6, atol=1e-7)  # the Hessian is symmetric


@cases
def test_forward_mode(name: str) -> None:
    function = FUNCTIONS[name][1]
    tangent = traced(lambda x: jvp(function, (x,), (V,))[1], X)(X)
    assert_close(tangent, along(function, X), rtol=1e-7, atol=1e-8)


@pytest.mark.one_in(6)
@cases
@pytest.mark.parametrize("order", ["jvp of grad", "grad of jvp"])
def test_both_modes(name: str, order: str) -> None:
    function = scalar(FUNCTIONS[name][1])

    def mixed(x: Tensor) -> Tensor:
        if order == "jvp of grad":
            return jvp(grad(function), (x,), (V,))[1]
        return grad(lambda x: jvp(function, (x,), (V,))[1])(x)

    first = traced(grad(function), X)
    assert_close(traced(mixed, X)(X), along(first, X), rtol=1e-6, atol=1e-7)


@pytest.mark.one_in(8)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@cases
def test_gradients_of_examples(name: str) -> None:
    gradient = grad(scalar(FUNCTIONS[name][1]))
    examples = torch.stack([X, X + 0.1])
    found = traced(vmap(gradient), examples)(examples)
    assert_close(found, torch.stack([traced(gradient, x)(x) for x in examples]))


@pytest.mark.one_in(3)
@cases
def test_compiled(name: str) -> None:
    function = FUNCTIONS[name][1]
    x = X.clone().requires_grad_()
    with normpass.registered():
        torch.compile(scalar(function), backend="aot_eager", fullgraph=True)(x).backward()
    assert_close(x.grad, traced(grad(scalar(function)), X)(X))


@pytest.mark.parametrize("columns", [2, 6])
def test_a_product_of_reflectors_is_as_large_for_any_number(columns: int) -> None:
    def step(A: Tensor, tau: Tensor) -> Any:
        return grad(lambda A: torch.linalg.householder_product(A, tau).sin().sum())(A)

    nodes = len(traced(step, fixed(8, columns), fixed(columns)).graph.nodes)
    assert nodes < 80


def test_a_call_that_nobody_differentiates_is_the_operators_own() -> None:
    graph = traced(lambda x: x.cumprod(1), X).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.cumprod.default
    ]


def test_a_maximum_without_self_has_a_whole_gradient() -> None:
    def total(x: Tensor) -> Tensor:
        base = torch.zeros(2, dtype=torch.float64)
        return base.scatter_reduce(0, torch.tensor([0, 1]), x, "amax", include_self=False).sum()

    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert traced(grad(total), x)(x).tolist() == [1, 1]
    assert grad(total)(x).tolist() == [0.5, 1], "mended: PyTorch halved the first"


def test_without_registration_torchs_own_are_in_force() -> None:
    op = find_op("aten.cumprod.default")
    before = dict(op.py_kernels)
    with normpass.registered():
        assert op.py_kernels != before
    assert op.py_kernels == before


def test_results_without_a_derivative_in_forward_mode() -> None:
    """What a norm saves has none, and is a floating tensor all the same."""
    op = torch.ops.aten.native_layer_norm.default
    kernel = differentiated(op)
    x, v = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        found = kernel(forward_ad.make_dual(x, v), [4], None, None, 1e-5)
        tangents = [forward_ad.unpack_dual(y).tangent for y in found]
        right = op(forward_ad.make_dual(x, v), [4], None, None, 1e-5)
        expected = forward_ad.unpack_dual(right[0]).tangent
    assert_close(tangents[0], expected)
    assert tangents[1:] == [None, None]
