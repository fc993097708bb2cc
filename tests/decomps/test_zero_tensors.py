"""Tangents that are zero and have no memory, as traces see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jvp

from normpass.decomps.activation import registered
from normpass.decomps.registry import by_op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def rules() -> Iterator[None]:
    with registered():
        yield


def zero(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor: Tensor = aten._efficientzerotensor(shape, dtype=dtype)
    return tensor


X = 2 * torch.arange(12.0).reshape(3, 4) - 5
CALLS = {
    "mul": lambda f, z: f(aten.mul.Tensor)(z(3, 4), X),
    "mul, broadcast": lambda f, z: f(aten.mul.Tensor)(X, z(2, 1, 4)),
    "mul, promoted": lambda f, z: f(aten.mul.Tensor)(X.long(), z(3, 4, dtype=torch.float64)),
    "mul, both": lambda f, z: f(aten.mul.Tensor)(z(3, 1), z(4)),
    "add, zero first": lambda f, z: f(aten.add.Tensor)(z(3, 4), X, alpha=3),
    "add, zero last": lambda f, z: f(aten.add.Tensor)(X, z(2, 3, 4), alpha=3),
    "add, promoted": lambda f, z: f(aten.add.Tensor)(X, z(3, 4, dtype=torch.float64)),
    "add, both": lambda f, z: f(aten.add.Tensor)(z(3, 4), z(4)),
    "add, a scalar": lambda f, z: f(aten.add.Tensor)(z(3, 4), torch.tensor(2.5).double()),
    "sub, zero first": lambda f, z: f(aten.sub.Tensor)(z(3, 4), X, alpha=2),
    "sub, zero last": lambda f, z: f(aten.sub.Tensor)(X[0], z(3, 4)),
    "div, zero first": lambda f, z: f(aten.div.Tensor)(z(3, 4), X),
    "div, integers": lambda f, z: f(aten.div.Tensor)(z(4, dtype=torch.int64), X.long()),
    "div, by zero": lambda f, z: f(aten.div.Tensor)(X, z(3, 4)),
    "div, zero by zero": lambda f, z: f(aten.div.Tensor)(z(3, 4), z(4)),
    "mul, a number": lambda f, z: f(aten.mul.Tensor)(z(3, 4), 2.5),
    "add, a number": lambda f, z: f(aten.add.Tensor)(z(3, 4), 2.5, alpha=3),
    "add, an integer to integers": lambda f, z: f(aten.add.Tensor)(z(4, dtype=torch.int64), 2),
    "sub, a number": lambda f, z: f(aten.sub.Tensor)(z(3, 4), 2, alpha=3),
    "div, by a number": lambda f, z: f(aten.div.Tensor)(z(4, dtype=torch.int64), 4),
    "mul, a number first": lambda f, z: f(aten.mul.Tensor)(2.5, z(3, 4)),
    "add, a number first": lambda f, z: f(aten.add.Tensor)(2.5, z(3, 4), alpha=3),
    "sub, a number first": lambda f, z: f(aten.sub.Tensor)(2, z(4, dtype=torch.int64)),
    "div, a number first": lambda f, z: f(aten.div.Tensor)(2.5, z(3, 4)),
    "linalg_cross": lambda f, z: f(aten.linalg_cross.default)(X, z(3, 4), dim=0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_kernel_is_the_operator_on_a_zero_with_memory(call: str) -> None:
    """Shape, dtype and values; what is zero again knows it, and nothing is an argument's alias."""
    kernels = by_op("zero_tensor")
    ours = CALLS[call](lambda op: kernels[op], zero)
    want = CALLS[call](lambda op: op, lambda *shape, **kw: torch.zeros(shape, **kw))
    torch.testing.assert_close(torch.clone(ours), want, equal_nan=True)
    assert ours._is_zerotensor() or ours.data_ptr() != X.data_ptr()


VIEWS = {
    "view": lambda z: z.view(2, -1),
    "reshape": lambda z: z.reshape(2, 6),
    "as_strided": lambda z: z.as_strided((2, 3), (3, 1), 1),
    "_reshape_alias": lambda z: aten._reshape_alias(z, (6, 2), (2, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_fake_zero_is_a_fake_zero(view: str) -> None:
    want = VIEWS[view](torch.zeros(3, 4))
    with FakeTensorMode(), enable_python_dispatcher():
        ours = VIEWS[view](zero(3, 4))
        assert ours.device.type == "cpu"
        assert ours._is_zerotensor()
    assert ours.shape == want.shape


def test_a_tangent_of_an_expanded_zero_can_be_written() -> None:
    kernel = by_op("zero_tensor")[aten._new_zeros_with_same_feature_meta.default]
    made = kernel(X, zero(1, 4).expand(3, 4))
    assert made.shape == (3, 4)
    assert made.copy_(X).equal(X)
    assert kernel(X[None].expand(2, 3, 4), zero(4), self_num_batch_dims=1).shape == (2, 4)


V, C = torch.sin(X.double()), torch.cos(X.double())
FUNCTIONS = {
    "expanded product": lambda x: (x.sum() * V).sum(),
    "product of sums": lambda x: ((x.sum(0) * x).sum(1, keepdim=True) * C).sum(),
    "through a view": lambda x: (x.view(12) * C.view(12)).sum(),
    "through a reshape": lambda x: (x.reshape(2, 6).sin() * C.view(2, 6)).sum(),
    "quotient": lambda x: (V / (x.sum() + 9)).sum(),
    "difference": lambda x: (V - x.mean()).square().sum(),
    "crossed": lambda x: (torch.linalg.cross(x, V, dim=0) * x).sum(),
}
TWICE = {
    "jvp_jvp": lambda f: lambda x: jvp(lambda y: jvp(f, (y,), (V,))[1], (x,), (C,))[1],
    "grad_jvp": lambda f: grad(lambda y: jvp(f, (y,), (V,))[1]),
    "jvp_grad": lambda f: lambda x: jvp(grad(f), (x,), (V,))[1],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("twice", TWICE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_compile(name: str, twice: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    function: Any = TWICE[twice](FUNCTIONS[name])
    run = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x = X.double() / 7 + 0.3
    torch.testing.assert_close(run(x), function(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "normpass"])
def test_graphs_have_no_zeros_without_memory(backend: str, dynamic: bool) -> None:
    """Without the rules this ends the process under aot_eager: the exponent's tangent is zero, and
    the product that takes it reads what is not there.
    """

    def tangent(x: Tensor, n: Tensor) -> Tensor:
        return jvp(lambda y: torch.ldexp(y, n), (x,), (x,))[1]

    torch._dynamo.reset()
    run = torch.compile(tangent, backend=backend, fullgraph=True, dynamic=dynamic)
    x, n = X.double(), torch.arange(4.0).double()
    torch.testing.assert_close(run(x, n), tangent(x, n))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "normpass"])
def test_a_dual_tensor_times_a_number_compiles(backend: str) -> None:
    """Whose tangent torch asks for with the number as the first operand."""

    def f(x: Tensor, tangent: Tensor) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            return forward_ad.unpack_dual((dual * 1.5 - 2.0) / 3.0 + 1)

    torch._dynamo.reset()
    found = torch.compile(f, backend=backend, fullgraph=True)(X, X.sin())
    torch.testing.assert_close(tuple(found), ((X * 1.5 - 2.0) / 3.0 + 1, X.sin() / 2))


def test_there_is_a_rule_for_each_kernel_of_torch() -> None:
    """A kernel that a later torch adds at this key would bring the fault back for its operator."""
    kernels = set()
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("ZeroTensor"):
        entry = next(
            line for line in torch._C._dispatch_dump(name).splitlines() if "ZeroTensor" in line
        )
        if "fallthrough" not in entry:
            kernels.add(name.removeprefix("aten::").partition(".")[0])
    ours = {op._schema.name.removeprefix("aten::") for op in by_op("zero_tensor")}
    assert kernels <= ours
    for op, rule in by_op("zero_tensor").items():
        assert op.py_kernels[DispatchKey.ZeroTensor] is rule
